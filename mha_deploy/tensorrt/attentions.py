"""The attentions of an ONNX graph: operators, and MatMul-Softmax-MatMul chains."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import onnx
from onnx import helper, shape_inference

from mha_deploy.tensorrt.graph import FLOATS, Graph, node_name

_OPERATORS = {("", "Attention"), ("ai.onnx", "Attention"), ("com.microsoft", "MultiHeadAttention")}
_PRODUCTS = {"MatMul", "Einsum"}
# What may stand between the scores and their softmax, and between the softmax and the values.
_BETWEEN = {"Add", "Sub", "Mul", "Div", "Where", "Cast", "Clip", "Max", "Min", "Tanh", "Identity", "Dropout",
            "QuantizeLinear", "DequantizeLinear", "Reshape"}  # fmt: skip
_STEPS = 8


@dataclass(frozen=True, slots=True)
class Attention:
    """One attention. Sizes are 0 and precision is "" where the graph does not tell.

    `name` is the node that stands for it in a plan: the operator, or the chain's softmax.
    """

    name: str
    operator: bool
    precision: str
    head_dim: int
    value_dim: int
    mask: str


@dataclass(slots=True)
class Wiring:
    """Who makes and who reads each tensor, with the shapes and types that inference finds."""

    makes: dict[str, onnx.NodeProto] = field(default_factory=dict)
    reads: dict[str, list[onnx.NodeProto]] = field(default_factory=lambda: defaultdict(list))
    kinds: dict[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    weights: frozenset[str] = frozenset()

    def dtype(self, name: str) -> str:
        return FLOATS.get(self.kinds.get(name, (0, ()))[0], "")

    def shape(self, name: str) -> tuple[int, ...]:
        """Sizes of the axes, 0 for one that is dynamic or unknown; () when the rank is unknown."""
        return self.kinds.get(name, (0, ()))[1]

    def last(self, name: str) -> int:
        shape = self.shape(name)
        return shape[-1] if shape else 0


def wire(model: onnx.ModelProto) -> Wiring:
    inferred = shape_inference.infer_shapes(model, data_prop=True).graph
    wiring = Wiring(weights=frozenset(t.name for t in inferred.initializer))
    for node in inferred.node:
        wiring.makes.update(dict.fromkeys(node.output, node))
        for name in node.input:
            wiring.reads[name].append(node)
    for value in (*inferred.input, *inferred.value_info, *inferred.output):
        kind = value.type.tensor_type
        wiring.kinds[value.name] = (kind.elem_type, tuple(axis.dim_value for axis in kind.shape.dim))
    for tensor in inferred.initializer:
        wiring.kinds[tensor.name] = (tensor.data_type, tuple(tensor.dims))
    return wiring


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def given(node: onnx.NodeProto, position: int) -> str:
    """The name of an input, "" when it is left out."""
    return node.input[position] if len(node.input) > position else ""


def is_operator(node: onnx.NodeProto) -> bool:
    return (node.domain, node.op_type) in _OPERATORS


def find_attentions(graph: Graph) -> tuple[Attention, ...]:
    """Every attention of the main graph, in its order."""
    wiring = wire(graph.model)
    return tuple(_find(graph.model.graph, wiring))


def _find(graph: onnx.GraphProto, wiring: Wiring) -> Iterator[Attention]:
    for node in graph.node:
        if is_operator(node):
            yield _operator(node, wiring)
        elif node.op_type == "Softmax":
            scores = _upstream_product(node.input[0], wiring)
            values = _downstream_product(node.output[0], wiring)
            if scores is not None and values is not None:
                yield _chain(node, scores, values, wiring)


def head_sizes(node: onnx.NodeProto, wiring: Wiring) -> tuple[int, int]:
    """Query/key and value head size of an attention operator, 0 where the graph does not tell."""
    options = attributes(node)
    heads = options.get("q_num_heads", options.get("num_heads", 0))
    kv_heads = options.get("kv_num_heads", heads)
    sizes = []
    for position, count in ((0, heads), (2, kv_heads)):
        name = given(node, position)
        wide = wiring.last(name)
        sizes.append(wide // count if len(wiring.shape(name)) == 3 and count else wide)
    return sizes[0], sizes[1]


def _operator(node: onnx.NodeProto, wiring: Wiring) -> Attention:
    head, value = head_sizes(node, wiring)
    mask = given(node, 5 if node.op_type == "MultiHeadAttention" else 3)
    kind = "none" if not mask else wiring.dtype(mask) or "bool"
    if attributes(node).get("is_causal", 0) and not mask:
        kind = "causal"
    # Casts to fp32 around the operator ask for fp32 accumulation: the kernel still reads fp16.
    precision = wiring.dtype(_before_cast(node.input[0], wiring))
    return Attention(node_name(node), True, precision, head, value, kind)


def _before_cast(name: str, wiring: Wiring) -> str:
    maker = wiring.makes.get(name)
    return maker.input[0] if maker is not None and maker.op_type == "Cast" else name


def _chain(
    softmax: onnx.NodeProto, scores: onnx.NodeProto, values: onnx.NodeProto, wiring: Wiring
) -> Attention:
    query = scores.input[0]
    return Attention(
        node_name(softmax),
        False,
        wiring.dtype(softmax.input[0]),
        wiring.last(query) if scores.op_type == "MatMul" else 0,
        wiring.last(values.input[1]) if values.op_type == "MatMul" else 0,
        "unknown",
    )


def _upstream_product(name: str, wiring: Wiring) -> onnx.NodeProto | None:
    """The product of two computed tensors that the softmax's input comes from."""
    level = [name]
    for _ in range(_STEPS):
        makers = [wiring.makes[n] for n in level if n in wiring.makes]
        for node in makers:
            if node.op_type in _PRODUCTS and not wiring.weights.intersection(node.input):
                return node
        level = [n for node in makers if node.op_type in _BETWEEN for n in node.input]
    return None


def _downstream_product(name: str, wiring: Wiring) -> onnx.NodeProto | None:
    level = [name]
    for _ in range(_STEPS):
        readers = [(n, node) for n in level for node in wiring.reads[n]]
        for tensor, node in readers:
            if node.op_type in _PRODUCTS and node.input[0] == tensor:
                return node
        level = [out for _, node in readers if node.op_type in _BETWEEN for out in node.output]
    return None
