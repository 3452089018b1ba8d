"""The forms of attention that TensorRT's parser takes, changing no more than it needs.

What it refuses or drops was tried on TensorRT for RTX 1.7 and read in the parser of TensorRT 10.14
to 11. It takes `Attention` with one output, equal head sizes, no cache, no softcap, no
softmax_precision, and either is_causal or a mask in the query's type. It drops nonpad_kv_seqlen
and the window sizes of opset 25 without an error. It takes every form of `RotaryEmbedding`.
"""

from __future__ import annotations

import onnx
from onnx import NodeProto, TensorProto

from mha_deploy.lowering.attention_node import AttentionNode, read_attention
from mha_deploy.lowering.decompose import decompose
from mha_deploy.lowering.graph_edit import (
    Emitter,
    is_default,
    opset_of,
    read_names,
    refuse_nested,
    rewrite_nodes,
)
from mha_deploy.lowering.kept_attention import KeptAttention
from mha_deploy.lowering.steps import Lowered, Step, refusal


def lower_for_tensorrt(model: onnx.ModelProto) -> Lowered:
    """The model with every `Attention` in a form that TensorRT parses, builds and does not cut short.

    Attention stays one node where it can. Inputs, outputs, initializers and opset stay.

    Raises:
        GraphError: naming the node, the feature and why TensorRT has no form for it.
    """
    refuse_nested(model, "Attention")
    if not any(is_default(node, "Attention") for node in model.graph.node):
        return Lowered(model, ())
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    opset, read = opset_of(copy), read_names(copy)

    def rewrite(node: NodeProto, e: Emitter) -> list[Step]:
        attention = read_attention(node, opset, e.infos, read)
        _refuse_types(attention)
        why = _why_decompose(attention)
        if why:
            decompose(e, attention, _softmax_type(attention))
            return [Step(e.prefix, "decompose", why)]
        return KeptAttention(node, attention, e).steps()

    steps = rewrite_nodes(copy, ("Attention",), rewrite)
    return Lowered(copy if steps else model, tuple(steps))


def _refuse_types(a: AttentionNode) -> None:
    if TensorProto.DOUBLE in (a.dtype, a.value_dtype):
        raise refusal(
            a.name, "element type float64", "TensorRT computes it in float32; export the model in float32"
        )


def _why_decompose(a: AttentionNode) -> str:
    if a.softcap > 0:
        return "TensorRT's attention has no softcap"
    if a.scores:
        return f"TensorRT's attention gives out no scores (qk_matmul_output_mode {a.scores_mode})"
    return ""


def _softmax_type(a: AttentionNode) -> int:
    """The wider of the query's type and the type asked for, but no wider than float32."""
    wide = a.softmax_precision in (TensorProto.FLOAT, TensorProto.DOUBLE)
    return TensorProto.FLOAT if wide else a.dtype
