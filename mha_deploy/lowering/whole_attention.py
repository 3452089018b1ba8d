"""A block's projections and attention as ONNX Runtime's own operator `com.microsoft.Attention`.

    Attention(x W_q + b_q, x W_k + b_k, x W_v + b_v, mask)   ->   Attention(x, W, b, mask)

It writes each head's query, key and value where the core reads them, so that the projections' results
are not turned round in between. Source of its inputs and attributes: ONNX Runtime's
docs/ContribOperators.md.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from mha_deploy.lowering.graph_edit import Emitter
from mha_deploy.lowering.runtime_attention import DOMAIN, PlainAttention, rewrite_plain
from mha_deploy.lowering.steps import Lowered, Step

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
    return rewrite_plain(model, _emit)


def _emit(found: PlainAttention, e: Emitter) -> list[Step]:
    a, members = found.node, [each for each in found.projected if each is not None]
    if len(members) < 3 or len({each.product.input[0] for each in members}) > 1:
        return []
    weights = np.concatenate([numpy_helper.to_array(each.weight) for each in members], axis=1)
    biases = np.concatenate([each.bias_or_zero for each in members])
    inputs = [
        members[0].product.input[0],
        found.constant(e, "weight", weights),
        found.constant(e, "bias", biases),
    ]
    attributes: dict[str, Any] = {
        "num_heads": a.q_heads,
        "qkv_hidden_sizes": [each.width for each in members],
    }
    if a.explicit_scale is not None:
        attributes["scale"] = a.explicit_scale
    if found.keys:
        kept = e.op("Cast", found.keys, to=TensorProto.INT32)
        context = e.op("Attention", *inputs, kept, domain=DOMAIN, mask_filter_value=MASKED, **attributes)
        found.put_out(e, context, kept)
    else:
        e.op("Attention", *inputs, out=a.y, domain=DOMAIN, unidirectional=int(a.causal), **attributes)
    return [Step(e.prefix, "whole-attention", "with its projections it is one operator of ONNX Runtime")]
