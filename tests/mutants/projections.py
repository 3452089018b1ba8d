"""Weights, biases and the precision of the projections."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from mutants.graph import CONTEXT, Graph
from mutants.mutant import mutant


@mutant("query and key projected by each other's weights")
def query_and_key_weights_swapped(g: Graph) -> list[str]:
    query, key = g.product_of("query"), g.product_of("key")
    query.input[1], key.input[1] = key.input[1], query.input[1]
    return [query.name, key.name]


@mutant("the Add of the query's bias lost")
def query_bias_lost(g: Graph) -> list[str]:
    return _without_bias(g, "query")


@mutant("the Add of the value's bias lost")
def value_bias_lost(g: Graph) -> list[str]:
    return _without_bias(g, "value")


@mutant("the Add of the output's bias lost")
def output_bias_lost(g: Graph) -> list[str]:
    return _without_bias(g, "output")


def _without_bias(g: Graph, projection: str) -> list[str]:
    add = g.add_of(projection)
    return g.bypass(add, add.input[0])


@mutant("the output's bias added twice")
def output_bias_twice(g: Graph) -> list[str]:
    product = g.product_of("output")
    return [g.after(product.output[0], "Add", "output.bias")]


@mutant("one weight row of the query projection 0.1 % too large")
def query_weight_row_off(g: Graph) -> list[str]:
    return _row_off(g, "query")


@mutant("one weight row of the value projection 0.1 % too large")
def value_weight_row_off(g: Graph) -> list[str]:
    return _row_off(g, "value")


@mutant("one weight row of the output projection 0.1 % too large")
def output_weight_row_off(g: Graph) -> list[str]:
    return _row_off(g, "output")


def _row_off(g: Graph, projection: str) -> list[str]:
    product = g.product_of(projection)
    weight = g.array(product.input[1])  # [in, out]: a row of PyTorch's weight is a column here
    weight[:, 5] *= np.float32(1.001)
    g.store(product.input[1], weight)
    return [product.name]


@mutant("the output's weight transposed")
def output_weight_transposed(g: Graph) -> list[str]:
    product = g.product_of("output")
    g.store(product.input[1], g.array(product.input[1]).T.copy())
    return [product.name]


@mutant("the value's weight rounded to bf16")
def value_weight_in_bf16(g: Graph) -> list[str]:
    product = g.product_of("value")
    bits = g.array(product.input[1]).view(np.uint32)
    g.store(product.input[1], ((bits + 0x8000) & 0xFFFF0000).astype(np.uint32).view(np.float32))
    return [product.name]


@mutant("values rounded to fp16 on their way")
def fp16_cast_in_the_middle(g: Graph) -> list[str]:
    value = g.add_of("value").output[0]
    narrow = g.after(value, "Cast", to=TensorProto.FLOAT16)
    return [narrow, g.after(narrow, "Cast", to=TensorProto.FLOAT)]


@mutant("context rounded to fp16 on its way")
def fp16_cast_of_the_context(g: Graph) -> list[str]:
    narrow = g.after(CONTEXT, "Cast", to=TensorProto.FLOAT16)
    return [narrow, g.after(narrow, "Cast", to=TensorProto.FLOAT)]
