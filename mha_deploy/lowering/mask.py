"""Every reason why a query may not see a key, as one boolean and at most one additive mask.

Rules (onnx 1.23, `Attention` 23, 24, 25): query i stands at position p = i + offset, where offset
is the length of the past cache, or nonpad_kv_seqlen - S_q for an external cache, or 0. It sees key
j if j <= p (causal), p - left <= j <= p + right (window), j < nonpad_kv_seqlen (lengths), and if a
boolean mask says True. An additive mask is added to the score. A row with no key left gives 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from functools import reduce

from onnx import TensorProto

from mha_deploy.lowering.attention_node import AttentionNode
from mha_deploy.lowering.graph_edit import Emitter, Size
from mha_deploy.lowering.heads import Operands


@dataclass(frozen=True, slots=True)
class Masking:
    """Each broadcasts to [B, H, Sq, Skv] and is "" for none.

    `keep` is boolean, True = keep; `bias` is additive, in the query's type.
    """

    keep: str
    bias: str
    row_may_be_empty: bool

    @property
    def is_none(self) -> bool:
        return not (self.keep or self.bias)


def masking_of(e: Emitter, a: AttentionNode, operands: Operands) -> Masking:
    """All of a node's masks, merged as the rules above say; booleans are joined before anything is added."""
    terms = _position_terms(e, a, operands)
    mask = fitted_mask(e, a, operands.kv_length) if a.mask else ""
    if a.mask_is_bool:
        terms.append(mask)
        mask = ""
    keep = reduce(lambda left, right: e.op("And", left, right), terms) if terms else ""
    # A causal row always keeps key 0 unless something else takes it away.
    may_be_empty = bool(a.mask or a.lengths or a.has_window)
    return Masking(keep, mask, may_be_empty)


def joined(e: Emitter, a: AttentionNode, masking: Masking) -> str:
    """The masks as one: boolean if no additive one is there, else additive with -inf for False."""
    if masking.keep and masking.bias:
        return e.op("Where", masking.keep, masking.bias, e.scalar(-math.inf, a.dtype))
    return masking.keep or masking.bias


def _position_terms(e: Emitter, a: AttentionNode, operands: Operands) -> list[str]:
    if not (a.causal or a.has_window or a.lengths):
        return []
    key = e.op("Unsqueeze", e.arange(operands.kv_length), e.ints(0))  # 1 Skv
    lengths = e.op("Reshape", a.lengths, e.ints(-1, 1, 1, 1)) if a.lengths else ""  # B 1 1 1
    terms = [e.op("Less", key, lengths)] if lengths else []
    if not (a.causal or a.has_window):
        return terms
    query = e.op("Unsqueeze", e.arange(operands.q_length), e.ints(1))  # Sq 1
    if lengths:
        query = e.op("Add", query, e.op("Sub", lengths, e.vector(operands.q_length)))
    elif operands.past != 0:
        query = e.op("Add", query, e.vector(operands.past))
    if a.causal:
        terms.append(e.op("LessOrEqual", key, query))
    if a.left_window >= 0:
        terms.append(e.op("LessOrEqual", e.op("Sub", query, e.ints(a.left_window)), key))
    if a.right_window >= 0:
        terms.append(e.op("LessOrEqual", key, e.op("Add", query, e.ints(a.right_window))))
    return terms


def fitted_mask(e: Emitter, a: AttentionNode, kv_length: Size) -> str:
    """The mask input, additive ones in the query's type, padded to every key where opset 24 says so."""
    mask, dtype = a.mask, a.mask_info.dtype
    if not a.mask_is_bool:
        mask, dtype = e.cast(mask, dtype, a.dtype), a.dtype
    if columns_of(e, a, kv_length) is Columns.EQUAL:
        return mask
    columns = e.size(a.mask, len(a.mask_info.dims) - 1)
    missing = e.shape(0, e.arithmetic("Sub", kv_length, columns))
    fill = e.scalar(0.0 if a.mask_is_bool else -math.inf, dtype)
    return e.op("Pad", mask, missing, fill, e.ints(-1), mode="constant")


class Columns(Enum):
    """How many columns the mask input has, against the number of keys."""

    EQUAL = "as many"
    FEWER = "fewer, or by the shapes' own symbols another number"
    UNKNOWN = "not known"


def columns_of(e: Emitter, a: AttentionNode, kv_length: Size) -> Columns:
    """Opset 24 and later pad a mask that has fewer columns than there are keys; before, it has as many."""
    columns = a.mask_info.dims[-1]
    if a.opset < 24 or columns == kv_length:
        return Columns.EQUAL
    keys = kv_length if isinstance(kv_length, int) else e.infos[a.k].dims[a.sequence_axis]
    if not columns or not keys or (a.past_key and not isinstance(kv_length, int)):
        return Columns.UNKNOWN
    return Columns.EQUAL if columns == keys else Columns.FEWER


def rows_with_keys(e: Emitter, a: AttentionNode, masking: Masking, total: str) -> str:
    """Boolean [..., Sq, 1]: the row has at least one key. `total` is `joined` of the masking."""
    axes = e.ints(-1)
    if masking.bias:
        largest = e.op("ReduceMax", total, axes, keepdims=1)
        return e.op("Greater", largest, e.scalar(-math.inf, a.dtype))
    count = e.op("ReduceMax", e.op("Cast", total, to=TensorProto.INT32), axes, keepdims=1)
    return e.op("Greater", count, e.scalar(0, TensorProto.INT32))
