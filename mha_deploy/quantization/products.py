"""The matrix products of a graph whose right side is a constant: what int8 can take over."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import NodeProto, helper, numpy_helper

from mha_deploy.lowering.graph_edit import is_default, label
from mha_deploy.signature import Array

ROLES = ("query", "key", "value", "output")


@dataclass(frozen=True, slots=True)
class Product:
    """`activation` [..., in] times `weight` [in, out], by their names, in the MatMul `node`.

    `role` says what it is for, read from where it stands around the Attention node: one of ROLES, or
    "" where it is none of them.
    """

    node: str
    role: str
    activation: str
    weight: str


def find_products(model: onnx.ModelProto) -> tuple[Product, ...]:
    """The MatMul nodes with a constant right side of two dimensions, in the order of the graph."""
    graph = Graph(model)
    roles = _roles(graph)
    return tuple(
        Product(label(node), roles.get(label(node), ""), node.input[0], node.input[1])
        for node in model.graph.node
        if graph.is_product(node)
    )


def split_gemms(model: onnx.ModelProto) -> None:
    """Turn every Gemm of an activation with constant weights into MatMul and Add, in place."""
    graph, nodes = Graph(model), list[NodeProto]()
    for node in model.graph.node:
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        plain = is_default(node, "Gemm") and node.input[1] in graph.constants and not attributes.get("transA")
        if not plain or attributes.get("alpha", 1.0) != 1.0 or attributes.get("beta", 1.0) != 1.0:
            nodes.append(node)
            continue
        weight, biased = node.input[1], len(node.input) > 2 and bool(node.input[2])
        if attributes.get("transB"):
            weight = f"{label(node)}/transposed"
            array = graph.array(node.input[1]).T.copy()
            model.graph.initializer.append(numpy_helper.from_array(array, weight))
        made = f"{node.output[0]}/product" if biased else node.output[0]
        nodes.append(helper.make_node("MatMul", [node.input[0], weight], [made], name=label(node)))
        if biased:
            add = helper.make_node("Add", [made, node.input[2]], [node.output[0]], name=f"{label(node)}/bias")
            nodes.append(add)
    kept = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del model.graph.node[:]
    model.graph.node.extend(kept)


class Graph:
    """Who makes and who reads each value of a model's main graph."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.constants = {tensor.name: tensor for tensor in model.graph.initializer}
        self.made_by = {name: node for node in model.graph.node for name in node.output if name}
        self.outputs = {value.name for value in model.graph.output}
        self._readers: dict[str, list[NodeProto]] = {}
        for node in model.graph.node:
            for name in node.input:
                self._readers.setdefault(name, []).append(node)

    def array(self, name: str) -> Array:
        return numpy_helper.to_array(self.constants[name])

    def readers(self, name: str) -> list[NodeProto]:
        return self._readers.get(name, [])

    def is_product(self, node: NodeProto) -> bool:
        constant = self.constants.get(node.input[1]) if is_default(node, "MatMul") else None
        return constant is not None and len(constant.dims) == 2 and node.input[0] not in self.constants

    def only_reader(self, name: str) -> NodeProto | None:
        """The node that alone reads a value, where no other does and the graph does not give it out."""
        readers = self.readers(name)
        return readers[0] if len(readers) == 1 and name not in self.outputs else None


def _roles(graph: Graph) -> dict[str, str]:
    """Roles by node. The first product met on the way up from an operand of Attention makes it."""
    roles: dict[str, str] = {}
    attentions = [node for node in graph.made_by.values() if is_default(node, "Attention")]
    for attention in attentions:
        for role, operand in zip(ROLES[:3], attention.input[:3], strict=True):
            roles |= {label(node): role for node in _nearest_products(graph, [operand])}
    ends = [name for name in graph.outputs if name in graph.made_by]
    found = {label(node) for node in _nearest_products(graph, ends)}
    return {**{name: "output" for name in found if attentions}, **roles}


def _nearest_products(graph: Graph, names: Iterable[str]) -> list[NodeProto]:
    """Products above `names` with no other product between; an Attention is not looked through."""
    found: list[NodeProto] = []
    left, seen = list(names), set[str]()
    while left:
        node = graph.made_by.get(left.pop())
        if node is None or node.output[0] in seen or is_default(node, "Attention", "Shape"):
            continue
        seen.add(node.output[0])
        if graph.is_product(node):
            found.append(node)
        else:
            left += list(node.input)
    return found


def widths(graph: Graph, product: Product) -> tuple[int, int]:
    """Rows and columns of a product's weights: features in, features out."""
    rows, columns = graph.constants[product.weight].dims
    return int(rows), int(columns)


def largest_by_row(weights: Iterable[Array]) -> Array:
    """max|W| of each input feature over all of the weights that read it, [in]."""
    found: Array = np.max([np.abs(weight).max(axis=1) for weight in weights], axis=0)
    return found
