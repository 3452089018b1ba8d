"""An attention spelt out as the one chain that a fusing runtime makes one kernel of.

    Attention(q, k, v, mask)   ->   (softmax(scale q k^T + bias[mask]) v) any(mask)

where bias is 0 for a kept key and -1e38 for a masked one. OpenVINO spells the operator out itself, with
-inf for masked keys and with IsNaN and Where behind the last product for rows in which nothing is kept;
these stand outside of its kernel, and the mask is first written out for every query. A finite bias leaves
such rows the mean of the values, and one factor for the whole row of the batch, 0 or 1, ends them: both are
in the kernel. A kept key's score is the same sum with a 0 more.
"""

from __future__ import annotations

import onnx
from onnx import NodeProto

from mha_deploy.lowering.attention_node import AttentionNode, read_attention
from mha_deploy.lowering.graph_edit import (
    Emitter,
    constants_of,
    drop_unread,
    opset_of,
    producers,
    read_names,
    refuse_nested,
    rewrite_nodes,
)
from mha_deploy.lowering.heads import merge_heads, repeat_heads, to_rank_4
from mha_deploy.lowering.key_mask import MASKED, kept_keys
from mha_deploy.lowering.steps import Lowered, Step


def fusible_attention(model: onnx.ModelProto) -> Lowered:
    """The model with each attention as products and a softmax with nothing between that cannot be fused.

    That is an `Attention` of fp32, not causal, with no mask or with one of keys [batch, key]. Others stay
    as they are. Inputs and outputs stay. Scores down to -1e38 count as they should; fp32 ends at -3.4e38.

    Raises:
        GraphError: an `Attention` node stands in a subgraph, or is not what the standard allows.
    """
    refuse_nested(model, "Attention")
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    opset, read, makers, constants = opset_of(copy), read_names(copy), producers(copy), constants_of(copy)

    def rewrite(node: NodeProto, e: Emitter) -> list[Step]:
        a = read_attention(node, opset, e.infos, read)
        keys = kept_keys(a, makers, constants, e.infos)
        if keys is None or a.scale is None or a.causal or not a.is_usual:
            return []
        _emit(e, a, keys, a.scale)
        return [Step(e.prefix, "fusible-attention", "one chain, which a runtime can make one kernel of")]

    steps = rewrite_nodes(copy, ("Attention",), rewrite)
    if not steps:
        return Lowered(model, ())
    drop_unread(copy)
    return Lowered(copy, tuple(steps))


def _emit(e: Emitter, a: AttentionNode, keys: str, scale: float) -> None:
    operands = to_rank_4(e, a)
    q = e.op("Mul", operands.q, e.scalar(scale, a.dtype))
    k = e.op("Transpose", repeat_heads(e, a, operands.k), perm=[0, 1, 3, 2])
    scores = e.op("MatMul", q, k)
    if keys:
        zero, masked = e.scalar(0.0, a.dtype), e.scalar(MASKED, a.dtype)
        bias = e.op("Where", e.op("Unsqueeze", keys, e.ints(1, 2)), zero, masked)
        scores = e.op("Add", scores, bias)
    context = e.op("MatMul", e.op("Softmax", scores, axis=-1), repeat_heads(e, a, operands.v))
    if keys:
        kept = e.op("ReduceMax", e.op("Cast", keys, to=a.dtype), e.ints(1), keepdims=1)
        context = e.op("Mul", context, e.op("Unsqueeze", kept, e.ints(2, 3)))
    e.deliver(merge_heads(e, context) if a.rank == 3 else context, a.y)
