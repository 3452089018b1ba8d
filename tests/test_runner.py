"""The runner under callers that cancel, expire and close, and sessions that raise and hang."""

import asyncio
import concurrent.futures
import math
import re
import threading
import time
import weakref
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runner_blocks import (
    BLOCKS,
    CROSS,
    FULL,
    PATIENCE_S,
    SELF,
    UNMASKED,
    Gate,
    alone,
    counted,
    outcome_of,
    request,
    runner_behind,
)

from mha_deploy.errors import (
    DeadlineError,
    FeedError,
    FrozenAxisError,
    MissingError,
    QueueFullError,
    RunnerClosedError,
)
from mha_deploy.runner import Answer, BatchRunner, CostModel, RunnerOptions
from mha_deploy.runner.desk import Desk, Progress
from mha_deploy.runner.layout import PaddedLayout
from mha_deploy.runner.planner import Planner
from mha_deploy.runner.recorder import REASONS
from mha_deploy.runner.ticket import AnswerFuture, Ticket


class Cheap(CostModel):
    """Batches cost the same whatever their rows, so that all that fit together go together."""

    def predict_us(self, size):
        return 100.0 + max(size[1:])


def wait_until_idle(runner):
    end = time.monotonic() + PATIENCE_S
    while not runner._desk._idle and time.monotonic() < end:
        time.sleep(0.001)


def busy(gate, runner):
    """Keep the one worker at a request of its own until the gate lets it."""
    future = runner.submit(request(gate.spec, 24, 24))
    gate.wait_for_a_run()
    return future


@settings(deadline=None, max_examples=30)
@given(
    spec=st.sampled_from(BLOCKS),
    lengths=st.lists(st.tuples(st.integers(1, 24), st.integers(1, 24)), min_size=1, max_size=14),
    mode=st.sampled_from(["exact", "fast"]),
)
def test_every_answer_is_the_requests_own_and_trimmed(spec, lengths, mode):
    gate = Gate(spec)
    gate.let()
    requests = [request(spec, q, kv, number) for number, (q, kv) in enumerate(lengths)]
    options = RunnerOptions(workers=2, mode=mode)
    with BatchRunner(gate.session, spec, options, Cheap(spec, {})) as runner:
        answers = [future.result(PATIENCE_S) for future in runner.submit_all(requests)]
    for answer, one in zip(answers, requests, strict=True):
        np.testing.assert_array_equal(answer.y, alone(spec, one))
    seen = runner.snapshot()
    assert counted(runner) == {"answered": len(lengths)}
    assert seen.tokens == sum(one.tokens(spec) for one in requests)
    assert sum(size * figures.count for size, figures in seen.batches.items()) == len(lengths)
    assert sum(seen.dispatch_reasons.values()) == sum(figures.count for figures in seen.batches.values())


def test_lengths_16_and_20_make_one_call_under_the_right_mask_in_fast_mode():
    gate = Gate(SELF)
    with runner_behind(gate, Cheap(SELF, {}), mode="fast") as runner:
        busy(gate, runner)
        requests = [request(SELF, 16), request(SELF, 20)]
        futures = [runner.submit(each) for each in requests]
        gate.let()
        answers = [future.result(PATIENCE_S) for future in futures]
    assert gate.ran[1]["x"].shape[:2] == (2, 20)
    assert gate.ran[1]["mask"].sum(axis=1).tolist() == [16, 20]
    for answer, one in zip(answers, requests, strict=True):
        np.testing.assert_array_equal(answer.y, alone(SELF, one))
        assert answer.batch_size == 2
    assert (runner.snapshot().tokens, runner.snapshot().padded_tokens) == (60, 4)


def test_requests_of_one_length_with_other_masks_share_a_batch():
    gate = Gate(SELF)
    holes = np.array([True, False, True, False, True])
    with runner_behind(gate, Cheap(SELF, {})) as runner:
        busy(gate, runner)
        one = request(SELF, 5, mask=holes)
        futures = [runner.submit(one), runner.submit(request(SELF, 5))]
        gate.let()
        answers = [future.result(PATIENCE_S) for future in futures]
    assert gate.ran[1]["mask"].tolist() == [holes.tolist(), [True] * 5]
    kept = one.tensors["x"][holes].sum(0) / np.float32(3)
    np.testing.assert_array_equal(answers[0].y, one.tensors["x"] + kept)


