"""Sizes that are frozen and axes in another order."""

from __future__ import annotations

from mutants.graph import CONTEXT, Graph
from mutants.mutant import mutant


@mutant("the length fixed in the reshape of the query's heads")
def length_frozen(g: Graph) -> list[str]:
    (view,) = g.consumers(g.add_of("query").output[0])
    sizes = g.producer(view.input[1])
    fixed = [sizes.input[0], g.constant([8], "int64"), *sizes.input[2:]]
    view.input[1] = g.put([view], "Concat", *fixed, axis=0)
    return [view.input[1], view.name]


@mutant("the batch fixed to 1 in the reshape of the context")
def batch_frozen(g: Graph) -> list[str]:
    product = g.product_of("output")
    view = g.producer(product.input[0])
    sizes = g.producer(view.input[1])
    sizes.input[0] = g.constant([1], "int64")
    return [sizes.name, view.name]


@mutant("heads merged without the transpose that belongs there")
def heads_merged_in_wrong_order(g: Graph) -> list[str]:
    (transpose,) = g.consumers(CONTEXT)
    return g.bypass(transpose, CONTEXT)
