"""An ONNX file, read without its weights: checked, its inputs, its precision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from mha_deploy.errors import GraphError
from mha_deploy.signature import TensorSpec
from mha_deploy.tensorrt.messages import ProfileError

FLOATS: dict[int, str] = {
    TensorProto.DOUBLE: "fp64",
    TensorProto.FLOAT: "fp32",
    TensorProto.FLOAT16: "fp16",
    TensorProto.BFLOAT16: "bf16",
    TensorProto.FLOAT8E4M3FN: "fp8",
    TensorProto.FLOAT8E5M2: "fp8",
}
_BITS = {"fp64": 64, "fp32": 32, "fp16": 16, "bf16": 16, "fp8": 8}
_LARGE = 1 << 16


@dataclass(frozen=True, slots=True)
class Graph:
    """An ONNX file that the checker has passed. Large weights are left out of `model`."""

    path: Path
    model: onnx.ModelProto
    inputs: tuple[TensorSpec, ...]
    weight_bytes: tuple[tuple[str, int], ...]

    @property
    def precision(self) -> str:
        """What the weights are stored in, the most bytes first: "fp16", or "fp16+fp32" when mixed.

        A graph without floating-point weights has the precision of its inputs.
        """
        if self.weight_bytes:
            return "+".join(name for name, _ in self.weight_bytes)
        types = (v.type.tensor_type.elem_type for v in self.model.graph.input)
        return "+".join(dict.fromkeys(FLOATS[t] for t in types if t in FLOATS)) or "none"


def read_graph(path: Path) -> Graph:
    """The file, once it exists, parses and passes onnx.checker with shape inference.

    Raises:
        GraphError: one of these fails; the message says which, and what to do.
        ProfileError: a dynamic axis of an input has no name.
    """
    model = parse_model(path)
    _check_versions(path, model)
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except Exception as error:  # the checker and shape inference raise several unrelated kinds
        raise GraphError(f"{path.name} is not a valid ONNX model: {_first_lines(error)}") from error
    weights = _weight_bytes(model)
    for tensor in model.graph.initializer:
        if len(tensor.raw_data) > _LARGE:
            tensor.ClearField("raw_data")
    return Graph(path, model, _inputs(model), weights)


def parse_model(path: Path) -> onnx.ModelProto:
    """The file as far as it parses, weights in files beside it left out.

    Raises:
        GraphError: there is no such file, it is empty, cut short or no ONNX graph.
    """
    _check_file(path)
    return _load(path)


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise GraphError(f"there is no file {path}; give the path of an ONNX model or a bundle folder.")
    if path.stat().st_size == 0:
        raise GraphError(f"{path} is empty; write or copy the ONNX model again.")


def _load(path: Path) -> onnx.ModelProto:
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf's DecodeError is no public name
        raise GraphError(
            f"{path} does not parse as ONNX: it is cut short or another kind of file. Write or copy it again."
        ) from error
    if not model.graph.node:
        raise GraphError(f"{path} does not hold an ONNX graph: no node was found in it.")
    return model


def _check_versions(path: Path, model: onnx.ModelProto) -> None:
    """The checker lets an opset pass that it does not know, and TensorRT reads it as if it did."""
    newest = onnx.defs.onnx_opset_version()
    for opset in model.opset_import:
        if opset.domain in ("", "ai.onnx") and opset.version > newest:
            raise GraphError(
                f"{path.name} uses opset {opset.version}; the onnx package here knows opsets up to {newest}. "
                "Export at a lower opset or upgrade onnx."
            )
    if model.ir_version > onnx.IR_VERSION:
        raise GraphError(
            f"{path.name} has IR version {model.ir_version}; the onnx package here knows up to "
            f"{onnx.IR_VERSION}. Save it with an older IR version or upgrade onnx."
        )


def _inputs(model: onnx.ModelProto) -> tuple[TensorSpec, ...]:
    weights = {tensor.name for tensor in model.graph.initializer}
    return tuple(_tensor(value) for value in model.graph.input if value.name not in weights)


def _tensor(value: onnx.ValueInfoProto) -> TensorSpec:
    kind = value.type.tensor_type
    if not value.type.HasField("tensor_type") or not kind.HasField("shape"):
        raise GraphError(
            f"input {value.name!r} has no declared tensor shape; TensorRT needs its rank. Export it again "
            "with shapes."
        )
    axes: list[str | int] = []
    for position, axis in enumerate(kind.shape.dim):
        if axis.HasField("dim_value"):
            axes.append(axis.dim_value)
        elif axis.dim_param:
            axes.append(axis.dim_param)
        else:
            raise ProfileError(
                f"axis {position} of input {value.name!r} is dynamic and has no name, so no --profile can "
                f"give its range. Name it, for instance with onnx.tools.update_model_dims, or export again "
                "with named dynamic axes."
            )
    dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type).name
    return TensorSpec(value.name, dtype, tuple(axes))


def _weight_bytes(model: onnx.ModelProto) -> tuple[tuple[str, int], ...]:
    """Bytes of the floating-point tensors stored in the file, by type; scalars do not count."""
    total: Counter[str] = Counter()
    for tensor in stored_tensors(model):
        name = FLOATS.get(tensor.data_type)
        size = 1
        for axis in tensor.dims:
            size *= axis
        if name is not None and size > 1:
            total[name] += size * _BITS[name] // 8
    return tuple(total.most_common())


def stored_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Initialisers, and the values of Constant nodes."""
    yield from model.graph.initializer
    for node in walk(model.graph):
        if node.op_type == "Constant":
            yield from (a.t for a in node.attribute if a.HasField("t"))


def walk(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Every node, those in the bodies of If, Loop and Scan included."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs):
                yield from walk(body)


def node_name(node: onnx.NodeProto) -> str:
    """The node's name; for one without, the name that TensorRT's parser gives it."""
    return node.name or f"node_of_{node.output[0]}"


def _first_lines(error: Exception) -> str:
    """The message on one line, without the part that repeats the model."""
    text = " ".join(str(error).split("==> Context")[0].split())
    return text if len(text) <= 400 else text[:400] + " ..."
