"""Bodies of infer requests: what is read of them, and what is refused with which words."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mha_deploy.errors import RequestError
from mha_deploy.serving import protocol
from mha_deploy.serving.limits import Limits
from mha_deploy.serving.protocol import Parser, parse_object
from mha_deploy.serving.wire import DTYPES, aligned, all_true, dtype_of, from_bytes, from_json, to_json

LIMITS = Limits()


def body_of(head, raw=b""):
    text = json.dumps(head).encode()
    body = aligned(len(text) + len(raw), len(text))
    body[:] = np.frombuffer(text + raw, np.uint8)
    return body, len(text)


def request_of(head, raw=b"", limits=LIMITS):
    return Parser(limits)(*body_of(head, raw))


def x_input(shape, **fields):
    return {"name": "x", "shape": shape, "datatype": "FP32", **fields}


def binary(shape, size):
    return x_input(shape, parameters={"binary_data_size": size})


def test_raw_tensors_are_aligned_views_of_the_body():
    x, mask = np.arange(12, dtype=np.float32).reshape(1, 3, 4), np.ones((1, 3), bool)
    inputs = [
        binary([1, 3, 4], 48),
        {"name": "mask", "shape": [1, 3], "datatype": "BOOL", "parameters": {"binary_data_size": 3}},
    ]
    body, head = body_of({"inputs": inputs}, x.tobytes() + mask.tobytes())
    tensors = Parser(LIMITS)(body, head).tensors
    assert np.array_equal(tensors["x"], x)
    assert np.array_equal(tensors["mask"], mask)
    for tensor in tensors.values():
        assert np.shares_memory(tensor, body)
    assert tensors["x"].ctypes.data % 64 == 0


@pytest.mark.parametrize(("identity", "times"), [("", 1), ("a", 4)])
def test_the_same_json_again_is_read_once_and_says_the_same_of_other_tensors(monkeypatch, identity, times):
    read = []
    monkeypatch.setattr(protocol, "parse_object", lambda *given: read.append(1) or parse_object(*given))
    inputs, parameters = [binary([1, 1, 2], 8)], {"timeout": 5}
    parser, head = Parser(LIMITS), {"id": identity, "inputs": inputs, "parameters": parameters}
    for value in (1, 2):
        x = np.full((1, 1, 2), value, np.float32)
        found = parser(*body_of(head, x.tobytes()))
        assert (found.id, found.timeout_s, found.binary) == (identity, 5e-6, False)
        assert np.array_equal(found.tensors["x"], x)
    for raw in (b"1234", b"123456789"):
        with pytest.raises(RequestError, match=r"bytes are left|bytes follow"):
            parser(*body_of(head, raw))
    assert len(read) == times


def test_what_is_long_and_what_holds_values_is_not_remembered_and_what_is_has_a_bound():
    parser = Parser(LIMITS)
    parser(*body_of({"inputs": [x_input([2], data=[1, 2])]}))
    parser(*body_of({"inputs": [binary([0], 0)], "parameters": {"unknown": "x" * 1024}}))
    assert not parser._known
    for size in range(2000):
        parser(*body_of({"inputs": [binary([size, 0], 0)]}))
    assert len(parser._known) <= 512


def test_json_that_was_refused_once_is_refused_again():
    parser = Parser(LIMITS)
    for _ in range(2):
        with pytest.raises(RequestError, match="expected a list of whole numbers"):
            parser(*body_of({"inputs": [binary([1.5], 8)]}, b"12345678"))


def test_a_tensor_that_cannot_be_aligned_is_copied_whole():
    mask, x = np.ones((1, 3), bool), np.arange(12, dtype=np.float32).reshape(1, 3, 4)
    inputs = [
        {"name": "mask", "shape": [1, 3], "datatype": "BOOL", "parameters": {"binary_data_size": 3}},
        binary([1, 3, 4], 48),
    ]
    found = request_of({"inputs": inputs}, mask.tobytes() + x.tobytes()).tensors["x"]
    assert found.flags.aligned
    assert np.array_equal(found, x)


@given(st.sampled_from(sorted(set(DTYPES) - {"BF16"})), st.lists(st.integers(0, 3), max_size=4), st.data())
def test_a_tensor_comes_back_from_its_bytes_and_from_its_json(datatype, shape, data):
    dtype = dtype_of(datatype)
    count = math.prod(shape)
    if datatype == "BOOL":
        elements = st.booleans()
    elif dtype.kind in "iu":
        elements = st.integers(int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
    else:
        elements = st.floats(-1000, 1000, width=16)
    values = data.draw(st.lists(elements, min_size=count, max_size=count))
    array = np.array(values, dtype).reshape(shape)
    raw = np.frombuffer(array.tobytes(), np.uint8)
    assert np.array_equal(from_bytes("x", datatype, tuple(shape), raw), array)
    for form in (values, array.tolist() if shape else values):
        assert np.array_equal(from_json("x", datatype, tuple(shape), form), array)
    assert to_json(array) == array.ravel().tolist()


@pytest.mark.parametrize("size", [1, 1024, 1025])
def test_a_mask_of_any_size_is_read_to_its_last_byte(size):
    raw = np.ones(size, np.uint8)
    assert all_true(from_bytes("mask", "BOOL", (size,), raw))
    raw[-1] = 0
    assert not all_true(from_bytes("mask", "BOOL", (size,), raw))
    raw[-1] = 2
    with pytest.raises(RequestError, match="a BOOL of value 2; expected 0 or 1"):
        from_bytes("mask", "BOOL", (size,), raw)


def test_bf16_is_the_upper_half_of_fp32():
    raw = np.array([1.0, -2.5], np.float32).view(np.uint16)[1::2].copy().view(np.uint8)
    assert from_bytes("x", "BF16", (2,), raw).astype(np.float32).tolist() == [1.0, -2.5]


def test_nested_json_data_reads_as_flat_data_does():
    flat = request_of({"inputs": [x_input([1, 2, 2], data=[1, 2.5, 3, 4])]}).tensors["x"]
    nested = request_of({"inputs": [x_input([1, 2, 2], data=[[[1, 2.5], [3, 4]]])]}).tensors["x"]
    assert np.array_equal(flat, nested)
    assert flat.dtype == np.float32


def test_the_schedule_policy_is_read():
    head = {"inputs": [x_input([1], data=[0])], "parameters": {"priority": 1, "timeout": 2500}}
    asked = request_of(head)
    assert (asked.priority, asked.timeout_s) == (1, 0.0025)
    assert request_of({"inputs": [x_input([1], data=[0])]}).timeout_s == math.inf


@pytest.mark.parametrize(
    ("head", "binary_wanted"),
    [
        ({}, False),
        ({"parameters": {"binary_data_output": True}}, True),
        ({"outputs": [{"name": "y"}]}, False),
        ({"outputs": [{"name": "y", "parameters": {"binary_data": True}}]}, True),
        ({"outputs": [{"name": "y"}], "parameters": {"binary_data_output": True}}, True),
        (
            {
                "outputs": [{"name": "y", "parameters": {"binary_data": False}}],
                "parameters": {"binary_data_output": True},
            },
            False,
        ),
    ],
)
def test_the_outputs_form_is_the_one_asked_for(head, binary_wanted):
    assert request_of({"inputs": [x_input([1], data=[0])], **head}).binary is binary_wanted


def test_the_id_may_be_absent():
    assert request_of({"inputs": [x_input([1], data=[0])]}).id == ""
    assert request_of({"inputs": [x_input([1], data=[0])], "id": "r-1"}).id == "r-1"


ONE = [x_input([1], data=[0])]
REFUSED = {
    "an id that is a number": ({"id": 7, "inputs": ONE}, "id 7; expected a string"),
    "a long id": ({"id": "i" * 2000, "inputs": ONE}, "at most 1024 characters"),
    "no inputs": ({}, "inputs: no list"),
    "an empty list of inputs": ({"inputs": []}, "0 of them; expected a list of 1 to 8"),
    "too many inputs": ({"inputs": ONE * 9}, "9 of them"),
    "an input twice": ({"inputs": ONE * 2}, "'x' is given twice"),
    "an input that is no object": ({"inputs": [1]}, "an input is 1; expected an object"),
    "no name": ({"inputs": [{"shape": [1], "datatype": "FP32", "data": [0]}]}, "name None"),
    "a datatype that is a number": ({"inputs": [{"name": "x", "shape": [1], "datatype": 4}]}, "datatype 4"),
    "an unknown datatype": ({"inputs": [{**ONE[0], "datatype": "FP31"}]}, "'FP31'; expected one of"),
    "BYTES": ({"inputs": [{**ONE[0], "datatype": "BYTES"}]}, "'BYTES'; expected one of"),
    "a negative dim": ({"inputs": [x_input([-1], data=[])]}, "each from 0 to"),
    "a boolean dim": ({"inputs": [x_input([True], data=[0])]}, "expected a list of whole numbers"),
    "a fractional dim": ({"inputs": [x_input([1.0], data=[0])]}, "expected a list of whole numbers"),
    "no shape": ({"inputs": [{"name": "x", "datatype": "FP32", "data": [0]}]}, "shape None"),
    "a shape that is text": ({"inputs": [x_input("12", data=[0])]}, "expected a list of whole numbers"),
    "too many axes": ({"inputs": [x_input([1] * 9, data=[0])]}, "at most 8 axes"),
    "a dim beyond 32 bits": ({"inputs": [x_input([2**31], data=[0])]}, "each from 0 to"),
    "more elements than the shape": ({"inputs": [x_input([1], data=[0, 1])]}, "2 elements; shape"),
    "fewer elements than the shape": ({"inputs": [x_input([3], data=[0])]}, "1 elements; shape"),
    "a ragged nest": ({"inputs": [x_input([2, 2], data=[[1, 2], [3]])]}, "not nested as shape"),
    "a nest of another shape": ({"inputs": [x_input([2, 3], data=[[1, 2], [3, 4], [5, 6]])]}, "not nested"),
    "data that is text": ({"inputs": [x_input([1], data="0")]}, "data is a string"),
    "data that is null": ({"inputs": [x_input([1], data=None)]}, "data is a null"),
    "an element that is text": ({"inputs": [x_input([1], data=["1"])]}, "data holds str; expected FP32"),
    "an element that is null": ({"inputs": [x_input([1], data=[None])]}, "data holds NoneType"),
    "a boolean among numbers": ({"inputs": [x_input([2], data=[1.5, True])]}, "data holds bool"),
    "a number beyond FP32": ({"inputs": [x_input([1], data=[1e39])]}, "a number beyond FP32"),
    "a number of 400 digits": ({"inputs": [x_input([1], data=[10**400])]}, "a number beyond FP32"),
    "neither data nor size": ({"inputs": [x_input([1])]}, "neither data nor"),
    "both data and size": ({"inputs": [{**binary([1], 4), "data": [0]}]}, "both data and binary_data_size"),
    "a size beyond the body": ({"inputs": [binary([1], 4)]}, "binary_data_size 4, but 0 bytes are left"),
    "a negative size": ({"inputs": [binary([1], -4)]}, "expected a whole number of at least 0"),
    "a size that is text": ({"inputs": [binary([1], "4")]}, "expected a whole number of at least 0"),
    "parameters that are a list": ({"inputs": ONE, "parameters": []}, "expected an object"),
    "a parameter that is a list": ({"inputs": ONE, "parameters": {"a": []}}, "a string, number or boolean"),
    "shared memory": (
        {"inputs": [x_input([1], parameters={"shared_memory_region": "r"})]},
        "no such extension",
    ),
    "a sequence": ({"inputs": ONE, "parameters": {"sequence_id": 3}}, "no such extension"),
    "a classification": (
        {"inputs": ONE, "outputs": [{"name": "y", "parameters": {"classification": 2}}]},
        "no such extension",
    ),
    "another output": ({"inputs": ONE, "outputs": [{"name": "z"}]}, "this block answers 'y', once"),
    "an output twice": ({"inputs": ONE, "outputs": [{"name": "y"}] * 2}, "this block answers 'y', once"),
    "outputs that are text": ({"inputs": ONE, "outputs": "y"}, "expected a list of objects"),
    "a form that is a number": ({"inputs": ONE, "parameters": {"binary_data_output": 1}}, "true or false"),
    "a negative timeout": ({"inputs": ONE, "parameters": {"timeout": -1}}, "timeout"),
    "a fractional timeout": ({"inputs": ONE, "parameters": {"timeout": 0.5}}, "timeout"),
    "a boolean priority": ({"inputs": ONE, "parameters": {"priority": True}}, "priority"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what):
    head, words = REFUSED[what]
    with pytest.raises(RequestError) as caught:
        request_of(head)
    assert words in str(caught.value)
    assert caught.value.status == 400


def test_bytes_are_counted_before_anything_is_made_of_a_shape():
    with pytest.raises(RequestError, match=r"4 bytes; FP32 \[2147483647, 65536\] takes 562949953159168"):
        request_of({"inputs": [binary([2**31 - 1, 2**16], 4)]}, bytes(4))


def test_bytes_after_the_last_tensor_are_refused():
    with pytest.raises(RequestError, match="3 bytes follow the last tensor"):
        request_of({"inputs": [binary([1], 4)]}, bytes(7))


def test_a_raw_bool_is_0_or_1():
    item = {"name": "mask", "shape": [2], "datatype": "BOOL", "parameters": {"binary_data_size": 2}}
    with pytest.raises(RequestError, match="a BOOL of value 2"):
        request_of({"inputs": [item]}, b"\x01\x02")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "not JSON: Expecting value at character 0"),
        (b"[]", "not an object"),
        (b'{"inputs"', "not JSON"),
        (b"\xff\xfe{}", "not UTF-8: byte 0"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        (b'{"a": NaN}', "holds NaN"),
        (b'{"a": -Infinity}', "holds -Infinity"),
        (b'{"a": 1, "a": 2}', "a key twice"),
        (b'{"a": 1} {}', "not JSON: Extra data"),
        (b'{"a": ' + b"9" * 5000 + b"}", "a number too long"),
        (b'{"a": ' + b"[" * 100_000, "nested more than 16 deep"),
        (b'{"a":' * 100_000, "nested more than 16 deep"),
        (b'{"a": "' + b'\\"' * 50_000 + b"[" * 40, "not JSON"),
        ("{}".encode("utf-16"), "not UTF-8"),
    ],
)
def test_json_is_read_strictly(text, words):
    with pytest.raises(RequestError, match=words):
        Parser(LIMITS)(np.frombuffer(text, np.uint8), len(text))


def test_brackets_in_strings_do_not_nest():
    head = {"inputs": [x_input([1], data=[0])], "id": "[" * 40 + '"\\' + "{" * 40}
    assert request_of(head).id == head["id"]


def test_json_beyond_its_limit_is_413():
    with pytest.raises(RequestError, match="send tensors as binary data") as caught:
        request_of({"inputs": ONE, "id": "i" * 500}, limits=Limits(json_bytes=400))
    assert caught.value.status == 413


def test_nan_has_no_json_form():
    with pytest.raises(RequestError, match="ask for binary output"):
        to_json(np.array([1.0, np.nan], np.float32))
    assert np.isnan(from_bytes("x", "FP32", (1,), np.array([np.nan], np.float32).view(np.uint8))).all()
