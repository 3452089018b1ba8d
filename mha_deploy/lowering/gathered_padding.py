"""Rows that a mask takes away, as rows looked up: a row of zeros stands behind those of the input.

    Where(mask[B, S, 1], x[B, S, d], 0)   ->   Gather([x; 0], row of x, or the last, by mask)

Two copies of rows, where ONNX Runtime's Where computes twice what it may not need, and joins the two:
where.cc in its core/providers/cpu/tensor. Whatever a masked row holds, NaN too, is in no row of the result.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import NodeProto, TensorProto

from mha_deploy.lowering.graph_edit import (
    Emitter,
    constants_of,
    drop_unread,
    opset_of,
    producers,
    rewrite_nodes,
)
from mha_deploy.lowering.key_mask import zeroing_mask
from mha_deploy.lowering.steps import Lowered, Step

# The first whose Reshape can make an axis of no rows.
OPSET = 14


def gather_padding(model: onnx.ModelProto) -> Lowered:
    """The model with each selection by a mask [batch, row] of rows [batch, row, width] or 0 as a look-up.

    The width must be known, and the mask's axes be those of the rows. Inputs and outputs stay. The model
    comes back as it is where there is none, or its opset is below 14.
    """
    if opset_of(model) < OPSET:
        return Lowered(model, ())
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    makers = producers(copy)
    constants = constants_of(copy)

    def rewrite(node: NodeProto, e: Emitter) -> list[Step]:
        name = zeroing_mask(node, makers, constants)
        mask, rows = e.infos.get(name), e.infos.get(node.input[1])
        if mask is None or rows is None or mask.dims != rows.dims[:-1] or not all(mask.dims):
            return []
        width = rows.dims[-1]
        if len(rows.dims) != 3 or not isinstance(width, int):
            return []
        no_row = e.constant(np.zeros((1, width)), rows.dtype)
        longer = e.op("Concat", e.op("Reshape", node.input[1], e.ints(-1, width)), no_row, axis=0)
        e.op("Gather", longer, _numbers(e, name), out=node.output[0], axis=0)
        return [Step(e.prefix, "gather-padding", "rows are copied, and nothing is computed")]

    steps = rewrite_nodes(copy, ("Where",), rewrite)
    if not steps:
        return Lowered(model, ())
    drop_unread(copy)
    return Lowered(copy, tuple(steps))


def _numbers(e: Emitter, mask: str) -> str:
    """[B, S], the number of each row, or that of the row behind the last where it is masked."""
    last = e.op("Size", mask)
    numbers = e.op("Range", e.scalar(0, TensorProto.INT64), last, e.scalar(1, TensorProto.INT64))
    return e.op("Where", mask, e.op("Reshape", numbers, e.op("Shape", mask), allowzero=1), last)
