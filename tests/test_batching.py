"""Which requests share a batch, and that each one's answer is its own."""

import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mha_deploy.batching import MAX_PADDING, plan_batches, run_requests
from mha_deploy.errors import FeedError
from mha_deploy.ragged import Request
from mha_deploy.sessions.fake import FakeSession
from mha_deploy.signature import Dim
from mha_deploy.spec import AttentionSpec

WIDTH = 4
TRIM_ME = np.float32(1e9)


def block(*dims, **fields):
    return AttentionSpec(WIDTH, 2, dims=dims, **fields)


SELF = block(Dim("batch", 1, 2, 4), Dim("seq", 1, 8, 24))
UNMASKED = block(Dim("batch", 1, 2, 4), Dim("seq", 1, 8, 24), mask="none")
CROSS = block(Dim("batch", 1, 2, 4), Dim("q_len", 1, 8, 24), Dim("kv_len", 1, 8, 24), kind="cross")
CROSS_UNMASKED = block(
    Dim("batch", 1, 2, 4), Dim("q_len", 1, 8, 24), Dim("kv_len", 1, 8, 24), kind="cross", mask="none"
)
FULL = block(Dim("batch", 1, 2, 4), Dim("seq", 1, 8, 24), mask="full")
BLOCKS = (SELF, UNMASKED, CROSS, CROSS_UNMASKED, FULL)
RAISED = block(Dim("batch", 2, 3, 4), Dim("seq", 5, 8, 24))


def request(spec, q_len, kv_len, number=1):
    """Whole numbers, other ones for every request, so that every sum over them is exact."""
    random = np.random.default_rng(number)

    def rows(length):
        return random.integers(1, 1000, (length, WIDTH)).astype(np.float32)

    if spec.kind == "self":
        return Request({"x": rows(q_len)}, q_len, q_len)
    return Request({"query": rows(q_len), "key": rows(kv_len), "value": rows(kv_len)}, q_len, kv_len)


def requests_of(spec, lengths):
    return [request(spec, q, kv if spec.kind == "cross" else q, n) for n, (q, kv) in enumerate(lengths)]


def mean_of_what_is_kept(spec):
    """Attention with all scores equal, plus the query; rows that nobody asked for hold `TRIM_ME`."""

    def run(feeds):
        query = feeds.get("query", feeds.get("x"))
        value = feeds.get("value", feeds.get("x"))
        B, S, T = *query.shape[:2], value.shape[1]
        keep = np.ones((B, S, T), bool)
        if spec.mask == "padding":
            keep = np.broadcast_to(feeds["mask"][:, None], (B, S, T))
        elif spec.mask == "full":
            keep = feeds["attn_mask"]
        total = np.einsum("bst,btd->bsd", keep.astype(np.float32), value)
        y = query + total / np.maximum(keep.sum(-1, keepdims=True), 1).astype(np.float32)
        return {"y": np.where(query.any(-1, keepdims=True), y, TRIM_ME)}

    return run


def alone(spec, one):
    value = one.tensors["x"] if spec.kind == "self" else one.tensors["value"]
    query = one.tensors["x"] if spec.kind == "self" else one.tensors["query"]
    return query + value.sum(0) / np.float32(len(value))


def open_fake(spec, ran=None):
    answer = mean_of_what_is_kept(spec)

    def run(feeds):
        if ran is not None:
            ran.append(feeds)
        return answer(feeds)

    return FakeSession(spec.signature, run)


def tokens(spec, plan):
    q, kv = plan.sizes[spec.query_axis], plan.sizes[spec.key_axis]
    return plan.sizes["batch"] * (q if spec.kind == "self" else q + kv)


def real_tokens(spec, members):
    return sum(m.q_len if spec.kind == "self" else m.q_len + m.kv_len for m in members)


blocks = st.sampled_from(BLOCKS)
lengths_of_requests = st.lists(st.tuples(st.integers(1, 24), st.integers(1, 24)), min_size=1, max_size=14)
budgets = st.integers(1, 150)


@settings(deadline=None)
@given(spec=st.sampled_from([*BLOCKS, RAISED]), lengths=lengths_of_requests, budget=budgets)
def test_every_request_is_in_exactly_one_batch(spec, lengths, budget):
    plans = plan_batches(spec, requests_of(spec, lengths), budget)
    assert Counter(i for plan in plans for i in plan.members) == Counter(range(len(lengths)))