def test_padding_of_an_earlier_batch_is_never_seen_again():
    garbage = [np.nan, np.inf, 1e30, 0.0]
    gate = Gate(SELF)
    gate.let()
    answers = []
    with BatchRunner(gate.session, SELF, RunnerOptions(mode="fast"), Cheap(SELF, {})) as runner:
        for value in garbage:
            dirty = replace(request(SELF, 5), tensors={"x": np.full((5, 4), value, np.float32)})
            futures = runner.submit_all([dirty, request(SELF, 3)])
            answers.append(futures[1].result(PATIENCE_S).y)
    assert all(feeds["x"][1, 3:].any() == np.False_ for feeds in gate.ran if len(feeds["x"]) == 2)
    for answer in answers:
        np.testing.assert_array_equal(answer, alone(SELF, request(SELF, 3)))


def test_an_idle_worker_is_given_a_request_at_once():
    gate = Gate(SELF)
    gate.let()
    with runner_behind(gate) as runner:
        wait_until_idle(runner)
        answer = runner.submit(request(SELF, 5)).result(PATIENCE_S)
        assert isinstance(answer, Answer)
        assert runner.snapshot().dispatch_reasons == {**dict.fromkeys(REASONS, 0), "idle": 1}


@pytest.mark.parametrize("how", ["cancel", "set_result", "wait_for"])
def test_a_caller_that_goes_away_while_its_batch_runs_harms_nobody(how):
    async def given_up(runner):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(runner.submit_async(request(SELF, 5, number=2)), 0.01)

    gate = Gate(SELF)
    with runner_behind(gate, Cheap(SELF, {})) as runner:
        busy(gate, runner)
        requests = [request(SELF, 5, number=number) for number in range(3)]
        first, second, third = (runner.submit(each) for each in requests)
        gate.let(1)
        gate.wait_for_a_run()
        assert len(gate.ran[1]["x"]) == 3
        if how == "cancel":
            assert second.cancel()
        elif how == "set_result":
            second.set_result("mine")
        else:
            asyncio.run(given_up(runner))
        gate.let()
        for future, one in ((first, requests[0]), (third, requests[2])):
            np.testing.assert_array_equal(future.result(PATIENCE_S).y, alone(SELF, one))
        later = request(SELF, 7)
        np.testing.assert_array_equal(runner.submit(later).result(PATIENCE_S).y, alone(SELF, later))
    expected = {"set_result": {"answered": 5}, "cancel": {"answered": 4, "cancelled": 1}}
    assert counted(runner) == expected.get(how, {"answered": 5, "cancelled": 1})


def test_a_cancelled_request_is_dropped_before_it_runs_and_waiters_hear_of_it():
    gate = Gate(SELF)
    with runner_behind(gate) as runner:
        busy(gate, runner)
        futures = [runner.submit(request(SELF, 5)), runner.submit(request(SELF, 6))]
        assert futures[0].cancel()
        assert not futures[0].running()
        assert runner.load().queued_requests == 1
        assert concurrent.futures.wait(futures, 0.0).done == {futures[0]}
        gate.let()
        assert outcome_of(futures[1]) is None
        assert futures[1].cancel() is False
        assert futures[0].cancel() is True
    assert [len(feeds["x"][0]) for feeds in gate.ran] == [24, 6]
    assert counted(runner) == {"answered": 2, "cancelled": 1}


def test_cancelling_a_task_drops_its_request():
    gate = Gate(SELF)

    async def cancelled(runner):
        task = asyncio.create_task(runner.submit_async(request(SELF, 5)))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with runner_behind(gate) as runner:
        busy(gate, runner)
        asyncio.run(cancelled(runner))
        assert runner.load().queued_requests == 0
    assert counted(runner) == {"answered": 1, "cancelled": 1}


