"""An attention as ONNX Runtime's `com.microsoft.MultiHeadAttention`, a key mask in one more element a head.

    Attention(q, k, v, mask)   ->   MultiHeadAttention([q, 1], [k, m], v)

where m is 0 for a kept key and -1e38 for a masked one, so that [q, 1] . [k, m] = q . k + m. On the CPU
that operator goes by blocks and stores no scores (flash attention), but only where it has no mask, no
past and no causality: multihead_attention.cc in ONNX Runtime's contrib_ops/cpu/bert. The element comes
with the projections: a column of zeros a head in their weights, and 1 or m in what is added to them.
A kept key's score is the same sum with a 0 more.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from mha_deploy.lowering.fused_projections import Projection
from mha_deploy.lowering.graph_edit import Emitter
from mha_deploy.lowering.key_mask import MASKED
from mha_deploy.lowering.runtime_attention import DOMAIN, PlainAttention, rewrite_plain
from mha_deploy.lowering.steps import Lowered, Step
from mha_deploy.signature import Array

# The operator multiplies MASKED too: by one above 1, it starts so much smaller, and by these it keeps its
# rank.
SCALES = (1e-6, 1e6)


def flash_attention(model: onnx.ModelProto) -> Lowered:
    """The model with each attention as one node that goes by blocks.

    That is an `Attention` of fp32 with as many key heads as query heads, not causal, and with no mask or
    with one of keys [batch, key], where query and key must be projections. Others stay as they are.
    Inputs and outputs stay. With a mask scores down to -1e38 count as they should; fp32 ends at -3.4e38.

    Raises:
        GraphError: an `Attention` node stands in a subgraph, or is not what the standard allows.
    """
    return rewrite_plain(model, _emit)


def _emit(found: PlainAttention, e: Emitter) -> list[Step]:
    a = found.node
    query, key, _ = found.projected
    scale = a.scale
    if a.causal or scale is None:
        return []
    heads: dict[str, Any] = {"num_heads": a.q_heads, "scale": scale}
    if not found.keys:
        e.op("MultiHeadAttention", a.q, a.k, a.v, out=a.y, domain=DOMAIN, **heads)
    elif query is not None and key is not None and SCALES[0] <= scale <= SCALES[1]:
        kept = e.op("Cast", found.keys, to=TensorProto.INT32)
        ones = found.constant(e, "query_bias", _widened(query.bias_or_zero, a.q_heads, 1))
        rows = [_widened(key.bias_or_zero, a.q_heads, last) for last in (MASKED / max(1, scale), 0)]
        masks = e.op("Gather", found.constant(e, "key_biases", np.stack(rows)), kept)
        wide = [
            e.op("Add", _product(found, e, query, "query_weight"), ones),
            e.op("Add", _product(found, e, key, "key_weight"), masks),
        ]
        context = e.op("MultiHeadAttention", *wide, a.v, domain=DOMAIN, **heads)
        found.put_out(e, context, kept)
    else:
        return []
    return [Step(e.prefix, "flash-attention", "by blocks of keys, with no scores stored and no mask read")]


def _product(found: PlainAttention, e: Emitter, projection: Projection, stem: str) -> str:
    weight = _widened(numpy_helper.to_array(projection.weight), found.node.q_heads, 0)
    return e.op("MatMul", projection.product.input[0], found.constant(e, stem, weight))


def _widened(array: Array, heads: int, last: float) -> Array:
    """[..., heads * D] as [..., heads * (D + 1)], `last` the element that each head has more."""
    split = array.reshape(*array.shape[:-1], heads, -1)
    padded = np.pad(split, [(0, 0)] * array.ndim + [(0, 1)], constant_values=last)
    return padded.reshape(*array.shape[:-1], -1)
