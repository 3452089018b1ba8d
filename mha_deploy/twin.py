"""A bf16 graph's fp32 twin: the same nodes in fp32, every value rounded to bf16 and back.

ONNX Runtime computes no bf16 on a CPU, so a bf16 graph is checked there through its twin. What the
twin cannot show is how a GPU orders its sums; reports label what was checked through it.
"""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, shape_inference

BF16, FP32 = TensorProto.BFLOAT16, TensorProto.FLOAT


def write_twin(source: Path, path: Path) -> None:
    """Write the fp32 twin of the bf16 graph at `source`."""
    model = onnx.load(str(source))
    graph = model.graph
    inferred = shape_inference.infer_shapes(model).graph
    values = (*inferred.value_info, *inferred.input, *inferred.output)
    rounded = {value.name for value in values if value.type.tensor_type.elem_type == BF16}
    for initializer in graph.initializer:
        if initializer.data_type == BF16:
            array = numpy_helper.to_array(initializer).astype(ml_dtypes.bfloat16).astype(np.float32)
            initializer.CopyFrom(numpy_helper.from_array(array, initializer.name))
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type == BF16:
            value.type.tensor_type.elem_type = FP32
    nodes = [
        n for value in graph.input if value.name in rounded for n in _round(value.name, f"{value.name}.bf16")
    ]
    renamed = {value.name: f"{value.name}.bf16" for value in graph.input if value.name in rounded}
    for node in graph.node:
        nodes += _twin_of(node, rounded, renamed)
    del graph.node[:]
    graph.node.extend(nodes)
    del graph.value_info[:]
    onnx.save(model, str(path))


def _twin_of(node: onnx.NodeProto, rounded: set[str], renamed: dict[str, str]) -> list[onnx.NodeProto]:
    """`node` in fp32, with each of its bf16 outputs rounded under its old name."""
    twin = onnx.NodeProto()
    twin.CopyFrom(node)
    for attribute in twin.attribute:
        if node.op_type == "Cast" and attribute.name == "to" and attribute.i == BF16:
            attribute.i = FP32
        if attribute.HasField("t") and attribute.t.data_type == BF16:
            array = numpy_helper.to_array(attribute.t).astype(np.float32)
            attribute.t.CopyFrom(numpy_helper.from_array(array, attribute.t.name))
    twin.input[:] = [renamed.get(name, name) for name in node.input]
    after = []
    for index, name in enumerate(node.output):
        if name in rounded:
            twin.output[index] = f"{name}.exact"
            after += _round(f"{name}.exact", name)
    return [twin, *after]


def _round(source: str, target: str) -> list[onnx.NodeProto]:
    return [
        helper.make_node("Cast", [source], [f"{target}.narrow"], name=f"{target}.to_bf16", to=BF16),
        helper.make_node("Cast", [f"{target}.narrow"], [target], name=f"{target}.to_fp32", to=FP32),
    ]