def test_only_the_culprit_of_a_failed_batch_fails():
    bad = request(SELF, 5, number=3)

    def spoils(feeds):
        found = any(np.array_equal(row, bad.tensors["x"]) for row in feeds["x"])
        return ValueError("the backend raised") if found else None

    gate = Gate(SELF, spoils)
    with runner_behind(gate, Cheap(SELF, {})) as runner:
        busy(gate, runner)
        good = [request(SELF, 5, number=number) for number in (1, 2)]
        futures = [runner.submit(each) for each in (good[0], bad, good[1])]
        wrong = replace(good[0], tensors={"x": np.ones((5, 3), np.float32)})
        with pytest.raises(FeedError, match=re.escape("a request's 'x' has shape [5, 3]; expected [5, 4]")):
            runner.submit(wrong)
        gate.let()
        assert str(outcome_of(futures[1])) == "the backend raised"
        for future, one in ((futures[0], good[0]), (futures[2], good[1])):
            np.testing.assert_array_equal(future.result(PATIENCE_S).y, alone(SELF, one))
    assert len(gate.ran[1]["x"]) == 3
    assert counted(runner) == {"answered": 3, "failed": 1, "refused_request": 1}
    assert runner.snapshot().dispatch_reasons["retry"] == 3


def test_a_backend_that_answers_three_rows_for_four_fails_all_four_and_the_worker_lives():
    gate = Gate(SELF, answers=lambda y: y[:3])
    with runner_behind(gate, Cheap(SELF, {})) as runner:
        busy(gate, runner)
        futures = [runner.submit(request(SELF, 5, number=number)) for number in range(4)]
        gate.let()
        for future in futures:
            error = outcome_of(future)
            assert isinstance(error, FrozenAxisError)
            assert "answered 'y' with shape [3, 5, 4]; expected [4, 5, 4]" in str(error)
        assert outcome_of(runner.submit(request(SELF, 5))) is None
    assert counted(runner) == {"answered": 2, "failed": 4}


def test_a_session_that_asks_to_exit_ends_a_request_and_not_the_worker():
    gate = Gate(SELF, lambda feeds: SystemExit(3) if len(feeds["x"][0]) == 5 else None)
    gate.let()
    with runner_behind(gate) as runner:
        assert isinstance(outcome_of(runner.submit(request(SELF, 5))), SystemExit)
        assert outcome_of(runner.submit(request(SELF, 6))) is None


def test_a_length_beyond_the_engines_range_is_refused_and_exactly_the_limit_passes():
    gate = Gate(SELF)
    with runner_behind(gate) as runner:
        busy(gate, runner)
        queued = runner.submit(request(SELF, 5))
        for number in (1, 2):
            with pytest.raises(FeedError, match=re.escape("seq = 25; this block takes seq 1..24")):
                runner.submit(request(SELF, 25, number=number))
        longest = runner.submit(request(SELF, 24))
        gate.let()
        assert longest.result(PATIENCE_S).y.shape == (24, 4)
        assert outcome_of(queued) is None
    assert counted(runner) == {"answered": 3, "refused_request": 2}


def test_the_sessions_range_counts_where_an_engine_takes_less_than_the_block():
    gate = Gate(SELF)
    narrow = replace(SELF.signature, dims=(SELF.dims[0], replace(SELF.dims[1], max=10)))

    def session(threads):
        opened = gate.session()
        opened.signature = narrow
        return opened

    with (
        BatchRunner(session, SELF) as runner,
        pytest.raises(FeedError, match=re.escape("seq = 11; this block takes seq 1..10")),
    ):
        runner.submit(request(SELF, 11))


@pytest.mark.parametrize(
    ("spec", "changes", "said"),
    [
        (SELF, {"tensors": {}}, "a request holds nothing; expected x"),
        (SELF, {"tensors": {"x": np.ones((5, 4))}}, "a request's 'x' has dtype float64; expected float32"),
        (SELF, {"tensors": {"x": np.ones((5, 4), ">f4")}}, "float32 in the other byte order"),
        (SELF, {"tensors": {"x": [[1.0] * 4] * 5}}, "a request's 'x' has shape list; expected [5, 4]"),
        (SELF, {"kv_len": 4}, "q_len = 5 and kv_len = 4; in self attention they are one length"),
        (SELF, {"q_len": 0, "kv_len": 0}, "a request has seq = 0; this block takes seq 1..24"),
        (SELF, {"mask": np.ones(4, bool)}, "mask has shape [4] and dtype bool; expected [5], boolean"),
        (SELF, {"mask": np.ones(5, np.int64)}, "dtype int64; expected [5], boolean, True = keep"),
        (FULL, {"mask": np.ones(5, bool)}, "mask has shape [5] and dtype bool; expected [5, 5]"),
        (UNMASKED, {"mask": np.ones(5, bool)}, "a request brings a mask, but this block takes none"),
        (CROSS, {"kv_len": 25}, "a request has kv_len = 25; this block takes kv_len 1..24"),
    ],
)
def test_a_request_that_does_not_meet_the_signature_is_refused_at_once_and_counted(spec, changes, said):
    with (
        runner_behind(Gate(spec)) as runner,
        pytest.raises(FeedError, match=re.escape(said)),
    ):
        runner.submit(replace(request(spec, 5), **changes))
    assert counted(runner) == {"refused_request": 1}


