"""Which value of one graph is which of another: by name, by what makes it, past casts, and by its numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx
from onnx import NodeProto, TensorProto

from mha_deploy.lowering.graph_edit import label

_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)


def passes_on(node: NodeProto) -> bool:
    """Gives what it reads, but for the number format: its value in fp64 is its input's."""
    to = next((a.i for a in node.attribute if a.name == "to"), 0)
    return node.op_type == "Identity" or (node.op_type == "Cast" and to in _FLOATS)


def producers(model: onnx.ModelProto) -> dict[str, NodeProto]:
    return {name: node for node in model.graph.node for name in node.output if name}


def live_nodes(model: onnx.ModelProto) -> list[NodeProto]:
    """The nodes that an output depends on, in the file's order."""
    made_by = producers(model)
    needed = [value.name for value in model.graph.output]
    live: set[str] = set()
    while needed:
        node = made_by.get(needed.pop())
        if node is not None and node.output[0] not in live:
            live.add(node.output[0])
            needed += [name for name in node.input if name]
    return [node for node in model.graph.node if node.output[0] in live]


def aliases(model: onnx.ModelProto, truths: Iterable[str]) -> dict[str, str]:
    """For each value that is another's cast or copy, in either direction, the one that has a truth."""
    known = dict.fromkeys(truths, "")
    same = {name: name for name in known}
    for nodes in (model.graph.node, reversed(model.graph.node)):
        for node in nodes:
            if passes_on(node):
                source, target = node.input[0], node.output[0]
                if source in same:
                    same.setdefault(target, same[source])
                elif target in same:
                    same.setdefault(source, same[target])
    return same


def paired(suspect: onnx.ModelProto, expected: onnx.ModelProto) -> dict[str, str]:
    """Values of `suspect` that are values of `expected`, by name or by operator and paired inputs."""
    made_by = producers(expected)
    names = {stored.name for stored in expected.graph.initializer}
    names |= {value.name for value in expected.graph.input}
    shapes = {_shape_of(node): node for node in expected.graph.node}
    pairs: dict[str, str] = {}
    for node in suspect.graph.node:
        for name in node.output:
            if name in made_by:
                pairs[name] = name
        if any(name and name not in pairs for name in node.output):
            inputs = [pairs.get(name, name if name in names else "?") for name in node.input]
            twin = shapes.get((node.op_type, node.domain, *inputs))
            if twin is not None and len(twin.output) == len(node.output):
                pairs |= {
                    ours: theirs
                    for ours, theirs in zip(node.output, twin.output, strict=True)
                    if ours and ours not in pairs
                }
    return pairs


def _shape_of(node: NodeProto) -> tuple[str, ...]:
    return (node.op_type, node.domain, *node.input)


def unjudged_above(
    node: NodeProto, made_by: Mapping[str, NodeProto], judged: Iterable[str], stored: Iterable[str]
) -> list[NodeProto]:
    """Nodes above `node` that were not compared, up to values that were."""
    stop, waiting, found = {*judged, *stored}, [node], dict[str, NodeProto]()
    while waiting:
        for name in waiting.pop().input:
            above = made_by.get(name)
            if above is not None and name not in stop and above.op_type != "Constant":
                if label(above) not in found:
                    waiting.append(above)
                found.setdefault(label(above), above)
    return list(found.values())
