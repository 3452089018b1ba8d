"""Packed requests in a file, padded inputs for a graph, and the way back."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mha_deploy.errors import FeedError
from mha_deploy.ragged import Request, RequestCheck, check_request, is_packed, length_names, pack, pad, unpack
from mha_deploy.signature import Dim
from mha_deploy.spec import AttentionSpec

WIDTH = 4
SELF = AttentionSpec(WIDTH, 2)
CROSS = AttentionSpec(WIDTH, 2, kind="cross", kdim=3, vdim=5)


def numbered(rows, width, start=1):
    return np.arange(start, start + rows * width, dtype=np.float32).reshape(rows, width)


def packed_cross(q_lengths=(2, 1), kv_lengths=(3, 4)):
    return {
        "query": numbered(sum(q_lengths), WIDTH),
        "key": numbered(sum(kv_lengths), 3),
        "value": numbered(sum(kv_lengths), 5),
        "q_lengths": np.array(q_lengths),
        "kv_lengths": np.array(kv_lengths),
    }


def refusal(spec, tensors):
    with pytest.raises(FeedError) as caught:
        unpack(spec, tensors)
    return str(caught.value)


def test_the_names_of_lengths_follow_the_kind():
    assert length_names(SELF) == ("lengths",)
    assert length_names(CROSS) == ("q_lengths", "kv_lengths")


@pytest.mark.parametrize(
    ("name", "packed"), [("lengths", True), ("q_lengths", True), ("kv_lengths", True), ("mask", False)]
)
def test_arrays_with_lengths_are_packed(name, packed):
    assert is_packed({"x": np.zeros(1), name: np.ones(1)}) is packed


@settings(deadline=None, max_examples=50)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_packed_requests_come_apart_in_order_and_pack_again(lengths):
    x = numbered(sum(lengths), WIDTH)
    requests = unpack(SELF, {"x": x, "lengths": np.array(lengths)})
    assert [(r.q_len, r.kv_len) for r in requests] == [(length, length) for length in lengths]
    np.testing.assert_array_equal(pack([r.tensors["x"] for r in requests]), x)


def test_cross_requests_take_query_rows_by_q_lengths_and_key_rows_by_kv_lengths():
    tensors = packed_cross()
    first, second = unpack(CROSS, tensors)
    assert [(r.q_len, r.kv_len) for r in (first, second)] == [(2, 3), (1, 4)]
    np.testing.assert_array_equal(first.tensors["query"], tensors["query"][:2])
    np.testing.assert_array_equal(second.tensors["query"], tensors["query"][2:])
    np.testing.assert_array_equal(first.tensors["key"], tensors["key"][:3])
    np.testing.assert_array_equal(second.tensors["value"], tensors["value"][3:])


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8])
def test_lengths_may_be_any_whole_numbers(dtype):
    requests = unpack(SELF, {"x": numbered(3, WIDTH), "lengths": np.array([1, 2], dtype)})
    assert [type(r.q_len) for r in requests] == [int, int]


def test_lengths_whose_sum_overflows_their_own_dtype_are_summed_in_full():
    requests = unpack(SELF, {"x": numbered(400, WIDTH), "lengths": np.array([200, 200], np.uint8)})
    assert [len(r.tensors["x"]) for r in requests] == [200, 200]


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        (np.array([], np.int64), "'lengths' has shape [0], dtype int64; expected at least one length"),
        (np.array([3, 0]), "'lengths' holds 0; expected at least one length"),
        (np.array([4, -1]), "whole numbers of at least 1"),
        (np.array([1.0, 2.0]), "'lengths' has shape [2], dtype float64"),
        (np.array([[1, 2]]), "'lengths' has shape [1, 2], dtype int64"),
        (np.array(3), "'lengths' has shape [], dtype int64"),
        (np.array([True, True]), "'lengths' has shape [2], dtype bool"),
        (np.array([1, 1]), "packed 'x' has shape [3, 4]; expected [2, 4], the lengths' sum by the width"),
        (np.array([2, 2]), "packed 'x' has shape [3, 4]; expected [4, 4], the lengths' sum by the width"),
    ],
)  # fmt: skip
def test_lengths_that_do_not_fit_the_rows_are_refused(lengths, said):
    assert said in refusal(SELF, {"x": numbered(3, WIDTH), "lengths": lengths})


@pytest.mark.parametrize("shape", [(3, 5), (3, 1), (3,), (1, 3, 4)])
def test_rows_of_another_width_or_rank_are_refused(shape):
    said = refusal(SELF, {"x": np.zeros(shape, np.float32), "lengths": np.array([1, 2])})
    assert f"packed 'x' has shape {list(shape)}; expected [3, 4]" in said


def test_missing_and_unknown_arrays_are_named():
    x, lengths = numbered(3, WIDTH), np.array([3])
    said = refusal(SELF, {"x": x, "lengths": lengths, "mask": np.ones((1, 3), bool)})
    assert said == "packed requests hold lengths, mask, x; expected lengths, x"
    assert refusal(SELF, {"lengths": lengths}) == "packed requests hold lengths; expected lengths, x"
    assert "expected key, kv_lengths, q_lengths, query, value" in refusal(CROSS, {"x": x, "lengths": lengths})


def test_as_many_queries_as_keys_are_asked_for():
    tensors = {**packed_cross(), "q_lengths": np.array([3])}
    assert refusal(CROSS, tensors) == "q_lengths and kv_lengths differ in number: [1, 2]"


def test_a_block_with_a_full_mask_takes_padded_arrays_only():
    full = AttentionSpec(WIDTH, 2, mask="full")
    said = refusal(full, {"x": numbered(3, WIDTH), "lengths": np.array([3])})
    assert said == "packed requests carry no mask, but this block needs a full one; give padded arrays"
    said = refusal(
        full, {"x": numbered(3, WIDTH), "lengths": np.array([3]), "attn_mask": np.ones((3, 3), bool)}
    )
    assert said.endswith("(a full mask needs padded arrays)")


def test_padding_is_zero_on_the_right_and_masked():
    requests = unpack(SELF, {"x": numbered(5, WIDTH), "lengths": np.array([2, 3])})
    feeds = pad(SELF, requests, {"batch": 3, "seq": 4})
    x = np.zeros((3, 4, WIDTH), np.float32)
    x[0, :2], x[1, :3] = numbered(2, WIDTH), numbered(3, WIDTH, start=9)
    np.testing.assert_array_equal(feeds["x"], x)
    np.testing.assert_array_equal(
        feeds["mask"],
        np.array([[True, True, False, False], [True, True, True, False], [False] * 4]),
    )
    assert SELF.signature.check(feeds) == {"batch": 3, "seq": 4}


def test_cross_padding_masks_keys_and_leaves_queries_to_be_trimmed():
    feeds = pad(CROSS, unpack(CROSS, packed_cross()), {"batch": 2, "q_len": 3, "kv_len": 5})
    assert feeds["mask"].sum(axis=1).tolist() == [3, 4]
    assert CROSS.signature.check(feeds) == {"batch": 2, "q_len": 3, "kv_len": 5}
    assert not feeds["query"][1, 1:].any()
    assert not feeds["value"][0, 3:].any()


def test_a_full_mask_is_made_of_both_lengths():
    spec = AttentionSpec(WIDTH, 2, kind="cross", mask="full")
    tensors = {"query": numbered(2, WIDTH), "key": numbered(3, WIDTH), "value": numbered(3, WIDTH)}
    keep = pad(spec, [Request(tensors, 2, 3)], {"batch": 1, "q_len": 3, "kv_len": 4})["attn_mask"]
    assert keep.tolist() == [[[True, True, True, False], [True, True, True, False], [False] * 4]]


def test_padding_never_reuses_what_an_earlier_batch_held():
    dims = (Dim("batch", 1, 2, 4), Dim("seq", 1, 4, 8))
    spec = AttentionSpec(WIDTH, 2, dims=dims)
    sizes = {"batch": 2, "seq": 8}
    full = [Request({"x": np.full((8, WIDTH), np.nan, np.float32)}, 8, 8)] * 2
    pad(spec, full, sizes)
    assert not pad(spec, [Request({"x": np.zeros((1, WIDTH), np.float32)}, 1, 1)], sizes)["x"].any()


def test_a_request_that_says_another_length_than_its_rows_is_refused():
    request = Request({"x": numbered(3, WIDTH)}, 2, 2)
    with pytest.raises(FeedError, match=re.escape("[3, 4]")):
        pad(SELF, [request], {"batch": 1, "seq": 4})


def test_a_request_of_width_one_is_not_spread_over_the_width():
    request = Request({"x": np.ones((2, 1), np.float32)}, 2, 2)
    with pytest.raises(FeedError, match=re.escape("[2, 1]")):
        pad(SELF, [request], {"batch": 1, "seq": 4})


def test_a_request_may_bring_its_own_padding_mask():
    hole = np.array([True, False, True])
    requests = [Request({"x": numbered(3, WIDTH)}, 3, 3, hole), Request({"x": numbered(2, WIDTH)}, 2, 2)]
    feeds = pad(SELF, requests, {"batch": 3, "seq": 4})
    assert feeds["mask"].tolist() == [
        [True, False, True, False],
        [True, True, False, False],
        [False, False, False, False],
    ]


def test_a_request_may_bring_its_own_full_mask():
    full = AttentionSpec(WIDTH, 2, mask="full")
    own = np.array([[True, False], [False, False]])
    requests = [Request({"x": numbered(2, WIDTH)}, 2, 2, own), Request({"x": numbered(1, WIDTH)}, 1, 1)]
    feeds = pad(full, requests, {"batch": 2, "seq": 3})
    assert feeds["attn_mask"].astype(int).tolist() == [
        [[1, 0, 0], [0, 0, 0], [0, 0, 0]],
        [[1, 0, 0], [0, 0, 0], [0, 0, 0]],
    ]


def test_tokens_of_a_request_are_its_queries_and_in_cross_attention_its_keys_too():
    assert Request({}, 3, 3).tokens(SELF) == 3
    assert Request({}, 3, 5).tokens(CROSS) == 8


@pytest.mark.parametrize(("length", "mask", "passes"), [(1, "padding", True), (1, "none", False)])
def test_a_request_shorter_than_the_graph_takes_passes_only_where_a_mask_can_say_so(length, mask, passes):
    spec = AttentionSpec(WIDTH, 2, mask=mask, dims=(Dim("batch", 1, 1, 2), Dim("seq", 5, 8, 24)))
    one = Request({"x": numbered(length, WIDTH)}, length, length)
    if passes:
        check_request(spec, spec.signature, one)
    else:
        with pytest.raises(FeedError, match=r"request 3 has seq = 1; this block takes seq 5\.\.24"):
            check_request(spec, spec.signature, one, "request 3")


def said(check):
    try:
        check()
    except FeedError as error:
        return str(error)
    return ""


@given(
    kind=st.sampled_from(["self", "cross"]),
    mask=st.sampled_from(["none", "padding", "full"]),
    q_len=st.integers(0, 26),
    kv_len=st.integers(0, 26),
    off=st.integers(-1, 1),
    dtype=st.sampled_from(["float32", ">f4", "float16", "int32"]),
    own=st.sampled_from(["", "keys", "pairs"]),
    names=st.sampled_from(["its", "fewer", "more"]),
)
def test_the_quick_check_refuses_what_the_long_one_does_and_says_the_same(
    kind, mask, q_len, kv_len, off, dtype, own, names
):
    bounds = [Dim(name, 3, 8, 24) for name in (("seq",) if kind == "self" else ("q_len", "kv_len"))]
    spec = AttentionSpec(WIDTH, 2, kind=kind, mask=mask, dims=(Dim("batch", 1, 1, 2), *bounds))
    of = {"x": q_len, "query": q_len, "key": kv_len, "value": kv_len + off}
    wanted = [tensor.name for tensor in spec.signature.inputs if tensor.is_float]
    tensors = {name: np.zeros((max(0, of[name]), WIDTH), dtype) for name in wanted}
    if names == "fewer":
        del tensors[wanted[-1]]
    elif names == "more":
        tensors["other"] = np.zeros((q_len, WIDTH), np.float32)
    shape = {"": (0,), "keys": (kv_len,), "pairs": (q_len, kv_len)}[own]
    one = Request(tensors, q_len, kv_len, np.ones(shape, bool))
    quick = said(lambda: RequestCheck(spec, spec.signature)(one, "request 3"))
    assert quick == said(lambda: check_request(spec, spec.signature, one, "request 3"))