@pytest.mark.parametrize("asked", [{"priority": 4}, {"priority": -1}, {"timeout_s": math.nan}])
def test_a_priority_or_a_timeout_out_of_range_is_refused(asked):
    with runner_behind(Gate(SELF)) as runner, pytest.raises(FeedError, match=r"expected a priority of 0"):
        runner.submit(request(SELF, 5), **asked)


def test_a_full_queue_refuses_at_once_and_says_when_to_come_again():
    gate = Gate(SELF)
    with runner_behind(gate, max_queue_requests=2) as runner:
        running = busy(gate, runner)
        queued = [runner.submit(request(SELF, 5)) for _ in range(2)]
        with pytest.raises(QueueFullError, match="it holds 2 of 2 requests; try again later") as refused:
            runner.submit(request(SELF, 5))
        assert refused.value.retry_after_s > 0
        gate.let()
        assert [outcome_of(each) for each in (running, *queued)] == [None] * 3
    assert counted(runner) == {"answered": 3, "refused_queue_requests": 1}


@pytest.mark.parametrize(
    ("bounds", "said"),
    [({"max_queue_tokens": 9}, "5 of 9 tokens"), ({"max_queue_bytes": 100}, "80 of 100 bytes")],
)
def test_the_queue_is_bounded_in_tokens_and_bytes_too(bounds, said):
    gate = Gate(SELF)
    with runner_behind(gate, **bounds) as runner:
        busy(gate, runner)
        runner.submit(request(SELF, 5))
        with pytest.raises(QueueFullError, match=said):
            runner.submit(request(SELF, 5))


def test_an_idle_worker_takes_what_would_not_fit_into_the_queue():
    gate = Gate(SELF)
    gate.let()
    with runner_behind(gate, max_queue_tokens=1) as runner:
        wait_until_idle(runner)
        assert outcome_of(runner.submit(request(SELF, 5))) is None


def test_requests_submitted_together_are_queued_all_or_none():
    gate = Gate(SELF)
    with runner_behind(gate, max_queue_requests=2) as runner:
        busy(gate, runner)
        with pytest.raises(QueueFullError):
            runner.submit_all([request(SELF, 5)] * 4)
        assert runner.load().queued_requests == 0
    assert counted(runner) == {"answered": 1, "cancelled": 2, "refused_queue_requests": 1}


def test_a_session_that_cannot_be_opened_leaves_none_open():
    opened = []

    def session(threads):
        if len(opened) == 2:
            raise MissingError("no third")
        opened.append(Gate(SELF).session())
        return opened[-1]

    before = threading.active_count()
    with pytest.raises(MissingError, match="no third"):
        BatchRunner(session, SELF, RunnerOptions(workers=3))
    assert [each._closed for each in opened] == [True, True]
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("mode", "drift", "together"),
    [("exact", 0.0, 3), ("exact", 1e-7, 1), ("fast", 9e-7, 3), ("fast", 1e-5, 1)],
)
def test_requests_share_a_batch_only_where_that_changes_no_answer_by_more_than_the_mode_allows(
    mode, drift, together
):
    gate = Gate(SELF)
    with BatchRunner(gate.session, SELF, RunnerOptions(mode=mode), Cheap(SELF, {}), drift=drift) as runner:
        busy(gate, runner)
        futures = [runner.submit(request(SELF, 5)) for _ in range(3)]
        gate.let()
        assert [future.result(PATIENCE_S).batch_size for future in futures] == [together] * 3
        assert (runner.snapshot().batching, runner.snapshot().drift) == (together > 1, drift)


