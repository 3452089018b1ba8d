"""Tensors of the Open Inference Protocol: raw bytes or JSON values -> numpy arrays, and their names.

Raw tensors are little-endian and row-major without padding; BOOL is one byte an element, BF16 the upper
half of FP32. (kserve/open-inference-protocol, inference_rest.md; Triton, extension_binary_data.md.)
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Collection, Sequence
from functools import cache
from itertools import chain
from typing import Any

import numpy as np

from mha_deploy.errors import RequestError
from mha_deploy.signature import LARGEST, Array

# A raw tensor starts on a cache line, whatever length the JSON before it has.
ALIGNMENT = 64
MAX_RANK = 8
MAX_NAME = 64
# numpy refuses shapes whose axes, but for empty ones, have a product beyond what it can address.
_MAX_ELEMENTS = 1 << 48

# So many bytes of a BOOL tensor are read in half the time that a reduction of numpy takes to begin.
_FEW_BYTES = 1024

# dtype's name (as a signature has it) -> datatype; BF16 has no dtype in numpy itself.
DATATYPES = {
    "bool": "BOOL",
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "uint64": "UINT64",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "float32": "FP32",
    "float64": "FP64",
    "bfloat16": "BF16",
}
DTYPES = {datatype: name for name, datatype in DATATYPES.items()}


@cache
def dtype_of(datatype: str) -> np.dtype[Any]:
    """The numpy dtype of a protocol datatype.

    Raises:
        RequestError: there is none; BYTES has no place in an attention block.
    """
    name = DTYPES.get(datatype)
    if name is None:
        raise RequestError(f"datatype {clip(datatype)}; expected one of {', '.join(DTYPES)}")
    if name == "bfloat16":
        import ml_dtypes

        bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    return np.dtype(name)


@cache
def _raw_dtype(datatype: str) -> np.dtype[Any]:
    """The dtype of a raw tensor's elements: little-endian, whatever this machine is."""
    dtype = dtype_of(datatype)
    return dtype.newbyteorder("<") if dtype.itemsize > 1 and dtype.kind != "V" else dtype


def checked_name(name: str, taken: Collection[str]) -> str:
    """An input's name; one that is long, and so no input's, would be told back in every message.

    Raises:
        RequestError: it is that, or given twice.
    """
    if len(name) > MAX_NAME:
        raise RequestError(f"an input's name of {len(name)} characters; expected at most {MAX_NAME}")
    if name in taken:
        raise RequestError(f"input {clip(name)} is given twice")
    return name


def checked_shape(name: str, shape: object) -> tuple[int, ...]:
    """`shape` as it came, once it is a list of whole numbers that can be one."""
    whole = isinstance(shape, Sequence) and all(type(size) is int for size in shape)
    if not whole or isinstance(shape, str | bytes):
        raise RequestError(f"input {clip(name)}: shape {clip(shape)}; expected a list of whole numbers")
    sizes: tuple[int, ...] = tuple(shape)  # type: ignore[arg-type]
    if len(sizes) > MAX_RANK or any(not 0 <= size <= LARGEST for size in sizes):
        raise RequestError(
            f"input {clip(name)}: shape {clip(list(sizes))}; expected at most {MAX_RANK} axes, "
            f"each from 0 to {LARGEST}"
        )
    if math.prod(size for size in sizes if size) > _MAX_ELEMENTS:
        raise RequestError(f"input {clip(name)}: shape {clip(list(sizes))}; no tensor can be as large")
    return sizes


def from_bytes(name: str, datatype: str, shape: tuple[int, ...], raw: Array) -> Array:
    """`raw` (uint8) as the tensor that it is: a view where it is aligned, otherwise a copy.

    Raises:
        RequestError: the shape asks for more or fewer bytes than there are, or a BOOL is not 0 or 1.
    """
    dtype = _raw_dtype(datatype)
    expected = dtype.itemsize * math.prod(shape)
    if raw.size != expected:
        raise RequestError(f"input {clip(name)}: {raw.size} bytes; {datatype} {list(shape)} takes {expected}")
    if datatype == "BOOL" and not _all_bools(raw):
        raise RequestError(f"input {clip(name)}: a BOOL of value {raw.max()}; expected 0 or 1")
    array = raw.view(dtype).reshape(shape)
    # What np.require would do, which takes longer to find out that there is nothing to do.
    return array if dtype.isnative and array.flags.aligned else array.astype(dtype_of(datatype))


