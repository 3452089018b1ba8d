"""What ONNX Runtime's own attention operators have in common: the attentions they compute, and their mask.

Where a row's mask keeps nothing, softmax over scores that a large negative number was added to answers
with the mean of the values; here, as in PyTorch, that is 0, and a factor `any(mask)` makes it so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

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
from mha_deploy.signature import Array

DOMAIN = "com.microsoft"


@dataclass(frozen=True, slots=True)
class PlainAttention:
    """An attention with no mask but causality, or `keys` [batch, key] for all queries; "" for none.

    `projected` are the projections that query, key and value are, None for one that is no projection.
    """

    node: AttentionNode
    keys: str
    projected: tuple[Projection | None, ...]
    graph: onnx.GraphProto

    def constant(self, e: Emitter, stem: str, array: Array) -> str:
        """The name of a new initializer."""
        name = e.fresh(stem)
        self.graph.initializer.append(numpy_helper.from_array(array, name))
        return name


Emit = Callable[[PlainAttention, Emitter], list[Step]]
"""Emits what replaces an attention and says why; an empty list leaves it as it is."""


def rewrite_plain(model: onnx.ModelProto, emit: Emit) -> Lowered:
    """The model after `emit` on each `Attention` of fp32 with as many key heads as query heads.

    They have flat heads by then. Inputs and outputs stay, and so does what `emit` leaves.

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
        a = read_attention(node, opset, e.infos, read)
        keys = _kept_keys(a, makers, constants, e.infos)
        if keys is None or not _is_plain(a):
            return []
        projected = tuple(found.get(name) for name in (a.q, a.k, a.v))
        return emit(PlainAttention(a, keys, projected, copy.graph), e)

    steps = rewrite_nodes(copy, ("Attention",), rewrite)
    if not steps:
        return Lowered(model, ())
    drop_unread(copy)
    if all(each.domain != DOMAIN for each in copy.opset_import):
        copy.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return Lowered(copy, (*flat.steps, *steps))


def emit_guarded(e: Emitter, context: str, kept: str, out: str) -> None:
    """`out` = `context` [B, S, d], or 0 in the rows of the batch where `kept` [B, T], int32, is 0 only."""
    seen = e.op("Cast", e.op("ReduceMax", kept, e.ints(1), keepdims=1), to=TensorProto.FLOAT)
    e.op("Mul", context, e.op("Unsqueeze", seen, e.ints(2)), out=out)


def _is_plain(a: AttentionNode) -> bool:
    """Whether the operators compute this attention: its scores scaled, capped and masked no other way.

    They take a scale of 0 for the usual one.
    """
    usual = not a.softcap and not a.has_window and a.softmax_precision in (0, TensorProto.FLOAT)
    fp32 = a.dtype == a.value_dtype == TensorProto.FLOAT
    return (
        a.rank == 3
        and a.q_heads == a.kv_heads
        and a.explicit_scale != 0
        and usual
        and fp32
        and not a.has_more
    )


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
    mask = infos.get(raised.input[0])
    if axes is None or numpy_helper.to_array(axes).tolist() != [1, 2] or mask is None:
        return None
    rows, one = a.mask_info.dims[:2]
    same = mask.dims == infos[a.k].dims[:2] and all(mask.dims) and rows == infos[a.q].dims[0] and one == 1
    return raised.input[0] if same else None
