"""The packed layout in numpy: indices that find every token, and runs that cost least."""

import itertools

import numpy as np
import pytest
from conftest import small_spec
from hypothesis import given
from hypothesis import strategies as st

from mha_deploy.errors import SpecError
from mha_deploy.packed import (
    UNMEASURED,
    Piece,
    RunCost,
    graph_feeds,
    graph_signature,
    plan_runs,
    request_signature,
)

CROSS = small_spec(kind="cross", kdim=20, vdim=24, dims=())
LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=7)
PAIRS = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=7)
COSTS = st.builds(RunCost, *[st.sampled_from([0.0, 1.0, 30.0, 1000.0])] * 3)


def numbered(lengths):
    """Pieces whose every token holds a number of its own."""
    tokens = np.arange(sum(lengths), dtype=np.float32)[:, None].repeat(32, axis=1)
    ends = np.cumsum(lengths)
    return [
        Piece({"x": tokens[end - length : end]}, np.ones(length, bool))
        for end, length in zip(ends, lengths, strict=True)
    ]


@given(LENGTHS)
def test_each_row_finds_its_own_tokens_and_each_token_its_place(lengths):
    feeds = graph_feeds(small_spec(), numbered(lengths))
    rows = feeds["x"][feeds["index"]]
    end = 0
    for row, length in enumerate(lengths):
        start, end = end, end + length
        np.testing.assert_array_equal(rows[row, :length, 0], np.arange(start, end))
        assert feeds["mask"][row].tolist() == [True] * length + [False] * (max(lengths) - length)
    np.testing.assert_array_equal(rows.reshape(-1, 32)[feeds["place"]], feeds["x"])


@given(LENGTHS)
def test_a_row_is_filled_up_with_its_own_first_token(lengths):
    feeds = graph_feeds(small_spec(), numbered(lengths))
    starts = np.cumsum(lengths) - lengths
    for row, length in enumerate(lengths):
        assert (feeds["index"][row, length:] == starts[row]).all()


def test_queries_and_keys_of_cross_attention_have_indices_of_their_own():
    lengths = [(2, 3), (4, 1)]
    pieces = [
        Piece(
            {
                "query": np.zeros((q, 32), np.float32),
                "key": np.zeros((kv, 20), np.float32),
                "value": np.zeros((kv, 24), np.float32),
            },
            np.ones(kv, bool),
        )
        for q, kv in lengths
    ]
    feeds = graph_feeds(CROSS, pieces)
    assert feeds["q_index"].tolist() == [[0, 1, 0, 0], [2, 3, 4, 5]]
    assert feeds["kv_index"].tolist() == [[0, 1, 2], [3, 3, 3]]
    assert feeds["mask"].tolist() == [[True] * 3, [True, False, False]]
    assert feeds["place"].tolist() == [0, 1, 4, 5, 6, 7]
    assert graph_signature(CROSS).check(feeds) == {
        "rows": 2,
        "q_longest": 4,
        "q_tokens": 6,
        "kv_longest": 3,
        "kv_tokens": 4,
    }


@given(PAIRS, st.integers(1, 4), COSTS)
def test_a_plan_costs_no_more_than_any_other_cut_of_the_sorted_requests(lengths, most_rows, cost):
    def total(runs):
        return sum(cost.of(len(r), *(max(lengths[i][k] for i in r) for k in (0, 1))) for r in runs)

    plan = plan_runs(lengths, most_rows, cost)
    assert sorted(itertools.chain(*plan)) == list(range(len(lengths)))
    assert max(map(len, plan)) <= most_rows
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i][1], lengths[i][0], i))
    for cuts in itertools.product([False, True], repeat=len(order) - 1):
        places = [0, *(i for i, cut in enumerate(cuts, 1) if cut), len(order)]
        runs = [order[a:b] for a, b in itertools.pairwise(places)]
        if max(map(len, runs)) <= most_rows:
            assert total(plan) <= total(runs) * (1 + 1e-9)


def test_where_runs_are_dear_requests_share_them_and_where_padding_is_they_do_not():
    lengths = [(n, n) for n in (3, 50, 4, 5, 60)]
    assert plan_runs(lengths, 8, RunCost(1e9, 1.0, 1.0)) == [(0, 2, 3, 1, 4)]
    assert plan_runs(lengths, 8, RunCost(0.0, 1.0, 1.0)) == [(0,), (2,), (3,), (1,), (4,)]
    assert plan_runs(lengths, 8, RunCost(200.0, 1.0, 0.1)) == [(0, 2, 3), (1, 4)]


def test_before_anything_is_measured_there_are_as_few_runs_as_can_be():
    assert [len(run) for run in plan_runs([(n, n) for n in range(1, 10)], 4, UNMEASURED)] == [1, 4, 4]


@pytest.mark.parametrize("signature", [graph_signature, request_signature])
def test_a_full_mask_has_no_packed_layout(signature):
    with pytest.raises(SpecError, match=r"mask = 'full' has no packed layout: .* lengths and no mask"):
        signature(small_spec(mask="full"))


def test_the_two_signatures_say_what_each_side_gives():
    assert [str(tensor) for tensor in graph_signature(small_spec()).inputs] == [
        "x [tokens, 32] float32",
        "index [rows, longest] int64 (where each row's tokens are)",
        "mask [rows, longest] bool (True = a key, False = filling)",
        "place [tokens] int64 (where each answer is in the rows)",
    ]
    assert [str(tensor) for tensor in request_signature(CROSS).inputs] == [
        "query [q_tokens, 32] float32",
        "key [kv_tokens, 20] float32",
        "value [kv_tokens, 24] float32",
        "q_lengths [requests] int64",
        "kv_lengths [requests] int64",
    ]


def test_the_graph_takes_any_row_up_to_the_block_s_largest_batch_and_length():
    dims = {dim.name: (dim.min, dim.opt, dim.max) for dim in graph_signature(small_spec()).dims}
    assert dims == {"rows": (1, 2, 6), "longest": (1, 8, 64), "tokens": (1, 16, 384)}
