"""A block's projections and attention as ONNX Runtime's own operator `com.microsoft.Attention`.

    Attention(x W_q + b_q, x W_k + b_k, x W_v + b_v, mask)   ->   any(mask) * Attention(x, W, b, mask)

It writes each head's query, key and value where the core reads them, so that the projections' results
are not turned round in between. Where a row's mask keeps nothing the operator answers with the mean of
the values, as does any softmax that adds a large negative number; here, as in PyTorch, that is 0, and
the factor makes it so. Source of its inputs and attributes: ONNX Runtime's docs/ContribOperators.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from mha_deploy.lowering.attention_node import AttentionNode, read_attention
from mha_deploy.lowering.flat_heads import flatten_heads
from mha_deploy.lowering.fused_projections import Projection, projections
from mha_deploy.lowering.graph_edit import (
    Emitter,
    TensorInfo,
    drop_unread,
    is_default,
    opset_of,
    producers,
    read_names,
    rewrite_nodes,
)
from mha_deploy.lowering.steps import Lowered, Step

DOMAIN = "com.microsoft"
# Added to the scores of what is not kept: no score is so large that anything is left of it.
MASKED = -3.4e38


def whole_attention(model: onnx.ModelProto) -> Lowered:
    """The model with each self attention, its three projections included, as one node.

    That is an `Attention` of fp32 whose query, key and value are projections of one tensor, as many key
    heads as query heads, and no mask but causality, or one of keys [batch, key]. Others stay as they
    are. Inputs and outputs stay.

    Raises:
        GraphError: an `Attention` node stands in a subgraph, or is not what the standard allows.
    """
    flat = flatten_heads(model)
    copy = onnx.ModelProto()
    copy.CopyFrom(flat.model)
    opset, read, makers = opset_of(copy), read_names(copy), producers(copy)
    found = {each.result: each for group in projections(copy) for each in group}
    constants = {tensor.name: tensor for tensor in flat.model.graph.initializer}

    def rewrite(node: NodeProto, e: Emitter) -> list[Step]:
        attention = read_attention(node, opset, e.infos, read)
        members = [found[name] for name in (attention.q, attention.k, attention.v) if name in found]
        keys = _kept_keys(attention, makers, constants, e.infos)
        if len(members) < 3 or not _takes(attention, members) or keys is None:
            return []
        tensors = _constants(members, e)
        copy.graph.initializer.extend(tensors)
        _emit(e, attention, [members[0].product.input[0], *(each.name for each in tensors)], members, keys)
        return [Step(e.prefix, "whole-attention", "with its projections it is one operator of ONNX Runtime")]

    steps = rewrite_nodes(copy, ("Attention",), rewrite)
    if not steps:
        return Lowered(model, ())
    drop_unread(copy)
    if all(each.domain != DOMAIN for each in copy.opset_import):
        copy.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return Lowered(copy, (*flat.steps, *steps))


def _takes(a: AttentionNode, members: list[Projection]) -> bool:
    """Whether the operator computes this attention: its scores scaled, capped and masked no other way."""
    one_input = len({each.product.input[0] for each in members}) == 1
    plain = not a.softcap and not a.has_window and a.softmax_precision in (0, TensorProto.FLOAT)
    fp32 = {a.dtype, a.value_dtype, *(each.weight.data_type for each in members)} == {TensorProto.FLOAT}
    return a.rank == 3 and a.q_heads == a.kv_heads and one_input and plain and fp32


def _kept_keys(
    a: AttentionNode,
    makers: Mapping[str, NodeProto],
    constants: Mapping[str, TensorProto],
    infos: Mapping[str, TensorInfo],
) -> str | None:
    """The mask [batch, key] that every query shares; "" where there is none, None for any other."""
    if not a.mask:
        return ""
    spread = makers.get(a.mask)
    raised = makers.get(spread.input[0]) if spread is not None and is_default(spread, "Expand") else None
    if raised is None or not is_default(raised, "Unsqueeze") or not a.mask_is_bool or a.causal:
        return None
    axes = constants.get(raised.input[1])
    of_keys = axes is not None and numpy_helper.to_array(axes).tolist() == [1, 2]
    rows, one, *_ = a.mask_info.dims
    same_rows = rows == infos[a.q].dims[0] and one == 1
    return raised.input[0] if of_keys and same_rows and len(infos[raised.input[0]].dims) == 2 else None


def _constants(members: list[Projection], e: Emitter) -> list[TensorProto]:
    """Weights [in, q + k + v] and bias [q + k + v]."""
    weights = np.concatenate([numpy_helper.to_array(each.weight) for each in members], axis=1)
    biases = np.concatenate([each.bias_or_zero for each in members])
    return [
        numpy_helper.from_array(weights, e.fresh("weight")),
        numpy_helper.from_array(biases, e.fresh("bias")),
    ]


def _emit(e: Emitter, a: AttentionNode, inputs: list[str], members: list[Projection], keys: str) -> None:
    attributes: dict[str, Any] = {
        "num_heads": a.q_heads,
        "qkv_hidden_sizes": [each.width for each in members],
    }
    if a.explicit_scale is not None:
        attributes["scale"] = a.explicit_scale
    if not keys:
        e.op("Attention", *inputs, out=a.y, domain=DOMAIN, unidirectional=int(a.causal), **attributes)
        return
    kept = e.op("Cast", keys, to=TensorProto.INT32)
    context = e.op("Attention", *inputs, kept, domain=DOMAIN, mask_filter_value=MASKED, **attributes)
    seen = e.op("Cast", e.op("ReduceMax", kept, e.ints(1), keepdims=1), to=TensorProto.FLOAT)
    e.op("Mul", context, e.op("Unsqueeze", seen, e.ints(2)), out=a.y)
