"""`Attention` spelt out in operators that opset 20 has, in every form that the standard defines."""

from __future__ import annotations

import math

from onnx import TensorProto

from mha_deploy.lowering.attention_node import (
    CAPPED_SCORES,
    MASKED_SCORES,
    PROBABILITIES,
    RAW_SCORES,
    AttentionNode,
)
from mha_deploy.lowering.graph_edit import Emitter
from mha_deploy.lowering.heads import Operands, merge_heads, repeat_heads, to_rank_4
from mha_deploy.lowering.mask import Masking, joined, masking_of, rows_with_keys


def decompose(e: Emitter, a: AttentionNode, softmax_type: int) -> None:
    """Emit the node's whole computation; `softmax_type` is the element type the softmax runs in.

    softmax(cap(q sqrt(s) . (k sqrt(s))^T) + mask) v. A row with no key takes its softmax over all
    keys, so that no 0/0 arises, and is then replaced by 0.
    """
    operands = to_rank_4(e, a)
    masking = masking_of(e, a, operands)
    total = joined(e, a, masking)
    guarded = masking.row_may_be_empty
    alive = rows_with_keys(e, a, masking, total) if guarded else ""
    zero = e.scalar(0.0, a.dtype)

    raw = _scaled_scores(e, a, operands)
    capped = _soft_capped(e, a, raw)
    scores = _masked(e, a, capped, masking, _opened(e, masking, total, alive, zero))
    weights = e.op("Softmax", e.cast(scores, a.dtype, softmax_type), axis=-1)
    weights = e.cast(weights, softmax_type, a.dtype)
    context = e.op("MatMul", weights, repeat_heads(e, a, operands.v))
    if guarded:
        context = e.op("Where", alive, context, zero)
    e.deliver(merge_heads(e, context) if a.rank == 3 else context, a.y)
    if a.scores:
        shown = {RAW_SCORES: raw, CAPPED_SCORES: capped}.get(a.scores_mode, "")
        if a.scores_mode == MASKED_SCORES:
            shown = _masked(e, a, capped, masking, total)
        if a.scores_mode == PROBABILITIES:
            shown = e.op("Where", alive, weights, zero) if guarded else weights
        e.op("Identity", shown, out=a.scores)


def _scaled_scores(e: Emitter, a: AttentionNode, operands: Operands) -> str:
    root = _root_of_scale(e, a, operands)
    q = e.op("Mul", operands.q, root)
    k = e.op("Transpose", repeat_heads(e, a, operands.k), perm=[0, 1, 3, 2])
    return e.op("MatMul", q, e.op("Mul", k, root))


def _root_of_scale(e: Emitter, a: AttentionNode, operands: Operands) -> str:
    """sqrt(scale), which multiplies query and key each: in fp16 the product alone could overflow."""
    if a.explicit_scale is not None:
        return e.scalar(math.sqrt(a.explicit_scale), a.dtype)
    if a.head_size:
        return e.scalar(a.head_size**-0.25, a.dtype)
    size = e.op("Cast", e.op("Shape", operands.q, start=3, end=4), to=TensorProto.FLOAT)
    return e.op("Cast", e.op("Sqrt", e.op("Reciprocal", e.op("Sqrt", size))), to=a.dtype)


def _soft_capped(e: Emitter, a: AttentionNode, scores: str) -> str:
    if a.softcap <= 0:
        return scores
    cap = e.scalar(a.softcap, a.dtype)
    return e.op("Mul", e.op("Tanh", e.op("Div", scores, cap)), cap)


def _opened(e: Emitter, masking: Masking, total: str, alive: str, zero: str) -> str:
    """The joined mask, with rows that have no key opened to all keys."""
    if not alive:
        return total
    if masking.bias:
        return e.op("Where", alive, total, zero)
    return e.op("Or", total, e.op("Not", alive))


def _masked(e: Emitter, a: AttentionNode, scores: str, masking: Masking, total: str) -> str:
    if masking.is_none:
        return scores
    if masking.bias:
        return e.op("Add", scores, total)
    return e.op("Where", total, scores, e.scalar(-math.inf, a.dtype))