@settings(deadline=None)
@given(spec=st.sampled_from([*BLOCKS, RAISED]), lengths=lengths_of_requests, budget=budgets)
def test_every_batch_holds_its_members_within_the_dims(spec, lengths, budget):
    requests = requests_of(spec, lengths)
    for plan in plan_batches(spec, requests, budget):
        assert set(plan.sizes) == {dim.name for dim in spec.dims}
        assert all(dim.min <= plan.sizes[dim.name] <= dim.max for dim in spec.dims)
        assert len(plan.members) <= plan.sizes["batch"]
        assert all(requests[i].q_len <= plan.sizes[spec.query_axis] for i in plan.members)
        assert all(requests[i].kv_len <= plan.sizes[spec.key_axis] for i in plan.members)


@settings(deadline=None)
@given(spec=st.sampled_from([*BLOCKS, RAISED]), lengths=lengths_of_requests, budget=budgets)
def test_only_a_request_that_is_alone_may_exceed_the_budget(spec, lengths, budget):
    for plan in plan_batches(spec, requests_of(spec, lengths), budget):
        assert len(plan.members) == 1 or tokens(spec, plan) <= budget


@settings(deadline=None)
@given(spec=blocks, lengths=lengths_of_requests, budget=budgets)
def test_the_share_of_padding_in_a_batch_is_bounded(spec, lengths, budget):
    requests = requests_of(spec, lengths)
    for plan in plan_batches(spec, requests, budget):
        padded = tokens(spec, plan)
        assert padded - real_tokens(spec, [requests[i] for i in plan.members]) <= MAX_PADDING * padded


@settings(deadline=None)
@given(spec=st.sampled_from([UNMASKED, CROSS_UNMASKED]), lengths=lengths_of_requests)
def test_without_a_mask_only_equal_lengths_share_a_batch(spec, lengths):
    requests = requests_of(spec, lengths)
    for plan in plan_batches(spec, requests):
        shared = {(requests[i].q_len, requests[i].kv_len) for i in plan.members}
        assert shared == {(plan.sizes[spec.query_axis], plan.sizes[spec.key_axis])}


@settings(deadline=None)
@given(spec=st.sampled_from([*BLOCKS, RAISED]), lengths=lengths_of_requests, budget=budgets)
def test_every_answer_is_the_requests_own_in_order_and_trimmed(spec, lengths, budget):
    requests = requests_of(spec, lengths)
    answers, report = run_requests(open_fake(spec), spec, requests, budget)
    assert len(answers) == len(requests)
    for answer, one in zip(answers, requests, strict=True):
        np.testing.assert_array_equal(answer, alone(spec, one))
    plans = plan_batches(spec, requests, budget)
    assert (report.requests, report.batches, report.provider) == (len(requests), len(plans), "fake")
    assert len(report.batch_ms) == len(plans)
    assert report.tokens == real_tokens(spec, requests)
    assert report.tokens + report.padded_tokens == sum(tokens(spec, plan) for plan in plans)


def test_requests_of_one_length_fill_batches_up_to_the_largest():
    plans = plan_batches(SELF, requests_of(SELF, [(8, 8)] * 10))
    assert [plan.members for plan in plans] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]
    assert plans[-1].sizes == {"batch": 2, "seq": 8}


def test_requests_of_one_length_fill_batches_up_to_the_budget():
    plans = plan_batches(SELF, requests_of(SELF, [(8, 8)] * 5), 16)
    assert [len(plan.members) for plan in plans] == [2, 2, 1]


def test_lengths_16_and_20_share_one_run_of_two_rows_under_the_right_mask():
    ran = []
    requests = requests_of(SELF, [(16, 16), (20, 20)])
    answers, _ = run_requests(open_fake(SELF, ran), SELF, requests)
    (feeds,) = ran
    assert feeds["x"].shape == (2, 20, WIDTH)
    assert feeds["mask"].sum(axis=1).tolist() == [20, 16]
    assert [answer.shape for answer in answers] == [(16, WIDTH), (20, WIDTH)]


def test_a_short_request_does_not_join_a_long_one():
    assert [plan.members for plan in plan_batches(SELF, requests_of(SELF, [(4, 4), (24, 24)]))] == [
        (1,),
        (0,),
    ]


