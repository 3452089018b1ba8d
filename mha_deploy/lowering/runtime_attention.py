"""What ONNX Runtime's own attention operators have in common: the attentions they compute, and their mask.

Where a row's mask keeps nothing, softmax over scores that a large negative number was added to answers
with the mean of the values; here, as in PyTorch, that is 0: because masked values are, or else because a
factor `any(mask)` makes it so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from mha_deploy.lowering.attention_node import AttentionNode, read_attention
from mha_deploy.lowering.flat_heads import flatten_heads
from mha_deploy.lowering.fused_projections import Projection, projections
from mha_deploy.lowering.gathered_padding import gather_padding
from mha_deploy.lowering.graph_edit import (
    Emitter,
    constants_of,
    drop_unread,
    opset_of,
    producers,
    read_names,
    rewrite_nodes,
)
from mha_deploy.lowering.key_mask import kept_keys, zeroing_mask
from mha_deploy.lowering.lighter_biases import lighten_biases
from mha_deploy.lowering.steps import Lowered, Step, in_turn
from mha_deploy.signature import Array

DOMAIN = "com.microsoft"


@dataclass(frozen=True, slots=True)
class PlainAttention:
    """An attention with no mask but causality, or `keys` [batch, key] for all queries; "" for none.

    `projected` are the projections that query, key and value are, None for one that is no projection.
    `zero_where_masked` says that masked keys have values of 0.
    """

    node: AttentionNode
    keys: str
    projected: tuple[Projection | None, ...]
    graph: onnx.GraphProto
    zero_where_masked: bool

    def constant(self, e: Emitter, stem: str, array: Array) -> str:
        """The name of a new initializer."""
        name = e.fresh(stem)
        self.graph.initializer.append(numpy_helper.from_array(array, name))
        return name

    def put_out(self, e: Emitter, context: str, kept: str) -> None:
        """`context` [B, S, d] as the result, but 0 in rows of the batch whose `kept` [B, T], int32, is 0."""
        if self.zero_where_masked:  # and so is their mean
            e.deliver(context, self.node.y)
            return
        seen = e.op("Cast", e.op("ReduceMax", kept, e.ints(1), keepdims=1), to=TensorProto.FLOAT)
        e.op("Mul", context, e.op("Unsqueeze", seen, e.ints(2)), out=self.node.y)


Emit = Callable[[PlainAttention, Emitter], list[Step]]
"""Emits what replaces an attention and says why; an empty list leaves it as it is."""


def rewrite_plain(model: onnx.ModelProto, emit: Emit) -> Lowered:
    """The model after `emit` on each `Attention` of fp32 with as many key heads as query heads.

    They have flat heads and lighter biases by then. Inputs and outputs stay. Where `emit` leaves all, the
    model comes back as it is; beside one that it rewrites, others are made lean too.

    Raises:
        GraphError: an `Attention` node stands in a subgraph, or is not what the standard allows.
    """
    light = in_turn(model, flatten_heads, lighten_biases)
    copy = onnx.ModelProto()
    copy.CopyFrom(light.model)
    opset, read, makers = opset_of(copy), read_names(copy), producers(copy)
    found = {each.result: each for group in projections(copy) for each in group}
    constants = constants_of(light.model)

    def rewrite(node: NodeProto, e: Emitter) -> list[Step]:
        a = read_attention(node, opset, e.infos, read)
        keys = kept_keys(a, makers, constants, e.infos)
        if keys is None or not _is_plain(a):
            return []
        projected = tuple(found.get(name) for name in (a.q, a.k, a.v))
        zero = projected[2] is not None and _vanishes(projected[2], keys, makers, constants)
        return emit(PlainAttention(a, keys, projected, copy.graph, zero), e)

    steps = rewrite_nodes(copy, ("Attention",), rewrite)
    if not steps:
        return Lowered(model, ())
    drop_unread(copy)
    if all(each.domain != DOMAIN for each in copy.opset_import):
        copy.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    padded = gather_padding(copy)
    return Lowered(padded.model, (*light.steps, *steps, *padded.steps))


def _is_plain(a: AttentionNode) -> bool:
    """Whether the operators compute this attention. They take a scale of 0 for the usual one."""
    return a.is_usual and a.rank == 3 and a.q_heads == a.kv_heads and a.explicit_scale != 0


def _vanishes(
    value: Projection, keys: str, makers: Mapping[str, NodeProto], constants: Mapping[str, TensorProto]
) -> bool:
    """Whether what `value` projects is 0 where `keys` masks it, and so is what comes of it."""
    selected = makers.get(value.product.input[0])
    zeroed = selected is not None and zeroing_mask(selected, makers, constants) == keys != ""
    return zeroed and value.bias is None