def test_a_deadline_beyond_what_clocks_wait_for_harms_no_other():
    gate = Gate(SELF)
    with runner_behind(gate) as runner:
        busy(gate, runner)
        far = runner.submit(request(SELF, 5), timeout_s=1e15)
        time.sleep(0.01)
        near = runner.submit(request(SELF, 5), timeout_s=0.01)
        assert isinstance(outcome_of(near), DeadlineError)
        gate.let()
        assert outcome_of(far) is None


def test_a_deadline_is_answered_while_the_session_hangs_queued_or_running():
    gate = Gate(SELF)
    with runner_behind(gate) as runner:
        running = runner.submit(request(SELF, 24), timeout_s=0.5)
        gate.wait_for_a_run()
        queued = runner.submit(request(SELF, 5), timeout_s=0.03)
        for future, allowed in ((queued, "30 ms"), (running, "500 ms")):
            error = outcome_of(future)
            assert isinstance(error, DeadlineError)
            assert (str(error), error.predicted) == (
                f"no answer within the {allowed} that the request allows",
                False,
            )
        gate.let()
    assert len(gate.ran) == 1  # what had expired was not run
    assert counted(runner) == {"expired": 2}


def test_the_earliest_deadline_is_answered_first_whatever_the_order_of_arrival():
    gate = Gate(SELF)
    ended = []
    with runner_behind(gate) as runner:
        busy(gate, runner)
        for ms in (90, 30, 60):
            future = runner.submit(request(SELF, 5), timeout_s=ms / 1e3)
            future.add_done_callback(lambda _, ms=ms: ended.append(ms))
        deadline = time.monotonic() + PATIENCE_S
        while len(ended) < 3 and time.monotonic() < deadline:
            time.sleep(0.005)
    assert ended == [30, 60, 90]


def test_a_request_whose_predicted_answer_comes_too_late_is_refused_at_admission():
    gate = Gate(SELF)
    samples = {(1, 1, 1): 50_000.0, (1, 8, 8): 50_000.0, (1, 24, 24): 50_000.0}
    with runner_behind(gate, CostModel(SELF, samples)) as runner:
        with pytest.raises(
            DeadlineError, match=r"predicted in 50 ms, but the request allows 20 ms"
        ) as refused:
            runner.submit(request(SELF, 8), timeout_s=0.02)
        assert refused.value.predicted
        busy(gate, runner)
        with pytest.raises(DeadlineError, match="is predicted in"):  # behind the one that runs
            runner.submit(request(SELF, 8), timeout_s=0.08)
        queued = [runner.submit(request(SELF, 8), priority=1) for _ in range(40)]
        with pytest.raises(DeadlineError, match="is predicted in"):  # and behind those before it
            runner.submit(request(SELF, 8), timeout_s=0.3)
        gate.let()
        assert [outcome_of(each) for each in queued] == [None] * 40
    assert counted(runner) == {"answered": 41, "refused_deadline": 3}


def test_a_prediction_that_went_wrong_does_not_refuse_for_ever():
    gate = Gate(SELF)
    gate.let()
    samples = {(1, 1, 1): 1000.0, (1, 8, 8): 1000.0, (1, 24, 24): 1000.0}
    model = CostModel(SELF, samples)
    for _ in range(500):
        model.observe((1, 8, 8), 30e6)
    with runner_behind(gate, model) as runner:
        refusals = 0
        while refusals < 1000:
            try:
                future = runner.submit(request(SELF, 8), timeout_s=5)
                break
            except DeadlineError:
                refusals += 1
        assert refusals > 0
        assert outcome_of(future) is None


def test_a_request_that_comes_with_no_time_left_is_refused():
    with runner_behind(Gate(SELF)) as runner, pytest.raises(DeadlineError, match="came with 0 ms left"):
        runner.submit(request(SELF, 5), timeout_s=0.0)
    assert counted(runner) == {"refused_deadline": 1}


def test_a_guess_refuses_nobody_before_anything_was_measured():
    gate = Gate(SELF)
    gate.let()
    with runner_behind(gate) as runner:
        assert outcome_of(runner.submit(request(SELF, 5), timeout_s=PATIENCE_S)) is None


