"""Reading facts about an ONNX graph, and emitting new nodes into it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from mha_deploy.lowering.steps import Step, refusal

DEFAULT_DOMAINS = ("", "ai.onnx")

Attribute = int | float | str | list[int] | TensorProto

Size = int | str
"""An axis length: a number where it is static, else the name of an int64 tensor of shape [1]."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What shape inference knows. A dim is a number, a symbol's name, or "" for nothing known."""

    dtype: int
    dims: tuple[int | str, ...]


def opset_of(model: onnx.ModelProto) -> int:
    """The default domain's version; 0 where the model imports none."""
    return max((o.version for o in model.opset_import if o.domain in DEFAULT_DOMAINS), default=0)


def tensor_infos(model: onnx.ModelProto) -> dict[str, TensorInfo]:
    """Dtype and dims of every tensor of the main graph whose rank is known."""
    graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    infos = {tensor.name: TensorInfo(tensor.data_type, tuple(tensor.dims)) for tensor in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        if value.type.tensor_type.HasField("shape"):
            dims = value.type.tensor_type.shape.dim
            infos[value.name] = TensorInfo(value.type.tensor_type.elem_type, tuple(map(_length, dims)))
    return infos


def _length(dim: onnx.TensorShapeProto.Dimension) -> int | str:
    if dim.HasField("dim_value"):
        return dim.dim_value
    # Shape inference names what it cannot tell unk__0, unk__1, ...: two such names may be one length.
    return "" if dim.dim_param.startswith("unk__") else dim.dim_param


def label(node: NodeProto) -> str:
    """The node's name, or its type and first output where it has none."""
    return node.name or f"{node.op_type}_{next((o for o in node.output if o), '')}"


def is_default(node: NodeProto, *op_types: str) -> bool:
    return node.domain in DEFAULT_DOMAINS and node.op_type in op_types


def walk(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """The nodes and those of every subgraph beneath them."""
    for node in nodes:
        yield node
        for nested in subgraphs(node):
            yield from walk(nested.node)


def subgraphs(node: NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs


def refuse_nested(model: onnx.ModelProto, *op_types: str) -> None:
    """Refuse the named operators where they stand inside a subgraph or a model-local function.

    Raises:
        GraphError: naming the node and what it stands in.
    """
    for node in model.graph.node:
        for nested in subgraphs(node):
            for inner in walk(nested.node):
                if is_default(inner, *op_types):
                    raise refusal(
                        label(inner),
                        f"{inner.op_type} inside the {node.op_type} node {label(node)!r}",
                        "only the main graph is rewritten; export it without control flow",
                    )
    for function in model.functions:
        for inner in walk(function.node):
            if is_default(inner, *op_types):
                raise refusal(
                    label(inner),
                    f"{inner.op_type} inside the function {function.name!r}",
                    "only the main graph is rewritten; run onnx.inliner.inline_local_functions first",
                )


def used_names(model: onnx.ModelProto) -> set[str]:
    """Every name of a node or a tensor, so that a new one can differ from all."""
    graph = model.graph
    names = {value.name for value in (*graph.input, *graph.output, *graph.value_info)}
    names |= {tensor.name for tensor in graph.initializer}
    names |= {tensor.values.name for tensor in graph.sparse_initializer}
    for node in walk(graph.node):
        names |= {node.name, *node.input, *node.output}
    return names


def read_names(model: onnx.ModelProto) -> set[str]:
    """Every tensor that a node reads, in subgraphs too, or that the graph gives out."""
    names = {value.name for value in model.graph.output}
    for node in walk(model.graph.node):
        names |= set(node.input)
        for nested in subgraphs(node):
            names |= {value.name for value in nested.output}
    return names


def only_readers(model: onnx.ModelProto) -> dict[str, NodeProto]:
    """By tensor the node of the main graph that alone reads it: no subgraph does, and it is not given out."""
    counts = Counter(value.name for value in model.graph.output)
    for node in walk(model.graph.node):
        counts.update(node.input)
        for nested in subgraphs(node):
            counts.update(value.name for value in nested.output)
    return {name: node for node in model.graph.node for name in node.input if counts[name] == 1}


def constants_of(model: onnx.ModelProto) -> dict[str, TensorProto]:
    """The initializers that no caller can replace: one that is a graph input too is but its default."""
    given = {value.name for value in model.graph.input}
    return {tensor.name: tensor for tensor in model.graph.initializer if tensor.name not in given}


def producers(model: onnx.ModelProto) -> dict[str, NodeProto]:
    """The node that makes each tensor of the main graph."""
    return {output: node for node in model.graph.node for output in node.output if output}


def drop_unread(model: onnx.ModelProto) -> None:
    """Remove, in place, what nobody reads: nodes, then their constants and what was said of their shapes."""
    graph = model.graph
    while True:
        read = read_names(model)
        kept = [node for node in graph.node if read & set(node.output)]
        if len(kept) == len(graph.node):
            break
        replace_all(graph.node, kept)
    made = {output for node in graph.node for output in node.output}
    replace_all(graph.initializer, [tensor for tensor in graph.initializer if tensor.name in read])
    replace_all(graph.value_info, [value for value in graph.value_info if value.name in made])


def replace_all(field: Any, kept: Sequence[Any]) -> None:
    """Make a repeated field of a graph hold `kept`, some of which may be its own elements."""
    copies = [type(each).FromString(each.SerializeToString()) for each in kept]
    del field[:]
    field.extend(copies)


@dataclass(slots=True)
class Emitter:
    """Collects the nodes that replace one node. Every name it gives is new in the graph."""

    prefix: str
    infos: dict[str, TensorInfo]
    taken: set[str]
    nodes: list[NodeProto] = field(default_factory=list)
    _constants: dict[tuple[int, tuple[int, ...], bytes], str] = field(default_factory=dict)

    def fresh(self, stem: str) -> str:
        name, count = f"{self.prefix}/{stem}", 1
        while name in self.taken:
            count += 1
            name = f"{self.prefix}/{stem}_{count}"
        self.taken.add(name)
        return name

    def op(self, op_type: str, *inputs: str, out: str = "", domain: str = "", **attributes: Attribute) -> str:
        """Append a node with one output and return the output's name, which is new unless `out` is given."""
        name = self.fresh(op_type)
        output = out or name
        node = helper.make_node(op_type, list(inputs), [output], name=name, domain=domain)
        node.attribute.extend(helper.make_attribute(key, value) for key, value in attributes.items())
        self.nodes.append(node)
        return output

    def constant(self, values: np.ndarray, dtype: int) -> str:
        array = np.asarray(values).astype(helper.tensor_dtype_to_np_dtype(dtype))
        key = (dtype, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = self.op("Constant", value=numpy_helper.from_array(array))
        return self._constants[key]

    def scalar(self, value: float, dtype: int) -> str:
        return self.constant(np.array(value), dtype)

    def ints(self, *values: int) -> str:
        """An int64 vector."""
        return self.constant(np.array(values), TensorProto.INT64)

    def size(self, tensor: str, axis: int) -> Size:
        """The length of an axis, counted from the front, of a tensor that was in the graph before."""
        dims = self.infos[tensor].dims
        length = dims[axis]
        if isinstance(length, int):
            return length
        return self.op("Shape", tensor, start=axis, end=axis + 1)

    def shape(self, *sizes: Size) -> str:
        """An int64 vector of the given lengths."""
        if all(isinstance(size, int) for size in sizes):
            return self.ints(*(int(size) for size in sizes))
        return self.op("Concat", *(self.vector(size) for size in sizes), axis=0)

    def vector(self, size: Size) -> str:
        """The length as an int64 tensor of shape [1]."""
        return self.ints(size) if isinstance(size, int) else size

    def arithmetic(self, op_type: str, left: Size, right: Size) -> Size:
        """`Add`, `Sub` or `Div` of two lengths, done here where both are static."""
        if isinstance(left, int) and isinstance(right, int):
            return {"Add": left + right, "Sub": left - right, "Div": left // max(right, 1)}[op_type]
        return self.op(op_type, self.vector(left), self.vector(right))

    def arange(self, size: Size) -> str:
        """0, 1, ... size - 1 as an int64 vector."""
        if isinstance(size, int):
            return self.constant(np.arange(size), TensorProto.INT64)
        end = self.op("Squeeze", size, self.ints(0))
        return self.op("Range", self.scalar(0, TensorProto.INT64), end, self.scalar(1, TensorProto.INT64))

    def cast(self, tensor: str, source: int, target: int) -> str:
        return tensor if source == target else self.op("Cast", tensor, to=target)

    def deliver(self, tensor: str, name: str) -> None:
        """Give a result out under the name that the rest of the graph knows it by."""
        for node in self.nodes:
            if tensor in node.output and tensor != name and not self._read(tensor):
                node.output[list(node.output).index(tensor)] = name
                return
        if tensor != name:
            self.op("Identity", tensor, out=name)

    def _read(self, tensor: str) -> bool:
        return any(tensor in node.input for node in self.nodes)


Rewrite = Callable[[NodeProto, Emitter], list[Step]]
"""Emits what replaces a node and says why; an empty list leaves the node as it is."""


def rewrite_nodes(model: onnx.ModelProto, op_types: tuple[str, ...], rewrite: Rewrite) -> list[Step]:
    """Apply `rewrite` to every node of the named types in the main graph, in place."""
    if not any(is_default(node, *op_types) for node in model.graph.node):
        return []
    infos, taken = tensor_infos(model), used_names(model)
    steps: list[Step] = []
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        emitter = Emitter(label(node), infos, taken)
        found = rewrite(node, emitter) if is_default(node, *op_types) else []
        nodes += emitter.nodes if found else [node]
        steps += found
    if steps:
        replace_all(model.graph.node, nodes)
    return steps
