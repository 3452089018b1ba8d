"""A model that is about to be damaged: where its projections, heads and mask are, and how to edit it."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

CONTEXT = "scaled_dot_product_attention"
HEADS = 12  # of each form


class Graph:
    """A model with what a mutant needs to find its way in it."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model, self.graph = model, model.graph

    def node(self, name: str) -> NodeProto:
        return next(node for node in self.graph.node if node.name == name)

    def only(self, op_type: str) -> NodeProto:
        (node,) = (node for node in self.graph.node if node.op_type == op_type)
        return node

    def producer(self, value: str) -> NodeProto:
        return next(node for node in self.graph.node if value in node.output)

    def consumers(self, value: str) -> list[NodeProto]:
        return [node for node in self.graph.node if value in node.input]

    def add_of(self, projection: str) -> NodeProto:
        """The Add that brings a projection's bias."""
        (node,) = self.consumers(f"{projection}.bias")
        return node

    def product_of(self, projection: str) -> NodeProto:
        """The MatMul with a projection's weight."""
        return self.producer(self.add_of(projection).input[0])

    def heads_of(self, projection: str) -> str:
        """A projection split into heads, [batch, heads, length, head_dim]."""
        (view,) = self.consumers(self.add_of(projection).output[0])
        (transpose,) = self.consumers(view.output[0])
        return transpose.output[0]

    def array(self, initializer: str) -> np.ndarray:
        return numpy_helper.to_array(self._stored(initializer)).copy()

    def store(self, initializer: str, array: np.ndarray) -> None:
        self._stored(initializer).CopyFrom(numpy_helper.from_array(array, initializer))

    def forget(self, initializer: str) -> None:
        self.graph.initializer.remove(self._stored(initializer))

    def _stored(self, initializer: str) -> TensorProto:
        return next(stored for stored in self.graph.initializer if stored.name == initializer)

    def constant(self, value: object, dtype: str) -> str:
        name = f"mutant_{len(self.graph.initializer)}"
        self.graph.initializer.append(numpy_helper.from_array(np.array(value, dtype), name))
        return name

    def put(self, readers: list[NodeProto], op_type: str, *inputs: str, **attributes: object) -> str:
        """A new node in front of the first of `readers`, which do not read it yet; its name and value."""
        name = f"mutant_{op_type}_{len(self.graph.node)}"
        place = min(list(self.graph.node).index(reader) for reader in readers)
        self.graph.node.insert(place, helper.make_node(op_type, inputs, [name], name=name, **attributes))
        return name

    def after(self, value: str, op_type: str, *more: str, **attributes: object) -> str:
        """A new node behind `value`; whoever read the value reads the node. The node's name."""
        readers = self.consumers(value)
        name = self.put(readers, op_type, value, *more, **attributes)
        redirect(readers, value, name)
        return name

    def bypass(self, node: NodeProto, value: str) -> list[str]:
        """Take a node out; `value` stands for its output. The names of the nodes that read it now."""
        readers = self.consumers(node.output[0])
        if readers:
            redirect(readers, node.output[0], value)
        else:  # what the graph gives out keeps its name
            source = self.producer(value)
            source.output[:] = [node.output[0] if each == value else each for each in source.output]
            readers = [source]
        self.graph.node.remove(node)
        return [reader.name for reader in readers]

    @property
    def keep(self) -> str:
        """The padding mask with its axes of heads and queries, [batch, 1, 1, length]."""
        spread = [node for node in self.consumers("mask") if node.op_type == "Unsqueeze"]
        return next(node.output[0] for node in spread if len(self.array(node.input[1])) == 2)


def redirect(readers: list[NodeProto], old: str, new: str) -> None:
    for reader in readers:
        reader.input[:] = [new if each == old else each for each in reader.input]
