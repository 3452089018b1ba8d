"""The Open Inference Protocol v2: the body of an infer request -> tensors, an answer -> a body.

A body is JSON, or JSON followed by raw tensors in the order of the inputs (Triton's binary tensor
extension). The `priority` and `timeout` parameters are Triton's schedule policy extension. Pure: no
sockets, no events, no clock.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mha_deploy.errors import RequestError
from mha_deploy.serving.limits import Limits
from mha_deploy.serving.wire import checked_name, checked_shape, clip, from_bytes, from_json
from mha_deploy.signature import Array

OUTPUT = "y"
# So many JSON texts of at most so many bytes are remembered.
_REMEMBERED, _REMEMBERED_BYTES = 512, 1024
# A string (to its end or the text's, so that an open one is read once) or a bracket.
_NESTING = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)|[\[{]|[\]}]', re.DOTALL)
# Extensions that this server does not have; ignoring them would answer another question.
_REFUSED = ("shared_memory_region", "shared_memory_offset", "shared_memory_byte_size", "classification")


@dataclass(frozen=True, slots=True)
class InferRequest:
    """What a client asks for: tensors by input name, and how they are to be scheduled and answered.

    `timeout_s` is inf where the client set none; `priority` is Triton's (0 the default, 1 the highest).
    """

    id: str
    tensors: Mapping[str, Array]
    binary: bool
    timeout_s: float
    priority: int


@dataclass(frozen=True, slots=True)
class Declared:
    """An input as the JSON declares it: `count` bytes of what follows it, or, with None, its values."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    count: int | None
    values: object = None


@dataclass(frozen=True, slots=True)
class Head:
    """What the JSON of an infer request says."""

    id: str
    inputs: tuple[Declared, ...]
    binary: bool
    timeout_s: float
    priority: int