def test_closing_drains_what_was_accepted_and_refuses_the_rest():
    gate = Gate(SELF)
    with runner_behind(gate) as runner:
        accepted = [busy(gate, runner), *(runner.submit(request(SELF, 3 + i)) for i in range(5))]
        closing = threading.Thread(target=runner.close, args=(PATIENCE_S,))
        closing.start()
        while not runner.snapshot().closing:
            time.sleep(0.001)
        with pytest.raises(RunnerClosedError, match="the runner is closing"):
            runner.submit(request(SELF, 5))
        gate.let()
        assert [outcome_of(future) for future in accepted] == [None] * 6
        closing.join(PATIENCE_S)
        runner.close()
    assert counted(runner) == {"answered": 6, "refused_closed": 1}


def test_closing_without_grace_fails_everybody_and_nobody_hangs():
    gate = Gate(SELF)
    with runner_behind(gate) as runner:
        accepted = [busy(gate, runner), *(runner.submit(request(SELF, 3 + i)) for i in range(5))]
        runner.close(0)
        for future in accepted:
            assert isinstance(outcome_of(future), RunnerClosedError)
        runner.close(0)
    assert len(gate.ran) == 1
    assert counted(runner) == {"abandoned": 6}


def test_closing_ends_the_threads_and_closes_the_sessions():
    sessions = []
    gate = Gate(SELF)
    gate.let()

    def session(threads):
        sessions.append(gate.session())
        return sessions[-1]

    before = threading.active_count()
    with BatchRunner(session, SELF, RunnerOptions(workers=3)) as runner:
        runner.submit_all([request(SELF, 5)] * 9)
    assert threading.active_count() == before
    assert [each._closed for each in sessions] == [True] * 3
    assert counted(runner) == {"answered": 9}


def test_a_block_that_raises_does_not_wait_for_a_session_that_hangs():
    gate = Gate(SELF)
    futures = []

    def fail(runner):
        futures.append(busy(gate, runner))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), BatchRunner(gate.session, SELF) as runner:
        fail(runner)
    assert isinstance(outcome_of(futures[0]), RunnerClosedError)
    gate.let()


def test_a_callback_may_use_the_runner_and_may_raise(caplog):
    gate = Gate(SELF)
    gate.let()
    again = concurrent.futures.Future()
    with runner_behind(gate) as runner:

        def callback(future):
            again.set_result(runner.submit(request(SELF, 6)))
            raise ValueError("a caller's own fault")

        runner.submit(request(SELF, 5)).add_done_callback(callback)
        assert outcome_of(again.result(PATIENCE_S)) is None


def test_counters_add_up_under_load_with_every_fault_at_once():
    """A session that sometimes raises, callers that cancel, expire and overfill, and a close amid it."""
    gate = Gate(SELF, lambda feeds: RuntimeError("no") if len(feeds["x"][0]) == 7 else None)
    gate.let(100_000)
    options = RunnerOptions(workers=2, max_queue_requests=20, max_queue_tokens=300)
    runner = BatchRunner(gate.session, SELF, options, Cheap(SELF, {}))
    futures, refused = [[] for _ in range(4)], [0] * 4

    def caller(number):
        random = np.random.default_rng(number)
        for _ in range(400):
            length = int(random.integers(1, 27))
            timeout_s = [math.inf, 0.0005, 0.0][random.choice(3, p=[0.8, 0.17, 0.03])]
            priority = int(random.integers(0, 4))
            try:
                future = runner.submit(request(SELF, length), timeout_s=timeout_s, priority=priority)
            except (FeedError, QueueFullError, DeadlineError, RunnerClosedError):
                refused[number] += 1
                continue
            futures[number].append(future)
            if random.random() < 0.2:
                future.cancel()

    callers = [threading.Thread(target=caller, args=(number,)) for number in range(4)]
    for thread in callers:
        thread.start()
    seen = [runner.snapshot() for _ in range(50)]
    while sum(map(len, futures)) + sum(refused) < 1200:
        time.sleep(0.001)
    runner.close(0.0)
    for thread in callers:
        thread.join(PATIENCE_S)
    everything = [future for each in futures for future in each]
    assert concurrent.futures.wait(everything, PATIENCE_S).not_done == set()
    for each in seen:
        assert each.received == sum(each.outcomes.values()) + each.pending
    last = counted(runner)
    assert sum(last.values()) == 1600
    assert sum(count for name, count in last.items() if name.startswith("refused")) == sum(refused)
    assert last["cancelled"] == sum(future.cancelled() for future in everything)
    errors = [future.exception() for future in everything if not future.cancelled()]
    for name, kind in (
        ("answered", type(None)),
        ("failed", RuntimeError),
        ("expired", DeadlineError),
        ("abandoned", RunnerClosedError),
    ):
        assert last.get(name, 0) == sum(type(error) is kind for error in errors), name
    end = runner.snapshot()
    assert (end.pending, end.queued_requests, end.queued_tokens, end.queued_bytes) == (0, 0, 0, 0)
    assert end.phases["total"].count == last["answered"]


