"""A graph's fp64 twin: the same nodes, every float in fp64, weights as they were before any rounding."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from mha_deploy.lowering import lower_to_portable
from mha_deploy.signature import Array
from mha_deploy.stored_weights import exact

FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)


def in_double(model: onnx.ModelProto, weights: Mapping[str, Array], head_dim: int) -> onnx.ModelProto:
    """`model` in fp64, with `Attention` spelled out, since ONNX Runtime computes none in fp64.

    `weights` are the checkpoint's tensors: a stored tensor that is one of them, rounded or
    transposed, is replaced by the exact one. So is the scale of the scores, 1 / sqrt(head_dim), which
    an attribute holds in fp32 only.
    """
    twin = onnx.ModelProto()
    twin.CopyFrom(model)
    graph = twin.graph
    for stored in graph.initializer:
        if stored.data_type in FLOATS:
            array = numpy_helper.to_array(stored)
            stored.CopyFrom(numpy_helper.from_array(exact(array, weights).astype(np.float64), stored.name))
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type in FLOATS:
            value.type.tensor_type.elem_type = TensorProto.DOUBLE
    for node in graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i in FLOATS:
                attribute.i = TensorProto.DOUBLE
            if attribute.HasField("t") and attribute.t.data_type in FLOATS:
                array = numpy_helper.to_array(attribute.t).astype(np.float64)
                attribute.t.CopyFrom(numpy_helper.from_array(array, attribute.t.name))
    del graph.value_info[:]
    lowered = lower_to_portable(twin).model
    scale = head_dim**-0.5
    _replace_scalar(lowered, math.sqrt(float(np.float32(scale))), math.sqrt(scale))
    return lowered


def _replace_scalar(model: onnx.ModelProto, old: float, new: float) -> None:
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t") and attribute.t.data_type == TensorProto.DOUBLE:
                array = numpy_helper.to_array(attribute.t)
                if array.size == 1 and array.item() == old:
                    exact_array = np.full_like(array, new)
                    attribute.t.CopyFrom(numpy_helper.from_array(exact_array, attribute.t.name))
