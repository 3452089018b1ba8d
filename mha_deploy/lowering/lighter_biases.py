"""Biases that cancel, or that can be added later together with another.

All scores of a query grow alike by a bias of the keys, and softmax cancels that, but for the rounding of
the scores, which beside large ones can be seen. Weights sum to 1, so that the context grows by a bias of the
values, and the output by what comes of it; where no key is kept the weights are 0, and so is that.

    query . (key + b_k)                ->  query . key
    (weights (value + b_v)) W_o + b_o  ->  (weights value) W_o + (b_o + b_v W_o, or b_o without a key)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, numpy_helper

from mha_deploy.lowering.attention_node import AttentionNode, read_attention
from mha_deploy.lowering.fused_projections import Projection, projections
from mha_deploy.lowering.graph_edit import (
    Emitter,
    TensorInfo,
    constants_of,
    drop_unread,
    is_default,
    label,
    only_readers,
    opset_of,
    producers,
    read_names,
    refuse_nested,
    replace_all,
    tensor_infos,
    used_names,
)
from mha_deploy.lowering.key_mask import kept_keys
from mha_deploy.lowering.steps import Lowered, Step
from mha_deploy.signature import Array


def lighten_biases(model: onnx.ModelProto) -> Lowered:
    """The model with no bias at the keys of an `Attention` on flat heads, and with its values' added later.

    Keys keep theirs where scores are capped; values, where the context goes elsewhere than through one
    product with a bias, or under another mask than one of keys [batch, key]; both, where there is a cache
    or scores are given out. Inputs and outputs stay.

    Raises:
        GraphError: an `Attention` node stands in a subgraph, or is not what the standard allows.
    """
    refuse_nested(model, "Attention")
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph, taken = _Graph.of(copy), used_names(copy)
    nodes, steps = list[NodeProto](), list[Step]()
    for node in copy.graph.node:
        if is_default(node, "Attention"):
            emitter = Emitter(label(node), graph.infos, taken)
            steps += graph.lighten(node, emitter)
            nodes += emitter.nodes
        nodes.append(node)
    if not steps:
        return Lowered(model, ())
    replace_all(copy.graph.node, nodes)
    drop_unread(copy)
    return Lowered(copy, tuple(steps))


@dataclass(frozen=True, slots=True)
class _Graph:
    opset: int
    infos: dict[str, TensorInfo]
    read: set[str]
    makers: Mapping[str, NodeProto]
    constants: Mapping[str, TensorProto]
    made_by: dict[str, Projection]
    made_first: Mapping[str, Projection]
    readers: Mapping[str, NodeProto]

    @classmethod
    def of(cls, model: onnx.ModelProto) -> _Graph:
        found = [each for group in projections(model) for each in group]
        return cls(
            opset_of(model),
            tensor_infos(model),
            read_names(model),
            producers(model),
            constants_of(model),
            {each.result: each for each in found},
            {each.product.output[0]: each for each in found},
            only_readers(model),
        )

    def lighten(self, node: NodeProto, e: Emitter) -> list[Step]:
        """Change `node`, and the output's bias; what has to be made before is emitted."""
        a = read_attention(node, self.opset, self.infos, self.read)
        if a.rank != 3 or a.has_more:
            return []
        key, value = (self._with_bias(name) for name in (a.k, a.v))
        steps = []
        if key and not a.softcap:
            node.input[1] = key.product.output[0]
            steps.append(Step(label(node), "no-key-bias", "softmax cancels it"))
        output = self._output(a)
        if value and output and self._moves(value, output, a, e):
            node.input[2] = value.product.output[0]
            steps.append(Step(label(node), "later-value-bias", "it is added with the output's"))
        return steps

    def _with_bias(self, name: str) -> Projection | None:
        """What `name` is a projection with a bias of, if as much is known of the product alone."""
        found = self.made_by.get(name)
        if found is None or found.bias is None:
            return None
        return found if self.infos.get(found.product.output[0]) == self.infos[name] else None

    def _output(self, a: AttentionNode) -> Projection | None:
        """The projection that alone reads the context, and has a bias."""
        reader = self.readers.get(a.y)
        found = self.made_first.get(reader.output[0]) if reader is not None else None
        return found if found is not None and found.bias is not None else None

    def _moves(self, value: Projection, output: Projection, a: AttentionNode, e: Emitter) -> bool:
        """Add the value's bias with the output's, if it can be told where the weights sum to 1."""
        keys = kept_keys(a, self.makers, self.constants, self.infos)
        if keys is None or a.has_window:
            return False
        weight = numpy_helper.to_array(output.weight)
        heads = value.bias_or_zero.reshape(a.kv_heads, -1)
        spread = np.repeat(heads, a.q_heads // a.kv_heads, axis=0).reshape(-1).astype(np.float64)
        if spread.size != weight.shape[0]:
            return False
        biases = output.bias_or_zero + np.stack([np.zeros_like(spread), spread]) @ weight
        later = self._chosen(biases, output.weight.data_type, keys, e)
        assert output.add is not None
        assert output.bias is not None
        output.add.input[list(output.add.input).index(output.bias.name)] = later
        del self.made_by[output.result]  # it has another bias now, should it be the next one's value
        return True

    def _chosen(self, biases: Array, dtype: int, keys: str, e: Emitter) -> str:
        """[2, out], the bias without a key and with one: [out], or [B, 1, out] where a mask decides."""
        if not keys:
            return e.constant(biases[1], dtype)
        kept = e.op("Cast", keys, to=TensorProto.INT32)
        return e.op("Gather", e.constant(biases, dtype), e.op("ReduceMax", kept, e.ints(1), keepdims=1))