def test_phases_of_an_answer_are_what_the_histograms_hold():
    gate = Gate(SELF)
    gate.let()
    with runner_behind(gate) as runner:
        answer = runner.submit(request(SELF, 5)).result(PATIENCE_S)
        seen = runner.snapshot()
    phases = (answer.queue_us, answer.batch_us, answer.compute_us, answer.scatter_us)
    for name, us in zip(
        ("queue", "batch", "compute", "scatter", "total"), (*phases, sum(phases)), strict=True
    ):
        assert seen.phases[name].sum_us == pytest.approx(us)
        assert seen.window[name].count == 1
    assert seen.batches[1].compute_us == pytest.approx(answer.compute_us)
    assert seen.outcome_us["answered"] == pytest.approx(sum(phases))


def test_a_run_that_hangs_shows():
    gate = Gate(SELF)
    with runner_behind(gate) as runner:
        busy(gate, runner)
        time.sleep(0.02)
        seen = runner.snapshot()
        assert (seen.busy_workers, seen.pending, seen.longest_run_s >= 0.02) == (1, 1, True)
    assert runner.snapshot().longest_run_s == 0


def test_requests_that_end_before_their_deadline_leave_the_clock_nothing_to_hold():
    gate = Gate(SELF)
    with runner_behind(gate) as runner:
        busy(gate, runner)
        runner.submit(request(SELF, 5), timeout_s=900)  # stays, before all others
        for _ in range(500):
            runner.submit(request(SELF, 5), timeout_s=1000).cancel()
        assert len(runner._desk._deadlines._heap) < 100


def test_a_worker_is_never_given_what_has_expired_even_before_the_clock_says_so():
    model, options = CostModel(SELF, {}), RunnerOptions()
    layout = PaddedLayout(SELF)
    desk = Desk(Planner(SELF, model, options, alone=False), model, layout, options)  # and no clock runs
    tickets = [
        Ticket(
            request(SELF, 5), AnswerFuture(), (5, 5), 5, 80, 2, arrived=time.monotonic(), deadline=deadline
        )
        for deadline in (time.monotonic() + 0.005, math.inf)
    ]
    desk.admit(tickets)
    time.sleep(0.01)
    assert desk.take(Progress()).tickets == (tickets[1],)
    assert isinstance(outcome_of(tickets[0].future), DeadlineError)


def test_a_settled_requests_arrays_are_let_go_though_the_clock_still_knows_of_it():
    gate = Gate(SELF)
    with runner_behind(gate) as runner:
        busy(gate, runner)
        one = request(SELF, 5)
        array = weakref.ref(one.tensors["x"])
        future = runner.submit(one, timeout_s=1000)
        assert future.cancel()
        del one, future
        assert array() is None


def test_a_member_that_is_cancelled_while_its_batch_fails_is_not_tried_again():
    futures = []

    def spoils(feeds):
        if len(feeds["x"]) == 3:
            futures[1].cancel()
            return RuntimeError("all three")
        return None

    gate = Gate(SELF, spoils)
    with runner_behind(gate, Cheap(SELF, {})) as runner:
        busy(gate, runner)
        futures += [runner.submit(request(SELF, 5)) for _ in range(3)]
        gate.let()
        assert [outcome_of(futures[i]) for i in (0, 2)] == [None, None]
    assert runner.snapshot().dispatch_reasons["retry"] == 2
    assert counted(runner) == {"answered": 3, "cancelled": 1}
