"""The opset 20 form, for runtimes that lack `Attention`."""

from __future__ import annotations

import onnx
from onnx import NodeProto

from mha_deploy.lowering.attention_node import read_attention
from mha_deploy.lowering.decompose import decompose
from mha_deploy.lowering.graph_edit import Emitter, opset_of, read_names, refuse_nested, rewrite_nodes
from mha_deploy.lowering.opset import PORTABLE_OPSET, inline_newer_functions, retarget
from mha_deploy.lowering.rotary import decompose_rotary
from mha_deploy.lowering.steps import Lowered, Step

LOWERED = ("Attention", "RotaryEmbedding")


def lower_to_portable(model: onnx.ModelProto) -> Lowered:
    """The same model in opset 20, or in its own if that is older, without Attention and RotaryEmbedding.

    A fully masked row of attention comes out as exactly 0. Inputs, outputs and initializers stay.

    Raises:
        GraphError: naming the node, the feature and why it has no form in opset 20.
    """
    if opset_of(model) <= PORTABLE_OPSET:
        return Lowered(model, ())
    refuse_nested(model, *LOWERED)
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    copy, inlined = inline_newer_functions(copy, keep=LOWERED)
    opset, read = opset_of(copy), read_names(copy)

    def rewrite(node: NodeProto, e: Emitter) -> list[Step]:
        if node.op_type == "RotaryEmbedding":
            decompose_rotary(e, node)
        else:
            attention = read_attention(node, opset, e.infos, read)
            decompose(e, attention, attention.softmax_precision or attention.dtype)
        return [Step(e.prefix, "decompose", f"opset {PORTABLE_OPSET} has no {node.op_type}")]

    steps = rewrite_nodes(copy, LOWERED, rewrite)
    return Lowered(copy, (*inlined, *steps, *retarget(copy)))
