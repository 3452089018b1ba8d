"""The soloist: one session of every core, for a request that has them all to itself."""

from __future__ import annotations

import json
import math
import random
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from runner_blocks import PATIENCE_S, SELF, Gate, alone, counted, outcome_of, request, slow

from mha_deploy.errors import DeadlineError
from mha_deploy.ragged import Request
from mha_deploy.runner import BatchRunner, CostModel, RunnerOptions, Soloist
from mha_deploy.runner.calibration import Calibration, calibrate
from mha_deploy.runner.crew import soloist
from mha_deploy.sessions import Placement


class ByLength(CostModel):
    def predict_us(self, size, _fill=1.0):
        return float(size[0] * size[1])


@pytest.fixture
def band():
    """A runner of two workers and a soloist for 8 tokens and more, and the gates that they wait at."""
    worker, solo = Gate(SELF), Gate(SELF)
    runner = BatchRunner(
        lambda threads: (worker if threads == 1 else solo).session(),
        SELF,
        RunnerOptions(workers=2, threads=1),
        ByLength(SELF, {}),
        soloist=Soloist(4, 8.0),
    )
    yield runner, worker, solo
    worker.let()
    solo.let()
    runner.close(PATIENCE_S)


def wait_until_all_wait(runner):
    """One that comes before runs on whoever is the first to see it."""
    end = time.monotonic() + PATIENCE_S
    desk = runner._desk
    while not (desk._solo_idle and desk._idle == 2) and time.monotonic() < end:
        time.sleep(0.001)


def test_what_has_all_cores_to_itself_and_is_worth_them_runs_on_the_soloist(band):
    runner, worker, solo = band
    one = request(SELF, 8)
    future = runner.submit(one)
    solo.wait_for_a_run()
    solo.let()
    assert np.array_equal(future.result(PATIENCE_S).y, alone(SELF, one))
    assert worker.ran == []
    seen = runner.snapshot()
    assert seen.dispatch_reasons["solo"] == 1
    assert (seen.workers, seen.threads, seen.soloist) == (2, 1, 4)
    assert counted(runner) == {"answered": 1}


def test_what_is_short_runs_on_a_worker(band):
    runner, worker, solo = band
    future = runner.submit(request(SELF, 7))
    worker.wait_for_a_run()
    worker.let()
    assert outcome_of(future) is None
    assert solo.ran == []


def test_where_a_worker_is_busy_the_other_takes_what_comes(band):
    runner, worker, solo = band
    futures = [runner.submit(request(SELF, 3))]
    worker.wait_for_a_run()
    futures.append(runner.submit(request(SELF, 20)))
    worker.wait_for_a_run()
    worker.let()
    assert [outcome_of(future) for future in futures] == [None, None]
    assert solo.ran == []


def test_while_the_soloist_plays_what_comes_runs_on_a_worker_at_once(band):
    runner, worker, solo = band
    first = runner.submit(request(SELF, 20))
    solo.wait_for_a_run()
    second = runner.submit(request(SELF, 20, number=2))
    worker.wait_for_a_run()
    assert runner.load().busy_workers == 2
    worker.let()
    assert outcome_of(second) is None
    assert not first.done()
    solo.let()
    assert outcome_of(first) is None


def test_where_others_came_meanwhile_of_late_a_worker_takes_what_is_alone(band):
    runner, worker, solo = band
    worker.let()
    solo.let()

    def by_the_soloist():
        wait_until_all_wait(runner)
        before = runner.snapshot().dispatch_reasons.get("solo", 0)
        assert outcome_of(runner.submit(request(SELF, 20))) is None
        return runner.snapshot().dispatch_reasons.get("solo", 0) > before

    assert by_the_soloist()
    together = runner.submit_all([request(SELF, 3, number=i) for i in range(4)])
    assert [outcome_of(future) for future in together] == [None] * 4
    alone_again = [by_the_soloist() for _ in range(40)]
    assert not any(alone_again[:5])
    assert any(alone_again)


def test_one_that_had_company_does_not_end_the_soloists_turn(band):
    runner, worker, solo = band
    pair = []
    for number in range(2):  # one after the other, so that no worker is woken for nothing
        pair.append(runner.submit(request(SELF, 3, number=number)))
        worker.wait_for_a_run()
    worker.let()
    solo.let()
    assert [outcome_of(future) for future in pair] == [None, None]
    wait_until_all_wait(runner)
    assert outcome_of(runner.submit(request(SELF, 20))) is None
    assert runner.snapshot().dispatch_reasons["solo"] == 1


def test_of_several_that_come_together_all_are_answered(band):
    runner, worker, solo = band
    worker.let()
    solo.let()
    for _ in range(50):
        futures = runner.submit_all([request(SELF, 8 + i, number=i) for i in range(3)])
        assert [outcome_of(future) for future in futures] == [None] * 3
    assert counted(runner) == {"answered": 150}


def test_a_soloist_that_raises_fails_its_request_and_plays_on(band):
    runner, _, solo = band
    solo.spoils = lambda feeds: ValueError("out of tune") if feeds["x"].shape[1] == 9 else None
    solo.let()
    assert "out of tune" in str(outcome_of(runner.submit(request(SELF, 9))))
    assert outcome_of(runner.submit(request(SELF, 10))) is None
    assert counted(runner) == {"answered": 1, "failed": 1}


