"""What the runner refuses, and when: bad requests, a full queue, deadlines."""

import math
import re
import time
import weakref
from dataclasses import replace

import numpy as np
import pytest
from runner_blocks import (
    CROSS,
    FULL,
    PATIENCE_S,
    RAISED,
    SELF,
    UNMASKED,
    Gate,
    busy,
    counted,
    outcome_of,
    request,
    runner_behind,
    wait_until_idle,
)

from mha_deploy.errors import (
    DeadlineError,
    FeedError,
    QueueFullError,
    SpecError,
)
from mha_deploy.runner import BatchRunner, CostModel, RunnerOptions
from mha_deploy.runner.admission import Progress
from mha_deploy.runner.desk import Desk
from mha_deploy.runner.layout import PaddedLayout
from mha_deploy.runner.planner import Planner
from mha_deploy.runner.ticket import AnswerFuture, Ticket


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


class Told(CostModel):
    """Keeps what sizes it is told of."""

    def __init__(self, spec, samples):
        super().__init__(spec, samples)
        self.observed, self.doubted = set(), set()

    def observe(self, size, us, fill=1.0):
        self.observed.add(size)
        super().observe(size, us, fill)

    def doubt(self, size):
        self.doubted.add(size)
        super().doubt(size)


def test_a_model_is_corrected_at_the_size_that_ran_where_a_graph_takes_no_single_row():
    gate, model = Gate(RAISED), Told(RAISED, {(2, 6, 6): 5e6})
    gate.let()
    with runner_behind(gate, model) as runner:
        assert outcome_of(runner.submit(request(RAISED, 6))) is None
        with pytest.raises(DeadlineError, match="is predicted"):
            runner.submit(request(RAISED, 6), timeout_s=0.1)
    assert model.observed == model.doubted == {(2, 6, 6)}


def test_a_request_that_comes_with_no_time_left_is_refused():
    with runner_behind(Gate(SELF)) as runner, pytest.raises(DeadlineError, match="came with 0 ms left"):
        runner.submit(request(SELF, 5), timeout_s=0.0)
    assert counted(runner) == {"refused_deadline": 1}


def test_a_guess_refuses_nobody_before_anything_was_measured():
    gate = Gate(SELF)
    gate.let()
    with runner_behind(gate) as runner:
        assert outcome_of(runner.submit(request(SELF, 5), timeout_s=PATIENCE_S)) is None


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
    layout = PaddedLayout(SELF, SELF.signature)
    desk = Desk(
        Planner(SELF, model, options, layout, alone=False), model, layout, options
    )  # and no clock runs
    tickets = [
        Ticket(
            request(SELF, 5), AnswerFuture(), (5, 5), 5, 80, 2, arrived=time.monotonic(), deadline=deadline
        )
        for deadline in (time.monotonic() + 0.005, math.inf)
    ]
    desk.admit(tickets)
    time.sleep(0.01)
    assert desk.take(Progress()).tickets == (tickets[1],)
    assert isinstance(outcome_of(tickets[0].receiver), DeadlineError)


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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"workers": 100_000}, "workers = 100000; expected 0 (measured) to {most} on this machine"),
        ({"threads": 100_000}, "threads = 100000; expected 0 (measured) to {most} on this machine"),
        ({"workers": -1}, "workers = -1; expected 0 (measured) to {most} on this machine"),
        ({"workers": 50, "threads": 50}, "50 workers of 50 threads each; expected at most {most} threads"),
    ],
)
def test_more_workers_and_threads_than_the_machine_could_run_are_refused(monkeypatch, options, said):
    monkeypatch.setattr("mha_deploy.machine.usable_cpus", lambda: 100)
    RunnerOptions(workers=400)
    RunnerOptions(workers=8, threads=50)
    with pytest.raises(SpecError, match=re.escape(said.format(most=400))):
        RunnerOptions(**options)
