"""How a node differs from the one that the reference has in its place."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import NodeProto, helper, numpy_helper

from mha_deploy.locating.pairing import passes_on, producers
from mha_deploy.lowering.graph_edit import label
from mha_deploy.signature import Array
from mha_deploy.stored_weights import is_transposed, parameter_of


def differences(
    node: NodeProto,
    suspect: onnx.ModelProto,
    expected: onnx.ModelProto,
    pairs: Mapping[str, str],
    weights: Mapping[str, Array],
) -> tuple[str, ...]:
    """Each difference in a sentence; none where the two nodes read and do the same."""
    twin = producers(expected).get(pairs.get(node.output[0], ""))
    if twin is None:
        return (f"the reference has no {node.op_type} here",)
    if passes_on(node) and not passes_on(twin):
        return (f"the reference has no {node.op_type} behind {node.input[0]!r}",)
    if (node.op_type, node.domain) != (twin.op_type, twin.domain):
        reads = ", ".join(name for name in twin.input if name)
        return (f"{node.op_type}, the reference has {twin.op_type} ({label(twin)}) of {reads}",)
    found = [*_attributes(node, twin), *_inputs(node, twin, suspect, pairs)]
    return (*found, *_stored(node, twin, suspect, expected, weights))


def _attributes(node: NodeProto, twin: NodeProto) -> list[str]:
    ours, theirs = ({a.name: helper.get_attribute_value(a) for a in n.attribute} for n in (node, twin))
    return [
        f"attribute {name} is {_shown(ours.get(name))}, the reference has {_shown(theirs.get(name))}"
        for name in sorted({*ours, *theirs})
        if repr(ours.get(name)) != repr(theirs.get(name))
    ]


def _shown(value: object) -> str:
    return "none" if value is None else str(value).strip().splitlines()[0]


def _inputs(
    node: NodeProto, twin: NodeProto, suspect: onnx.ModelProto, pairs: Mapping[str, str]
) -> list[str]:
    found, made_by = [], producers(suspect)
    there = {
        *made_by,
        *(t.name for t in suspect.graph.initializer),
        *(v.name for v in suspect.graph.input),
        "",
    }
    for index in range(max(len(node.input), len(twin.input))):
        ours, theirs = (n.input[index] if index < len(n.input) else "" for n in (node, twin))
        by = f" of the {made_by[ours].op_type} node {label(made_by[ours])}" if ours in made_by else ""
        if ours not in there:
            found.append(f"reads {ours!r} as input {index}, which nothing gives")
        elif pairs.get(ours, ours) != theirs:
            found.append(f"reads {repr(ours) if ours else 'nothing'}{by} as input {index}, not {theirs!r}")
    return found


def _stored(
    node: NodeProto,
    twin: NodeProto,
    suspect: onnx.ModelProto,
    expected: onnx.ModelProto,
    weights: Mapping[str, Array],
) -> list[str]:
    """Weights and constants that the two read in the same place and that are not equal."""
    ours, theirs = ({t.name: t for t in model.graph.initializer} for model in (suspect, expected))
    found = []
    for mine, other in zip(node.input, twin.input, strict=False):
        if mine in ours and other in theirs:
            array, right = numpy_helper.to_array(ours[mine]), numpy_helper.to_array(theirs[other])
            if array.shape != right.shape:
                found.append(f"{mine} has shape {list(array.shape)}, the reference {list(right.shape)}")
            elif not np.array_equal(array, right):
                found.append(f"{mine} {_unequal(array, right, weights)}")
    return found


def _unequal(array: Array, right: Array, weights: Mapping[str, Array]) -> str:
    name = parameter_of(right, weights)
    of = f" from {name}" if name else ""
    wrong = np.asarray(array != right)
    if right.dtype.kind != "f":
        return f"differs{of}"
    off = np.abs(array.astype(np.float64) - right.astype(np.float64))
    norm = float(np.linalg.norm(right[wrong].astype(np.float64)))
    relative = float(np.linalg.norm(off)) / norm if norm else np.inf
    where = ""
    if array.ndim == 2:
        # A weight is stored transposed or not; its rows are those of the checkpoint's tensor.
        rows = wrong.T if is_transposed(right, weights) else wrong
        touched = np.flatnonzero(rows.any(axis=1))
        where = f" in row {touched[0]}" if len(touched) == 1 else f" in {len(touched)} rows"
    return f"differs{of} by {relative:.2g} of itself{where}"
