"""ONNX files: written, held against a signature, and recorded. PyTorch is not needed for any of it."""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import helper

from mha_deploy.errors import FrozenAxisError, GraphError
from mha_deploy.file_record import FileRecord
from mha_deploy.signature import Signature

# protobuf refuses messages of 2 GiB; above this, weights go to a file of their own.
INLINE_LIMIT = 1_500_000_000

_RANDOM_OPS = (
    "Dropout",
    "Bernoulli",
    "RandomNormal",
    "RandomUniform",
    "RandomNormalLike",
    "RandomUniformLike",
)


def save(model: onnx.ModelProto, path: Path) -> None:
    """Write a model whose weights are in memory, with external data where they are large."""
    large = model.ByteSize() > INLINE_LIMIT
    onnx.save(model, str(path), save_as_external_data=large, location=f"{path.name}.data" if large else None)


def files_of(bundle: Path, folder: str, name: str) -> tuple[FileRecord, ...]:
    """The ONNX file and the external data beside it."""
    names = [name, *sorted(path.name for path in (bundle / folder).glob(f"{name}.*"))]
    return tuple(FileRecord.of(bundle, f"{folder}/{each}") for each in names)


def check_graph(path: Path, signature: Signature) -> None:
    """Hold the file's structure against the signature it was made for.

    Raises:
        FrozenAxisError: an axis is a number where the signature has a dim.
        GraphError: the file is not valid ONNX, or its inputs and outputs are others.
    """
    try:
        onnx.checker.check_model(str(path), full_check=True)
        model = onnx.load(str(path), load_external_data=False)
    except Exception as error:  # protobuf and the checker share no base class
        first = (str(error).strip().splitlines() or [repr(error)])[0]
        raise GraphError(f"{path.name} is not a valid ONNX file: {first}") from error
    random = [node.name for node in model.graph.node if node.op_type in _RANDOM_OPS]
    if random:
        raise GraphError(f"{path.name} is not deterministic: {', '.join(random)}; export in eval mode")
    values = {value.name: value for value in (*model.graph.input, *model.graph.output)}
    for tensor in (*signature.inputs, *signature.outputs):
        if tensor.name not in values:
            raise GraphError(f"{path.name} has no {tensor.name!r}; it has {', '.join(values)}")
        dtype = helper.tensor_dtype_to_np_dtype(values[tensor.name].type.tensor_type.elem_type).name
        if dtype != tensor.dtype:
            raise GraphError(f"{path.name} has {tensor.name!r} in {dtype}; expected {tensor.dtype}")
        found = [axis.dim_param or axis.dim_value for axis in values[tensor.name].type.tensor_type.shape.dim]
        for position, (axis, got) in enumerate(zip(tensor.shape, found, strict=True)):
            if axis != got and isinstance(axis, str):
                raise FrozenAxisError(
                    f"axis {axis!r} of {tensor.name!r} (position {position}) is {got!r} in the exported "
                    f"graph{_producer(model, tensor.name)}; expected it to be dynamic"
                )


def _producer(model: onnx.ModelProto, name: str) -> str:
    for node in model.graph.node:
        if name in node.output:
            return f", from node {node.name!r} ({node.op_type})"
    return ""
