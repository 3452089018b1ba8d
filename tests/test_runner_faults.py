"""The runner under callers that cancel and close, and sessions that raise and hang."""

import asyncio
import concurrent.futures
import math
import re
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from runner_blocks import (
    PATIENCE_S,
    SELF,
    Cheap,
    Gate,
    alone,
    busy,
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
from mha_deploy.runner import BatchRunner, RunnerOptions


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


def test_a_wait_that_ends_before_the_answer_drops_the_request():
    gate = Gate(SELF)

    async def waited(runner):
        with pytest.raises(TimeoutError):
            await runner.submit_async(request(SELF, 5), wait_s=0.01)

    with runner_behind(gate) as runner:
        busy(gate, runner)
        asyncio.run(waited(runner))
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


@pytest.mark.parametrize("how", ["answered", "failed", "expired", "closed"])
def test_a_callback_that_asks_to_exit_ends_no_thread_of_the_runner(how, caplog):
    """Those that share its batch, its later callbacks and its runner are served all the same."""

    def leave(_):
        raise SystemExit(3)

    gate, called = Gate(SELF, lambda _: RuntimeError("no") if how == "failed" else None), threading.Event()
    with runner_behind(gate, Cheap(SELF, {})) as runner:
        futures = [busy(gate, runner)]
        timeout_s = 0.05 if how == "expired" else math.inf
        futures += [runner.submit(request(SELF, 5), timeout_s=timeout_s) for _ in range(3)]
        for future in futures:
            future.add_done_callback(leave)
        futures[1].add_done_callback(lambda _: called.set())
        if how == "expired":
            assert {type(outcome_of(future)) for future in futures[1:]} == {DeadlineError}
        if how == "closed":
            runner.close(0.0)
        gate.let()
        assert concurrent.futures.wait(futures, PATIENCE_S).not_done == set()
        assert called.wait(PATIENCE_S)
        if how != "closed":
            assert runner.submit(request(SELF, 7)).exception(PATIENCE_S) is None or how == "failed"
    assert "a callback of a request's future raised" in caplog.text


def test_cancelling_a_future_that_its_holder_said_to_run_settles_it():
    gate = Gate(SELF)
    with runner_behind(gate) as runner:
        busy(gate, runner)
        future = runner.submit(request(SELF, 5))
        assert future.set_running_or_notify_cancel()
        future.cancel()
        assert isinstance(outcome_of(future), concurrent.futures.CancelledError)
    assert counted(runner) == {"answered": 1, "cancelled": 1}


def test_closing_in_a_callback_drains_and_waits_for_nobody():
    gate, closed = Gate(SELF), threading.Event()

    def close(_):
        runner.close()
        with pytest.raises(RunnerClosedError, match="the runner is closing"):
            runner.submit(request(SELF, 6))
        closed.set()

    with runner_behind(gate) as runner:
        first = busy(gate, runner)
        first.add_done_callback(close)
        rest = [runner.submit(request(SELF, 3 + i)) for i in range(3)]
        gate.let()
        assert closed.wait(PATIENCE_S)
        assert [outcome_of(future) for future in rest] == [None] * 3
    assert counted(runner) == {"answered": 4, "refused_closed": 1}


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


def test_a_run_that_hangs_shows():
    gate = Gate(SELF)
    with runner_behind(gate) as runner:
        busy(gate, runner)
        time.sleep(0.02)
        seen = runner.snapshot()
        assert (seen.busy_workers, seen.pending, seen.longest_run_s >= 0.02) == (1, 1, True)
    assert runner.snapshot().longest_run_s == 0


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
