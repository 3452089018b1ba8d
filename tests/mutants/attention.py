"""Scores, softmax, causality and heads computed otherwise."""

from __future__ import annotations

from onnx import helper, numpy_helper

from mutants.graph import CONTEXT, HEADS, Graph
from mutants.mutant import CANONICAL, CAUSAL, DEMO, PORTABLE, mutant


@mutant("scores scaled by 1/head_dim, not by its root", forms=CANONICAL)
def wrong_scale(g: Graph) -> list[str]:
    node = g.only("Attention")
    head_dim = g.array(g.product_of("query").input[1]).shape[1] // HEADS
    node.attribute.append(helper.make_attribute("scale", 1.0 / head_dim))
    return [node.name]


@mutant("scores scaled 1 % too large", forms=(PORTABLE,))
def scale_one_percent_off(g: Graph) -> list[str]:
    scaled = g.consumers(g.heads_of("query"))
    (node,) = (n for n in scaled if n.op_type == "Mul")
    factor = g.producer(node.input[1])
    stored = numpy_helper.to_array(factor.attribute[0].t)
    node.input[1] = g.constant(stored * 1.01, "float32")
    return [node.name]


@mutant("scores capped softly at 30", forms=CANONICAL)
def scores_capped(g: Graph) -> list[str]:
    node = g.only("Attention")
    kept = [a for a in node.attribute if a.name != "softcap"]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute("softcap", 30.0)])
    return [node.name]


@mutant("a query does not see its own position", forms=(CAUSAL,))
def causal_off_by_one_back(g: Graph) -> list[str]:
    node = g.only("GreaterOrEqual")
    node.op_type = "Greater"
    return [node.name]


@mutant("a query sees one position of the future", forms=(CAUSAL,))
def causal_off_by_one_ahead(g: Graph) -> list[str]:
    node = g.only("GreaterOrEqual")
    later = g.put([node], "Add", node.input[0], g.constant([1], "int64"))
    node.input[0] = later
    return [later]


@mutant("the future not masked", forms=(CAUSAL,))
def causality_lost(g: Graph) -> list[str]:
    return [g.after(g.only("GreaterOrEqual").output[0], "Or", g.constant(True, "bool"))]


@mutant("causal where it must not be", forms=(DEMO,))
def causal_by_mistake(g: Graph) -> list[str]:
    node = g.only("Attention")
    kept = [a for a in node.attribute if a.name != "is_causal"]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute("is_causal", 1)])
    return [node.name]


@mutant("softmax over the queries, not over the keys", forms=(PORTABLE,))
def softmax_over_the_wrong_axis(g: Graph) -> list[str]:
    node = g.only("Softmax")
    del node.attribute[:]
    node.attribute.append(helper.make_attribute("axis", -2))
    return [node.name]


@mutant("heads 0 and 1 swapped in the context")
def heads_swapped(g: Graph) -> list[str]:
    return [g.after(CONTEXT, "Gather", g.constant([1, 0, *range(2, HEADS)], "int64"), axis=1)]


@mutant("keys used as values and values as keys")
def key_and_value_swapped(g: Graph) -> list[str]:
    key, value = g.heads_of("key"), g.heads_of("value")
    other = {key: value, value: key}
    readers = {n.name: n for each in (key, value) for n in g.consumers(each) if n.op_type != "Shape"}
    for node in readers.values():
        node.input[:] = [other.get(each, each) for each in node.input]
    return list(readers)
