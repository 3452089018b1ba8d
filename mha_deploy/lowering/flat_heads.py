"""Attention on [B, S, heads * D], as projections leave their results and take them.

    Attention(heads(q), heads(k), heads(v))  ->  y' = merged(y)     becomes     y' = Attention(q, k, v)

where `heads` is Reshape and Transpose to [B, heads, S, D], and `merged` the way back. The operator
itself splits the heads where its inputs have rank 3 (its schema in opset 23: q_num_heads and
kv_num_heads), so that a runtime may do it as it likes; and the arithmetic on shapes goes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx
from onnx import NodeProto, helper

from mha_deploy.lowering.attention_node import AttentionNode, read_attention
from mha_deploy.lowering.graph_edit import (
    TensorInfo,
    drop_unread,
    is_default,
    label,
    only_readers,
    opset_of,
    producers,
    read_names,
    refuse_nested,
    tensor_infos,
)
from mha_deploy.lowering.steps import Lowered, Step

HEADS_FIRST = [0, 2, 1, 3]
"""[B, S, heads, D] to [B, heads, S, D], and back."""


def flatten_heads(model: onnx.ModelProto) -> Lowered:
    """The model with every `Attention` on flat tensors whose heads are split for it and merged after it.

    Others, those with a cache or with scores to give out above all, stay. Inputs, outputs and
    initializers that are read stay.

    Raises:
        GraphError: an `Attention` node stands in a subgraph, or is not what the standard allows.
    """
    refuse_nested(model, "Attention")
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = _Graph.of(copy)
    steps = [
        step for node in copy.graph.node if is_default(node, "Attention") for step in graph.flatten(node)
    ]
    if not steps:
        return Lowered(model, ())
    drop_unread(copy)
    return Lowered(copy, tuple(steps))


@dataclass(frozen=True, slots=True)
class _Graph:
    opset: int
    infos: Mapping[str, TensorInfo]
    read: set[str]
    makers: Mapping[str, NodeProto]
    readers: Mapping[str, NodeProto]

    @classmethod
    def of(cls, model: onnx.ModelProto) -> _Graph:
        infos, makers = tensor_infos(model), producers(model)
        return cls(opset_of(model), infos, read_names(model), makers, only_readers(model))

    def flatten(self, node: NodeProto) -> list[Step]:
        attention = read_attention(node, self.opset, self.infos, self.read)
        flat = [self._before(tensor) for tensor in (attention.q, attention.k, attention.v)]
        merged = self._after(attention)
        if attention.rank == 3 or attention.has_more or not all(flat) or not merged:
            return []
        node.input[:3] = flat
        self.makers[merged].output[0] = f"{merged}/unread"
        node.output[0] = merged
        heads = {"q_num_heads": attention.q_heads, "kv_num_heads": attention.kv_heads}
        node.attribute.extend(helper.make_attribute(name, count) for name, count in heads.items())
        return [Step(label(node), "flatten-heads", "it splits and merges the heads itself")]

    def _before(self, tensor: str) -> str:
        """What [B, heads, S, D] was made of, if that is [B, S, heads * D]; else ""."""
        transpose = self.makers.get(tensor)
        reshape = self.makers.get(transpose.input[0]) if transpose and _turns(transpose) else None
        if reshape is None or not is_default(reshape, "Reshape"):
            return ""
        return reshape.input[0] if self._same(reshape.input[0], reshape.output[0]) else ""

    def _after(self, attention: AttentionNode) -> str:
        """Where [B, heads, S, D] goes as [B, S, heads * D], if it goes nowhere else; else ""."""
        transpose = self.readers.get(attention.y)
        reshape = self.readers.get(transpose.output[0]) if transpose and _turns(transpose) else None
        if reshape is None or not is_default(reshape, "Reshape"):
            return ""
        return reshape.output[0] if self._same(reshape.output[0], reshape.input[0]) else ""

    def _same(self, flat: str, split: str) -> bool:
        """Whether `split` [B, S, heads, D] is `flat` [B, S, heads * D] with its last axis split."""
        if flat not in self.infos or split not in self.infos:
            return False
        one, other = self.infos[flat].dims, self.infos[split].dims
        return (
            len(one) == 3
            and len(other) == 4
            and all(size for size in one)
            and one[:2] == other[:2]
            and all(isinstance(size, int) for size in other[2:])
            and one[2] == int(other[2]) * int(other[3])
        )


def _turns(node: NodeProto) -> bool:
    perms = [list(attribute.ints) for attribute in node.attribute if attribute.name == "perm"]
    return is_default(node, "Transpose") and perms == [HEADS_FIRST]