class Parser:
    """Infer requests within `limits`.

    Many requests have the same JSON, to the byte: how tensors of some length follow it. What such JSON said
    is remembered, where it is short and holds neither values nor a request's own id.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._known: dict[bytes, Head] = {}

    def __call__(self, body: Array, json_bytes: int) -> InferRequest:
        """The request in `body` (uint8), whose first `json_bytes` are JSON and whose rest is raw tensors.

        The tensors are views of `body` where they came raw.

        Raises:
            RequestError: anything that is not what the protocol says, with the place and what was expected.
        """
        text = json_text(body[:json_bytes], self._limits)
        head = self._known.get(text) or self._read(text)
        tensors = _tensors(head.inputs, body[json_bytes:])
        return InferRequest(head.id, tensors, head.binary, head.timeout_s, head.priority)

    def _read(self, text: bytes) -> Head:
        head = _read_head(text, self._limits)
        only_says_how = not head.id and all(each.count is not None for each in head.inputs)
        if only_says_how and len(text) <= _REMEMBERED_BYTES:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[text] = head
        return head


def _read_head(text: bytes, limits: Limits) -> Head:
    head = parse_object(text, limits)
    inputs: dict[str, Declared] = {}
    for item in _inputs(head, limits):
        name, datatype, parameters = _described(item)
        checked_name(name, inputs)
        shape = checked_shape(name, item.get("shape"))
        if "binary_data_size" in parameters:
            count = whole(parameters["binary_data_size"], f"input {clip(name)}: binary_data_size")
            if "data" in item:
                raise RequestError(f"input {clip(name)} has both data and binary_data_size")
            inputs[name] = Declared(name, datatype, shape, count)
        elif "data" in item:
            inputs[name] = Declared(name, datatype, shape, None, item["data"])
        else:
            raise RequestError(f"input {clip(name)} has neither data nor parameters.binary_data_size")
    parameters = _parameters(head, "the request")
    return Head(
        identity(head.get("id", ""), limits),
        tuple(inputs.values()),
        _wants_binary(head, parameters),
        timeout_seconds(parameters.get("timeout", 0)),
        whole(parameters.get("priority", 0), "priority"),
    )


def _tensors(inputs: Sequence[Declared], raw: Array) -> dict[str, Array]:
    tensors: dict[str, Array] = {}
    for each in inputs:
        if each.count is None:
            tensors[each.name] = from_json(each.name, each.datatype, each.shape, each.values)
            continue
        if each.count > raw.size:
            raise RequestError(
                f"input {clip(each.name)}: binary_data_size {each.count}, but {raw.size} bytes are left"
            )
        tensors[each.name] = from_bytes(each.name, each.datatype, each.shape, raw[: each.count])
        raw = raw[each.count :]
    if raw.size:
        raise RequestError(f"{raw.size} bytes follow the last tensor; expected none")
    return tensors


def json_text(text: Array, limits: Limits) -> bytes:
    """The bytes of JSON (uint8), unless there are too many.

    Raises:
        RequestError: 413.
    """
    if text.size > limits.json_bytes:
        raise RequestError(
            f"{text.size} bytes of JSON; at most {limits.json_bytes} are read: send tensors as binary data",
            413,
        )
    return text.tobytes()


def parse_object(text: bytes, limits: Limits) -> dict[str, Any]:
    """A JSON object, strictly: UTF-8, no NaN or Infinity, no key twice, not nested too deep.

    Raises:
        RequestError: it is not one.
    """
    try:
        decoded = text.decode("utf-8")
        _check_depth(decoded, limits.json_depth)
        value = _JSON.decode(decoded)
    except UnicodeDecodeError as error:
        raise RequestError(f"the JSON is not UTF-8: byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise RequestError(f"not JSON: {error.msg} at character {error.pos}") from error
    except (ValueError, RecursionError) as error:  # such as a number of 5,000 digits
        raise RequestError("not JSON that can be read: a number too long or nesting too deep") from error
    if not isinstance(value, dict):
        raise RequestError("the JSON is not an object")
    return value


def _check_depth(text: str, allowed: int) -> None:
    if text.count("[") + text.count("{") <= allowed:
        return
    depth = 0
    for match in _NESTING.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(match.group(), 0)
        if depth > allowed:
            raise RequestError(f"JSON nested more than {allowed} deep")


def _no_constant(word: str) -> None:
    raise RequestError(f"the JSON holds {word}, which is not JSON; send such values as binary data")


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise RequestError("the JSON has a key twice in one object")
    return found


_JSON = json.JSONDecoder(parse_constant=_no_constant, object_pairs_hook=_once_each)


def _inputs(head: Mapping[str, Any], limits: Limits) -> list[Any]:
    inputs = head.get("inputs")
    if not isinstance(inputs, list) or not 1 <= len(inputs) <= limits.tensors:
        found = f"{len(inputs)} of them" if isinstance(inputs, list) else "no list"
        raise RequestError(f"inputs: {found}; expected a list of 1 to {limits.tensors} tensors")
    return inputs


def _described(item: object) -> tuple[str, str, Mapping[str, Any]]:
    if not isinstance(item, dict):
        raise RequestError(f"an input is {clip(item)}; expected an object")
    name, datatype = item.get("name"), item.get("datatype")
    if not isinstance(name, str) or not isinstance(datatype, str):
        raise RequestError(f"an input has name {clip(name)} and datatype {clip(datatype)}; expected strings")
    return name, datatype, _parameters(item, f"input {clip(name)}")


def _parameters(item: Mapping[str, Any], whose: str) -> Mapping[str, Any]:
    parameters = item.get("parameters", {})
    if not isinstance(parameters, dict):
        raise RequestError(f"parameters of {whose} are {clip(parameters)}; expected an object")
    check_parameters(parameters, whose)
    return parameters


def check_parameters(parameters: Mapping[str, Any], whose: str) -> None:
    """Refuse what this server does not do, and values that no parameter takes.

    Raises:
        RequestError: naming the parameter.
    """
    for key, value in parameters.items():
        if isinstance(value, list | dict) or value is None:
            raise RequestError(f"parameter {clip(key)} of {whose}: expected a string, number or boolean")
        if key in _REFUSED or (key == "sequence_id" and value not in (0, "")):
            raise RequestError(f"parameter {clip(key)} of {whose}: this server has no such extension")


def identity(value: object, limits: Limits) -> str:
    """A request's id. Raises RequestError unless it is a string of a reasonable length."""
    if not isinstance(value, str) or len(value) > limits.id_chars:
        raise RequestError(f"id {clip(value)}; expected a string of at most {limits.id_chars} characters")
    return value


def _wants_binary(head: Mapping[str, Any], parameters: Mapping[str, Any]) -> bool:
    default = _flag(parameters.get("binary_data_output", False), "binary_data_output")
    outputs = head.get("outputs", [])
    if not isinstance(outputs, list) or not all(isinstance(output, dict) for output in outputs):
        raise RequestError(f"outputs: {clip(outputs)}; expected a list of objects")
    check_outputs([output.get("name") for output in outputs])
    for output in outputs:
        default = _flag(_parameters(output, "output 'y'").get("binary_data", default), "binary_data")
    return default


def check_outputs(names: Sequence[object]) -> None:
    """Raises RequestError unless `names` is empty (everything) or the one output there is."""
    if list(names) not in ([], [OUTPUT]):
        raise RequestError(f"outputs {clip(list(names))}; this block answers {OUTPUT!r}, once")


def timeout_seconds(value: object) -> float:
    """The `timeout` parameter, in microseconds, as seconds; 0 means none."""
    microseconds = whole(value, "timeout (microseconds)")
    return microseconds / 1e6 if microseconds else math.inf


def whole(value: object, what: str) -> int:
    """Raises RequestError unless `value` is a whole number of at least 0 that fits 64 bits."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise RequestError(f"{what}: {clip(value)}; expected a whole number of at least 0")
    return value


def _flag(value: object, what: str) -> bool:
    if not isinstance(value, bool):
        raise RequestError(f"{what}: {clip(value)}; expected true or false")
    return value
