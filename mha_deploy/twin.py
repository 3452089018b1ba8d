"""A 16-bit graph's fp32 twin: the same nodes in fp32, every value rounded to 16 bits and back.

ONNX Runtime computes no bf16 on a CPU, so a bf16 graph is checked there through its twin. It runs
fp16 there in fp32, and drops the rounding between two nodes, so that a value which overflows fp16 may
stay finite; through its twin it does not. What a twin cannot show is how a GPU orders its sums;
reports label what was checked through it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, shape_inference

FP32 = TensorProto.FLOAT
HALVES: dict[int, str] = {TensorProto.BFLOAT16: "bf16", TensorProto.FLOAT16: "fp16"}


def write_twin(source: Path, path: Path) -> None:
    """Write the fp32 twin of the bf16 or fp16 graph at `source`."""
    model = onnx.load(str(source))
    graph = model.graph
    inferred = shape_inference.infer_shapes(model).graph
    values = (*inferred.value_info, *inferred.input, *inferred.output)
    types = {value.name: value.type.tensor_type.elem_type for value in values}
    rounded = {name: half for name, half in types.items() if half in HALVES}
    for initializer in graph.initializer:
        if initializer.data_type in HALVES:
            array = numpy_helper.to_array(initializer).astype(np.float32)
            initializer.CopyFrom(numpy_helper.from_array(array, initializer.name))
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type in HALVES:
            value.type.tensor_type.elem_type = FP32
    nodes = [
        node
        for value in graph.input
        if value.name in rounded
        for node in _round(value.name, f"{value.name}.rounded", rounded[value.name])
    ]
    renamed = {value.name: f"{value.name}.rounded" for value in graph.input if value.name in rounded}
    for node in graph.node:
        nodes += _twin_of(node, rounded, renamed)
    del graph.node[:]
    graph.node.extend(nodes)
    del graph.value_info[:]
    onnx.save(model, str(path))


def _twin_of(node: onnx.NodeProto, rounded: dict[str, int], renamed: dict[str, str]) -> list[onnx.NodeProto]:
    """`node` in fp32, with each of its 16-bit outputs rounded under its old name."""
    twin = onnx.NodeProto()
    twin.CopyFrom(node)
    for attribute in twin.attribute:
        if node.op_type == "Cast" and attribute.name == "to" and attribute.i in HALVES:
            attribute.i = FP32
        if attribute.HasField("t") and attribute.t.data_type in HALVES:
            array = numpy_helper.to_array(attribute.t).astype(np.float32)
            attribute.t.CopyFrom(numpy_helper.from_array(array, attribute.t.name))
    twin.input[:] = [renamed.get(name, name) for name in node.input]
    after = []
    for index, name in enumerate(node.output):
        if name in rounded:
            twin.output[index] = f"{name}.exact"
            after += _round(f"{name}.exact", name, rounded[name])
    return [twin, *after]


def _round(source: str, target: str, half: int) -> list[onnx.NodeProto]:
    narrow, to = f"{target}.narrow", f"{target}.to_{HALVES[half]}"
    return [
        helper.make_node("Cast", [source], [narrow], name=to, to=half),
        helper.make_node("Cast", [narrow], [target], name=f"{target}.to_fp32", to=FP32),
    ]