def test_a_request_beyond_the_budget_runs_alone():
    plans = plan_batches(SELF, requests_of(SELF, [(24, 24), (24, 24), (2, 2)]), 10)
    assert [plan.members for plan in plans] == [(0,), (1,), (2,)]


def test_filling_up_to_the_smallest_batch_keeps_no_request_from_joining():
    # Alone, a request is run as a batch of four just the same: three more cost nothing.
    spec = block(Dim("batch", 4, 4, 8), Dim("seq", 1, 8, 24))
    plans = plan_batches(spec, requests_of(spec, [(8, 8)] * 4))
    assert [len(plan.members) for plan in plans] == [4]


def test_filling_up_to_the_shortest_length_keeps_no_request_from_joining():
    # Alone, each would be padded to eight positions just the same.
    spec = block(Dim("batch", 1, 2, 4), Dim("seq", 8, 8, 24))
    plans = plan_batches(spec, requests_of(spec, [(2, 2)] * 4))
    assert [len(plan.members) for plan in plans] == [4]


@pytest.mark.parametrize(
    ("spec", "wrong", "said"),
    [
        (SELF, (25, 25), "request 1 has seq = 25; this block takes seq 1..24"),
        (CROSS, (25, 3), "request 1 has q_len = 25; this block takes q_len 1..24"),
        (CROSS, (3, 25), "request 1 has kv_len = 25; this block takes kv_len 1..24"),
        (
            block(Dim("seq", 5, 8, 24), mask="none"),
            (4, 4),
            "request 1 has seq = 4; this block takes seq 5..24",
        ),
    ],
)
def test_a_request_too_long_or_too_short_is_refused_by_index_and_range_before_anything_runs(
    spec, wrong, said
):
    ran = []
    with pytest.raises(FeedError, match=re.escape(said)):
        run_requests(open_fake(spec, ran), spec, requests_of(spec, [(6, 6), wrong, (6, 6)]))
    assert ran == []


def test_exactly_the_longest_length_passes():
    (answer,), _ = run_requests(open_fake(SELF), SELF, requests_of(SELF, [(24, 24)]))
    assert answer.shape == (24, WIDTH)


def test_a_request_shorter_than_the_graph_takes_is_padded_where_a_mask_can_say_so():
    requests = requests_of(RAISED, [(1, 1)])
    ran = []
    (answer,), report = run_requests(open_fake(RAISED, ran), RAISED, requests)
    assert ran[0]["mask"].tolist() == [[True] + [False] * 4, [False] * 5]
    np.testing.assert_array_equal(answer, alone(RAISED, requests[0]))
    assert (report.tokens, report.padded_tokens) == (1, 9)


def test_no_requests_make_no_batch_and_no_answer():
    answers, report = run_requests(open_fake(SELF), SELF, [])
    assert (answers, report.batches, report.tokens, report.total_ms) == ([], 0, 0, 0)


@pytest.mark.parametrize("budget", [0, -1])
def test_a_budget_below_one_is_refused(budget):
    with pytest.raises(FeedError, match=f"token budget {budget}; expected at least 1"):
        plan_batches(SELF, [], budget)


def test_the_report_as_json_holds_its_counts_and_times():
    _, report = run_requests(open_fake(SELF), SELF, requests_of(SELF, [(3, 3), (20, 20)]))
    data = report.to_json()
    assert data["total_ms"] == sum(data["batch_ms"])
    del data["total_ms"], data["batch_ms"]
    assert data == {"requests": 2, "batches": 2, "tokens": 23, "padded_tokens": 0, "provider": "fake"}


@pytest.mark.parametrize("order", [(8, 7), (7, 8)])
def test_a_request_of_another_dtype_is_refused_whichever_leads_the_batch(order):
    wrong, right = order
    double = Request({"x": np.ones((wrong, WIDTH), np.float64)}, wrong, wrong)
    with pytest.raises(FeedError, match="float64"):
        run_requests(open_fake(SELF), SELF, [double, request(SELF, right, right)])


def test_an_input_of_another_dtype_than_its_neighbours_is_refused_rather_than_cast():
    one = request(CROSS, 3, 3)
    mixed = Request({**one.tensors, "key": one.tensors["key"].astype(np.float64)}, 3, 3)
    with pytest.raises(FeedError, match="float64"):
        run_requests(open_fake(CROSS), CROSS, [mixed])