def test_a_soloist_that_hangs_misses_its_request_s_deadline_and_holds_up_nobody(band):
    runner, worker, solo = band
    hung = runner.submit(request(SELF, 20), timeout_s=0.05)
    solo.wait_for_a_run()
    assert isinstance(outcome_of(hung), DeadlineError)
    worker.let()
    assert outcome_of(runner.submit(request(SELF, 20))) is None


def test_its_runs_teach_the_cost_model_nothing(band):
    runner, worker, solo = band
    before = runner.snapshot().cost_model
    solo.let()
    assert outcome_of(runner.submit(request(SELF, 20))) is None
    assert runner.snapshot().cost_model == before
    worker.let()
    assert outcome_of(runner.submit(request(SELF, 2))) is None
    assert runner.snapshot().cost_model != before


def test_whoever_runs_a_request_its_bits_are_the_same(small_bundle):
    draw = np.random.default_rng(0)
    lengths = random.Random(0).choices(range(1, 65), k=200)
    requests = [Request({"x": draw.standard_normal((n, 32), np.float32)}, n, n) for n in lengths]
    with small_bundle.open_session("canonical", Placement(threads=1)) as session:
        expected = [
            session.run({"x": each.tensors["x"][None], "mask": np.ones((1, each.q_len), bool)})["y"][0]
            for each in requests
        ]
    with (
        BatchRunner(
            lambda threads: small_bundle.open_session("canonical", Placement(threads=threads, shares=True)),
            small_bundle.spec,
            RunnerOptions(workers=2, threads=1),
            soloist=Soloist(2, 0.0),
        ) as runner,
        ThreadPoolExecutor(4) as callers,
    ):

        def ask(each):
            return runner.submit(each).result(PATIENCE_S).y

        # One caller, whom the soloist serves, then several, whom the workers serve.
        found = [*map(ask, requests[:50]), *callers.map(ask, requests[50:])]
        reasons = runner.snapshot().dispatch_reasons
    assert all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))
    assert reasons["solo"] > 0
    assert reasons["solo"] < len(requests)


def test_calibration_finds_a_soloist_where_threads_make_one_request_faster_but_not_more_of_them():
    found = calibrate(lambda threads: slow(SELF, lambda _: 0.004 / threads), SELF, RunnerOptions(), cores=2)
    assert (found.workers, found.threads, found.soloist.threads) == (2, 1, 2)
    assert found.soloist.from_us < 8000


def test_calibration_finds_none_where_threads_gain_nothing_or_change_a_bit():
    def other_bits(threads):
        return slow(SELF, lambda _: 0.004 / threads, lambda y: y + np.float32(threads > 1))

    def slower(threads):
        return slow(SELF, lambda _: 0.004 * threads)  # equal ones would differ by chance now and then

    assert calibrate(slower, SELF, RunnerOptions(), cores=2).soloist is None
    assert calibrate(other_bits, SELF, RunnerOptions(), cores=2).soloist is None


def soloist_for(worker_ms, alone_ms):
    """The soloist of two threads for sessions that take so long by length, alone or as a worker."""
    model = CostModel(SELF, {(1, length, length): ms * 1e3 for length, ms in worker_ms.items()})

    def taking(threads):
        by_length = worker_ms if threads == 1 else alone_ms
        return slow(SELF, lambda feeds: by_length[feeds["x"].shape[1]] / 1e3)

    return soloist(taking, SELF, model, 2)


def test_a_soloist_for_the_longest_is_found_though_all_lengths_take_longer_than_there_is_time():
    found = soloist_for({1: 14.0, 4: 15.0, 16: 16.0, 24: 30.0}, {1: 20.0, 4: 20.0, 16: 20.0, 24: 15.0})
    assert found == Soloist(2, math.sqrt(30_000.0 * 16_000.0))


def test_one_length_that_meets_a_busy_moment_loses_no_soloist():
    found = soloist_for({8: 2.0, 16: 4.0, 24: 6.0}, {8: 6.0, 16: 1.5, 24: 6.5})
    assert found == Soloist(2, math.sqrt(4_000.0 * 2_000.0))


def test_a_soloist_that_pays_for_every_length_plays_all_of_them():
    assert soloist_for({8: 4.0, 24: 6.0}, {8: 2.0, 24: 3.0}) == Soloist(2, 0.0)


def test_who_says_how_many_workers_there_are_gets_them_and_no_soloist():
    asked = RunnerOptions(workers=2, threads=1)
    found = calibrate(lambda threads: slow(SELF, lambda _: 0.004 / threads), SELF, asked, cores=2)
    assert found.soloist is None


def test_a_soloist_is_kept_with_the_calibration():
    found = Calibration(2, 1, 0.0, 0.0, CostModel(SELF, {(1, 1, 1): 10.0}), Soloist(2, 55.0))
    again = Calibration.from_json(SELF, json.loads(json.dumps(found.to_json())))
    assert again.soloist == Soloist(2, 55.0)


@pytest.mark.parametrize(("threads", "from_us"), [(1, 5.0), (2, -1.0), (2, math.inf), (2.5, 1.0)])
def test_a_soloist_that_makes_no_sense_is_refused(threads, from_us):
    with pytest.raises(ValueError, match="a soloist of"):
        Soloist(threads, from_us)
