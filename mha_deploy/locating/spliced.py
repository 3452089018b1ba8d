"""Nodes of the canonical graph put in the place of their quantised forms, matched by what they give."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
from onnx import NodeProto

from mha_deploy.locating.pairing import live_nodes, producers


def quantised_nodes(quantised: onnx.ModelProto, canonical: onnx.ModelProto) -> tuple[str, ...]:
    """Names of the canonical products with weights that `quantised` computes in another way."""
    stored = {tensor.name for tensor in canonical.graph.initializer}
    made_by = producers(quantised)
    return tuple(
        node.name
        for node in canonical.graph.node
        if node.op_type in ("MatMul", "Gemm")
        and stored & set(node.input)
        and not _is_float(made_by.get(node.output[0]), quantised)
    )


def _is_float(node: NodeProto | None, model: onnx.ModelProto) -> bool:
    """A product whose operands are not dequantised right before it."""
    if node is None or node.op_type not in ("MatMul", "Gemm"):
        return False
    made_by = producers(model)
    return not any(name in made_by and made_by[name].op_type == "DequantizeLinear" for name in node.input)


def splice_fp32(
    quantised: onnx.ModelProto, canonical: onnx.ModelProto, nodes: Sequence[str]
) -> onnx.ModelProto:
    """`quantised` with the canonical `nodes`, by name, computing in fp32.

    A value keeps its name through quantisation; where one that is needed has none (fused away), the
    canonical nodes above it come along.
    """
    model = onnx.ModelProto()
    model.CopyFrom(quantised)
    graph = model.graph
    stored = {tensor.name: tensor for tensor in canonical.graph.initializer}
    theirs, ours = producers(canonical), producers(model)
    given = {value.name for value in graph.input}
    wanted = {node.output[0]: node for node in canonical.graph.node if node.name in nodes}
    replaced = set(wanted)
    waiting = list(wanted.values())
    while waiting:
        for name in waiting.pop().input:
            if name and name not in ours and name not in given and name not in wanted and name in theirs:
                wanted[name] = theirs[name]
                waiting.append(theirs[name])
    brought = {f"{name}.fp32" for node in wanted.values() for name in node.input if name in stored}
    kept = [node for node in graph.node if not replaced & set(node.output)]
    for node in canonical.graph.node:
        if node.output and node.output[0] in wanted:
            copy = onnx.NodeProto()
            copy.CopyFrom(node)
            copy.input[:] = [f"{name}.fp32" if name in stored else name for name in node.input]
            kept.append(copy)
    for name in sorted(brought):
        tensor = onnx.TensorProto()
        tensor.CopyFrom(stored[name.removesuffix(".fp32")])
        tensor.name = name
        graph.initializer.append(tensor)
    del graph.node[:], graph.value_info[:]
    graph.node.extend(_sorted(kept))
    live = live_nodes(model)
    del graph.node[:]
    graph.node.extend([onnx.NodeProto.FromString(node.SerializeToString()) for node in live])
    return model


def _sorted(nodes: Sequence[NodeProto]) -> list[NodeProto]:
    """In an order in which every node comes after what it reads."""
    made = {name for node in nodes for name in node.output}
    ordered, waiting = list[NodeProto](), [onnx.NodeProto.FromString(n.SerializeToString()) for n in nodes]
    while waiting:
        ready = [node for node in waiting if not made & set(node.input)]
        if not ready:
            return ordered + waiting  # a circle: the runtime says so
        ordered += ready
        waiting = [node for node in waiting if made & set(node.input)]
        made -= {name for node in ready for name in node.output}
    return ordered
