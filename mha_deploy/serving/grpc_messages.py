"""gRPC's infer messages -> tensors and parameters."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from mha_deploy.errors import RequestError
from mha_deploy.serving.limits import Limits
from mha_deploy.serving.protocol import (
    InferRequest,
    check_outputs,
    check_parameters,
    identity,
    timeout_seconds,
    whole,
)
from mha_deploy.serving.wire import checked_name, checked_shape, clip, dtype_of, from_bytes
from mha_deploy.signature import Array

# Where a message that is not raw holds its elements.
_CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}


def decode(raw: bytes, into: Any) -> None:
    """Fill the message `into`. Raises RequestError where `raw` is none of its kind."""
    try:
        into.ParseFromString(raw)
    except importlib.import_module("google.protobuf.message").DecodeError as error:
        raise RequestError("the message cannot be decoded") from error


def parse_message(request: Any, limits: Limits) -> InferRequest:
    """A ModelInferRequest's tensors and parameters.

    Raises:
        RequestError: anything that is not what the protocol says.
    """
    inputs, raws = list(request.inputs), list(request.raw_input_contents)
    if not 1 <= len(inputs) <= limits.tensors:
        raise RequestError(f"{len(inputs)} inputs; expected 1 to {limits.tensors}")
    if raws and len(raws) != len(inputs):
        raise RequestError(f"{len(raws)} raw_input_contents for {len(inputs)} inputs; expected one each")
    tensors: dict[str, Array] = {}
    for index, tensor in enumerate(inputs):
        checked_name(tensor.name, tensors)
        check_parameters(_values(tensor.parameters), f"input {clip(tensor.name)}")
        if raws and tensor.HasField("contents"):
            raise RequestError(f"input {clip(tensor.name)} has both contents and raw_input_contents")
        raw = np.frombuffer(raws[index], np.uint8) if raws else _contents(tensor)
        shape = checked_shape(tensor.name, list(tensor.shape))
        tensors[tensor.name] = from_bytes(tensor.name, tensor.datatype, shape, raw)
    check_outputs([output.name for output in request.outputs])
    for output in request.outputs:
        check_parameters(_values(output.parameters), f"output {clip(output.name)}")
    parameters = _values(request.parameters)
    check_parameters(parameters, "the request")
    return InferRequest(
        identity(request.id, limits),
        tensors,
        True,
        timeout_seconds(parameters.get("timeout", 0)),
        whole(parameters.get("priority", 0), "priority"),
    )


def _contents(tensor: Any) -> Array:
    """Elements that came as numbers, as the bytes that they would be raw."""
    dtype = dtype_of(tensor.datatype)
    field = _CONTENTS.get(tensor.datatype)
    if field is None:
        raise RequestError(f"input {clip(tensor.name)}: {tensor.datatype} comes raw only")
    try:
        return np.array(getattr(tensor.contents, field), dtype).view(np.uint8)
    except OverflowError as error:
        raise RequestError(f"input {clip(tensor.name)}: a number beyond {tensor.datatype}") from error


def _values(parameters: Any) -> dict[str, Any]:
    chosen = {key: value.WhichOneof("parameter_choice") for key, value in parameters.items()}
    return {key: getattr(parameters[key], field) if field else None for key, field in chosen.items()}
