"""Between [B, S, heads * D] and [B, heads, S, D], and key/value heads that several query heads share."""

from __future__ import annotations

from dataclasses import dataclass

from mha_deploy.lowering.attention_node import AttentionNode
from mha_deploy.lowering.graph_edit import Emitter, Size


@dataclass(frozen=True, slots=True)
class Operands:
    """Query, key and value with one axis for the heads, the cache joined on.

    q is [B, Hq, Sq, D], k [B, Hkv, Skv, D], v [B, Hkv, Skv, Dv]; `past` is the length of the cache.
    """

    q: str
    k: str
    v: str
    q_length: Size
    kv_length: Size
    past: Size


def lengths_of(e: Emitter, a: AttentionNode) -> tuple[Size, Size, Size]:
    """Lengths of query, of key with the cache, and of the cache alone."""
    past: Size = e.size(a.past_key, 2) if a.past_key else 0
    new = e.size(a.k, a.sequence_axis)
    return e.size(a.q, a.sequence_axis), e.arithmetic("Add", past, new) if a.past_key else new, past


def to_rank_4(e: Emitter, a: AttentionNode) -> Operands:
    """The operands as [B, heads, S, D], joined to the cache, which is given out as present_* if asked."""
    q_length, kv_length, past = lengths_of(e, a)
    q = split_heads(e, a.q, a.q_heads) if a.rank == 3 else a.q
    k = split_heads(e, a.k, a.kv_heads) if a.rank == 3 else a.k
    v = split_heads(e, a.v, a.kv_heads) if a.rank == 3 else a.v
    if a.past_key:
        k = e.op("Concat", a.past_key, k, axis=2)
        v = e.op("Concat", a.past_value, v, axis=2)
    if a.present_key:
        e.op("Identity", k, out=a.present_key)
    if a.present_value:
        e.op("Identity", v, out=a.present_value)
    return Operands(q, k, e.cast(v, a.value_dtype, a.dtype), q_length, kv_length, past)


def split_heads(e: Emitter, tensor: str, heads: int) -> str:
    """[B, S, heads * D] -> [B, heads, S, D]."""
    return e.op("Transpose", e.op("Reshape", tensor, e.ints(0, 0, heads, -1)), perm=[0, 2, 1, 3])


def merge_heads(e: Emitter, tensor: str) -> str:
    """[B, heads, S, D] -> [B, S, heads * D]."""
    return e.op("Reshape", e.op("Transpose", tensor, perm=[0, 2, 1, 3]), e.ints(0, 0, -1))


def repeat_heads(e: Emitter, a: AttentionNode, tensor: str) -> str:
    """Each key/value head once for every query head that reads it: h0 h0 h1 h1 ..."""
    if a.q_heads and a.q_heads == a.kv_heads:
        return tensor
    q_heads: Size = a.q_heads or e.op("Shape", a.q, start=1, end=2)
    kv_heads: Size = a.kv_heads or e.op("Shape", a.k, start=1, end=2)
    group = e.arithmetic("Div", q_heads, kv_heads)
    grouped = e.op("Expand", e.op("Unsqueeze", tensor, e.ints(2)), e.shape(1, 1, group, 1, 1))
    ends = e.op("Shape", tensor, start=2, end=4)
    target = e.op("Concat", e.ints(0), e.vector(q_heads), ends, axis=0)
    return e.op("Reshape", grouped, target)
