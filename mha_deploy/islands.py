"""Nodes of a 16-bit graph kept in fp32, with the fewest casts around them.

A node that is kept reads fp32 (weights as they were before rounding) and gives fp32. Nodes that only
move values follow the one above them, so that the cast back stands where the next product begins;
where fp32 is wanted there anyway, as at the attention core, none stands at all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper, shape_inference

from mha_deploy.errors import InputError
from mha_deploy.signature import Array
from mha_deploy.stored_weights import exact

MOVES = ("Reshape", "Transpose", "Unsqueeze", "Squeeze", "Slice", "Expand", "Pad", "Gather", "Identity")
_HALVES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)


def computed_in_16_bits(model: onnx.ModelProto) -> tuple[str, ...]:
    """Names of the nodes that compute in fp16 or bf16: those that can be kept in fp32."""
    half = _half_values(model)
    left = ("Cast", "Constant", *MOVES)
    return tuple(n.name for n in model.graph.node if n.op_type not in left and half & set(n.output))


def keep_in_fp32(path: Path, nodes: Sequence[str], weights: Mapping[str, Array]) -> None:
    """Rewrite the 16-bit graph at `path` so that `nodes`, by name, compute in fp32.

    `weights` are the checkpoint's tensors in fp32. A node that computes in fp32 already stays as it is.

    Raises:
        InputError: the graph has no node of one of the names.
    """
    model = onnx.load(str(path))
    unknown = sorted(set(nodes) - {node.name for node in model.graph.node})
    if unknown:
        known = ", ".join(computed_in_16_bits(model))
        raise InputError(f"no node {', '.join(unknown)} to keep in fp32; these compute in 16 bits: {known}")
    onnx.save(_Widened(model, nodes, weights).model(), str(path))


def read_keep_fp32(text: str) -> tuple[str, ...]:
    """Nodes to keep in fp32, from names between commas or from a file that `verify --locate` wrote.

    Raises:
        InputError: the file holds no such list.
    """
    path = Path(text)
    if not path.is_file():
        return tuple(name.strip() for name in text.split(",") if name.strip())
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        names = data["keep_fp32"] if isinstance(data, dict) else data
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"{path} holds no list of nodes: {error!r}; expected what --locate writes"
        ) from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputError(f"{path} has keep_fp32 = {names!r}; expected a list of names of nodes")
    return tuple(names)


def _half_values(model: onnx.ModelProto) -> set[str]:
    inferred = shape_inference.infer_shapes(model).graph
    values = (*inferred.value_info, *inferred.input, *inferred.output)
    half = {value.name for value in values if value.type.tensor_type.elem_type in _HALVES}
    return half | {stored.name for stored in model.graph.initializer if stored.data_type in _HALVES}


class _Widened:
    """The graph on its way: `wide` holds the values that were 16-bit and are fp32 now."""

    def __init__(self, model: onnx.ModelProto, keep: Sequence[str], weights: Mapping[str, Array]) -> None:
        self._model, self._keep, self._weights = model, set(keep), weights
        self._half = _half_values(model)
        self._stored = {tensor.name: tensor for tensor in model.graph.initializer}
        self._outputs = {value.name for value in model.graph.output}
        self._made_by = {name: node for node in model.graph.node for name in node.output}
        self._wide: set[str] = set()
        self._nodes: list[NodeProto] = []
        self._given: set[str] = set()
        self._instead: dict[str, str] = {}

    def model(self) -> onnx.ModelProto:
        for original in self._model.graph.node:
            node = onnx.NodeProto()
            node.CopyFrom(original)
            node.input[:] = [self._instead.get(name, name) for name in node.input]
            moved = node.op_type in MOVES and node.input[0] in self._wide
            if (node.name in self._keep and self._half & set(node.output)) or moved:
                self._widen(node)
            elif node.op_type == "Cast" and node.input[0] in self._wide and self._is_float(node):
                if node.output[0] in self._outputs:
                    self._nodes.append(node)  # casts nothing, and gives the output its name
                else:
                    self._instead[node.output[0]] = node.input[0]
            else:
                node.input[:] = [
                    self._narrow(name) if name in self._wide and before in self._half else name
                    for before, name in zip(original.input, node.input, strict=True)
                ]
                self._nodes.append(node)
        graph = self._model.graph
        del graph.node[:], graph.value_info[:]
        graph.node.extend(self._nodes)
        read = {name for node in self._nodes for name in node.input}
        unread = [tensor for tensor in graph.initializer if tensor.name not in read]
        for tensor in unread:
            graph.initializer.remove(tensor)
        return self._model

    @staticmethod
    def _is_float(cast: NodeProto) -> bool:
        return any(each.name == "to" and each.i == TensorProto.FLOAT for each in cast.attribute)

    def _widen(self, node: NodeProto) -> None:
        node.input[:] = [self._widened(name) if name in self._half else name for name in node.input]
        for index, name in enumerate(node.output):
            if name in self._half:
                # The graph's output keeps its name and type; what gives it is cast back.
                inner = f"{name}.fp32" if name in self._outputs else name
                node.output[index] = inner
                self._wide.add(inner)
        self._nodes.append(node)
        for name in self._outputs & self._half & {each.removesuffix(".fp32") for each in node.output}:
            self._instead[name] = f"{name}.fp32"
            self._nodes.append(self._cast(f"{name}.fp32", name, self._type_of_half()))

    def _widened(self, name: str) -> str:
        """The fp32 form of a 16-bit value that a kept node reads."""
        if name in self._wide:
            return name
        source = self._made_by.get(name)
        if source is not None and source.op_type == "Cast" and source.input[0] not in self._half:
            return str(source.input[0])  # it was fp32 before it was rounded
        wide = f"{name}.fp32"
        if wide not in self._given:
            self._given.add(wide)
            if name in self._stored:
                array = exact(numpy_helper.to_array(self._stored[name]), self._weights)
                self._model.graph.initializer.append(numpy_helper.from_array(array.copy(), wide))
            else:
                self._nodes.append(self._cast(name, wide, TensorProto.FLOAT))
        return wide

    def _narrow(self, name: str) -> str:
        narrow = f"{name}.16"
        if narrow not in self._given:
            self._given.add(narrow)
            self._nodes.append(self._cast(name, narrow, self._type_of_half()))
        return narrow

    def _type_of_half(self) -> int:
        """fp16 or bf16, whichever the graph is in."""
        return int(next(t.data_type for t in self._stored.values() if t.data_type in _HALVES))

    @staticmethod
    def _cast(source: str, target: str, to: int) -> NodeProto:
        return helper.make_node("Cast", [source], [target], name=f"{target}.cast", to=to)