def _all_bools(raw: Array) -> bool:
    """Whether every byte is 0 or 1."""
    if raw.size > _FEW_BYTES:
        return bool(raw.max() <= 1)
    return not raw.tobytes().translate(None, b"\0\1")


def all_true(mask: Array) -> bool:
    """As `mask.all()`; a large one is not copied for it."""
    if mask.size > _FEW_BYTES:
        return bool(mask.all())
    return b"\0" not in mask.tobytes()


def from_json(name: str, datatype: str, shape: tuple[int, ...], data: object) -> Array:
    """A JSON list, flat or nested as `shape` says, as a tensor.

    Raises:
        RequestError: another number of elements, another kind of element, or one beyond the datatype.
    """
    dtype = dtype_of(datatype)
    if datatype == "BF16":
        raise RequestError(f"input {clip(name)}: BF16 has no JSON form; send it as binary data")
    values = _flat(name, shape, data)
    kinds = set(map(type, values))
    allowed = {bool} if datatype == "BOOL" else {int} if dtype.kind in "iu" else {int, float}
    if not kinds <= allowed:
        listed = ", ".join(sorted(kind.__name__ for kind in kinds - allowed))
        raise RequestError(f"input {clip(name)}: data holds {listed}; expected {datatype} elements")
    try:
        with np.errstate(over="ignore"):
            array = np.array(values, dtype)
    except (OverflowError, ValueError) as error:
        raise RequestError(f"input {clip(name)}: data holds a number beyond {datatype}") from error
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise RequestError(f"input {clip(name)}: data holds a number beyond {datatype}")
    return array.reshape(shape)


def _flat(name: str, shape: tuple[int, ...], data: object) -> list[Any]:
    if not isinstance(data, list):
        raise RequestError(f"input {clip(name)}: data is a {_kind(data)}; expected a list")
    count = math.prod(shape)
    if data and isinstance(data[0], list):
        for depth, size in enumerate(shape[1:]):
            if not data:
                break
            rows = math.prod(shape[: depth + 1])
            if set(map(type, data)) != {list} or len(data) != rows or set(map(len, data)) != {size}:
                raise RequestError(f"input {clip(name)}: data is not nested as shape {list(shape)} says")
            data = list(chain.from_iterable(data))
    if len(data) != count:
        raise RequestError(
            f"input {clip(name)}: data holds {len(data)} elements; shape {list(shape)} takes {count}"
        )
    return data


def to_json(array: Array) -> list[Any]:
    """A tensor's elements, flat, for JSON.

    Raises:
        RequestError: it holds NaN or inf, for which JSON has no words.
    """
    if not np.isfinite(array).all():
        raise RequestError(
            "the answer holds NaN or inf, which JSON cannot carry; ask for binary output "
            '("parameters": {"binary_data_output": true})'
        )
    return list(array.ravel().tolist())


def aligned(size: int, offset: int) -> Array:
    """`size` bytes (uint8, not cleared), of which the one at `offset` lies on a cache line."""
    block = np.empty(size + ALIGNMENT, np.uint8)
    # block.ctypes.data would take three times as long.
    address = ctypes.addressof(ctypes.c_char.from_buffer(block.data))
    start = -(address + offset) % ALIGNMENT
    return block[start : start + size]


def clip(value: object) -> str:
    """What a client sent, short enough to be told back; the server's own texts hold no more of it."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _kind(value: object) -> str:
    return {dict: "object", str: "string", bool: "boolean", type(None): "null"}.get(type(value), "number")
