"""Load runs against a real server, a real runner, and targets that misbehave on purpose."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from dataclasses import replace

import numpy as np
import pytest
from conftest import small_spec
from loading import LENGTHS, QUICK, Scripted, driven, others, poisson, run
from serving import bundle_runner, fake_runner, serving

from mha_deploy import machine
from mha_deploy.bundle import Bundle
from mha_deploy.errors import InputError
from mha_deploy.load import (
    Arrivals,
    LoadOptions,
    ReferenceChecker,
    RunnerTarget,
    closed_plan,
    open_plan,
    parse_lengths,
    run_load,
)
from mha_deploy.load.alarm import Alarm
from mha_deploy.load.drive import drive
from mha_deploy.load.inputs import VARIANTS, Inputs
from mha_deploy.load.records import Outcome
from mha_deploy.load.target import variant_of
from mha_deploy.manifest import Choice
from mha_deploy.precision import Precision
from mha_deploy.sessions import Placement


@pytest.fixture(scope="module")
def port(small_bundle):
    """Of a server over the small bundle."""
    with serving(bundle_runner(small_bundle)) as running:
        yield running.port


def test_an_open_loop_against_a_server_answers_all_and_its_answers_are_right(port, small_bundle):
    report = run(port, poisson(60), checker=ReferenceChecker(small_bundle))
    assert others(report) == {"answered": 60}
    assert (report.check.sampled, report.check.failed) == (8, 0)
    assert 0 < report.check.max_abs_error <= report.check.allowed
    assert report.tokens == poisson(60).lengths.sum()
    assert min(report.records.lag_ms()) >= 0
    assert report.machine["generator_priority"] in ("real-time", "normal")


def test_the_thread_has_its_own_priority_back_after_a_run():
    before = os.sched_getscheduler(0)
    seen = []

    def script(_):
        seen.append(os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK)
        return Outcome.ANSWERED

    report = run_load(Scripted(script), closed_plan(1, LENGTHS, 3), LoadOptions(warm_up=0, sample=0))
    expected = os.SCHED_FIFO if report.machine["generator_priority"] == "real-time" else before
    assert seen == [expected] * 3
    assert os.sched_getscheduler(0) == before


def test_a_closed_loop_against_a_server_answers_all(port):
    report = run(port, closed_plan(3, LENGTHS, 50))
    assert others(report) == {"answered": 50}
    assert report.check.passed
    assert "no bundle was given" in report.check.rule


def test_a_closed_loop_has_so_many_requests_on_their_way_and_no_more():
    on_their_way, most = set(), 0

    class Counting(Scripted):
        def send(self, index, length, done):
            nonlocal most
            on_their_way.add(index)
            most = max(most, len(on_their_way))

            def ended(*arguments):
                on_their_way.discard(index)
                done(*arguments)

            super().send(index, length, ended)

    async def go():
        target = Counting(lambda _: Outcome.ANSWERED)
        await target.open(())
        return await drive(target, closed_plan(3, LENGTHS, 40))

    found = asyncio.run(go())
    assert most == 3
    assert found.records.counts()["answered"] == 40


def test_an_open_loop_against_a_runner_in_this_process(small_bundle):
    with bundle_runner(small_bundle) as runner:
        report = run_load(RunnerTarget(runner, 64), poisson(60), QUICK, ReferenceChecker(small_bundle))
    assert others(report) == {"answered": 60}
    assert report.check.passed
    assert report.check.max_abs_error > 0


def test_wrong_answers_are_found(small_bundle):
    with serving(fake_runner(lambda feeds: {"y": feeds["x"] * 1.001})) as running:
        report = run(running.port, poisson(10), checker=ReferenceChecker(small_bundle))
    assert others(report) == {"answered": 10}
    assert report.check.failed == 8
    assert ": off by " in report.check.first_failure
    assert not report.passed


@pytest.mark.parametrize(
    ("changes", "takes"),
    [
        ({"mask": "full"}, "x [batch, length, 32] float32, attn_mask [batch, length, length] bool"),
        ({"mask": "none"}, "x [batch, length, 32] float32, as the server says"),
        ({"kind": "cross", "dims": ()}, "query [batch, length, 32] float32, key [batch, length, 32] float32"),
        ({"d_model": 64}, "x [batch, length, 64] float32, mask [batch, length] bool"),
    ],
)
def test_a_bundle_of_other_inputs_than_the_servers_is_refused_before_any_request(
    small_bundle, changes, takes
):
    with serving(fake_runner(spec=small_spec(**changes))) as running:
        with pytest.raises(InputError) as told:
            run(running.port, poisson(5), checker=ReferenceChecker(small_bundle))
        assert running.stats.received == 0
    assert f"requests take {takes}" in str(told.value)
    ours = "but the bundle's block takes x [batch, seq, 32] float32, mask [batch, seq] bool"
    assert f"{ours}; give the bundle that is served" in str(told.value)


def test_an_answer_that_holds_nan_is_found_without_a_reference():
    with serving(fake_runner(lambda feeds: {"y": feeds["x"] * np.float32(np.nan)})) as running:
        report = run(running.port, poisson(10))
    assert report.check.failed == 8
    assert report.check.first_failure.endswith("y holds NaN or inf")


def test_requests_of_one_length_carry_different_values():
    inputs = Inputs.for_signature(small_spec().signature, 64)
    drawn = [inputs.feeds(64, variant)["x"] for variant in range(VARIANTS)]
    assert len({array.tobytes() for array in drawn}) == VARIANTS
    assert {variant_of(index) for index in range(9)} == set(range(VARIANTS))
    assert all(array.shape == (1, 64, 32) and array.flags.c_contiguous for array in drawn)


def test_a_full_queue_and_a_deadline_have_outcomes_of_their_own():
    def slow(feeds):
        time.sleep(0.05)
        return {"y": feeds["x"]}

    lengths = parse_lengths("fixed:4")
    burst = open_plan(Arrivals("constant", 1e6), lengths, 12)
    with serving(fake_runner(slow, max_queue_requests=2, mode="exact")) as running:
        refused = run(running.port, burst, LoadOptions(warm_up=0, sample=0))
    assert refused.outcomes["refused"] > 0
    assert refused.outcomes["answered"] + refused.outcomes["refused"] == refused.planned == 12
    assert any("status 503" in note for note in refused.notes)
    assert refused.failures == ()
    spread = open_plan(Arrivals("constant", 100.0), LENGTHS, 12)
    with fake_runner(slow) as runner:
        expired = run_load(RunnerTarget(runner, 64, timeout_s=0.04), spread, LoadOptions(warm_up=0, sample=0))
    assert expired.outcomes["expired"] > 0
    assert expired.planned == 12


def test_an_open_loop_does_not_wait_for_answers():
    plan = open_plan(Arrivals("constant", 1000.0), LENGTHS, 20)
    target, found = driven(lambda index: None if index < 15 else Outcome.ANSWERED, plan, drain_s=0.05)
    assert target.sent == list(range(20))
    assert found.records.counts() == dict.fromkeys(found.records.counts(), 0) | {
        "answered": 5,
        "unanswered": 15,
    }


def test_requests_beyond_the_bound_in_flight_are_not_sent_and_counted():
    plan = open_plan(Arrivals("constant", 1000.0), LENGTHS, 10)
    target, found = driven(lambda _: None, plan, max_in_flight=4, drain_s=0.05)
    assert target.sent == [0, 1, 2, 3]
    assert found.records.counts()["not_sent"] == 6
    assert found.records.counts()["unanswered"] == 4
    assert found.reasons == {(Outcome.NOT_SENT, "4 requests were on their way already"): 6}


def test_a_closed_loop_whose_target_hangs_ends_and_says_what_was_never_sent():
    _, found = driven(
        lambda i: Outcome.ANSWERED if i < 5 else None, closed_plan(2, LENGTHS, 20), drain_s=0.05
    )
    counts = found.records.counts()
    assert (counts["answered"], counts["unanswered"], counts["not_sent"]) == (5, 2, 13)


def test_a_generator_that_is_held_up_counts_the_delay_and_makes_the_run_invalid():
    def block(index):
        if index == 0:
            time.sleep(0.1)
        return Outcome.ANSWERED

    plan = open_plan(Arrivals("constant", 1000.0), LENGTHS, 50)
    _, found = driven(block, plan)
    late = found.records.lag_ms()
    assert min(late[1:40]) >= 50
    assert found.records.latency_ms()[1] >= 90
    assert max(found.records.service_ms()[1:]) < found.records.latency_ms()[1] + 1e3

    class Blocking(Scripted):
        pass

    report = run_load(Blocking(block), plan, LoadOptions(warm_up=0, sample=0))
    assert not report.valid
    assert "the generator sent late" in report.faults[0]


def test_lengths_beyond_the_block_are_refused_before_the_run(small_bundle):
    with (
        bundle_runner(small_bundle) as runner,
        pytest.raises(InputError, match="length 65; this block takes seq up to 64"),
    ):
        RunnerTarget(runner, 65)


def test_options_below_nothing_are_refused():
    with pytest.raises(InputError, match="expected numbers of at least 0"):
        LoadOptions(sample=-1)


def test_an_alarm_rings_once_and_not_before_its_time():
    async def go():
        rung = []
        alarm = Alarm(asyncio.get_running_loop(), lambda: rung.append(time.monotonic()))
        at = time.monotonic() + 0.02
        alarm.set(at)
        await asyncio.sleep(0.1)
        alarm.close()
        return at, rung

    at, rung = asyncio.run(go())
    assert len(rung) == 1
    assert rung[0] >= at


def test_answers_are_held_to_what_the_artifact_that_runs_at_the_placement_may_be_off_by(
    small_bundle, tmp_path
):
    bundle = Bundle.load(shutil.copytree(small_bundle.folder, tmp_path / "bundle"))
    coarse = replace(small_bundle.artifact(), name="coarse", precision=Precision.BF16)
    files = tuple(record.sha256 for record in coarse.files)
    bundle.choose(coarse, Choice(machine.fingerprint(), "cpu", 1, "coarse", files))
    x = np.random.default_rng(0).standard_normal((1, 4, 32)).astype(np.float32)
    feeds = {"x": x, "mask": np.ones((1, 4), bool)}
    one, two = (
        ReferenceChecker(bundle, placement=Placement(threads=threads)).errors(x[0], feeds)[1]
        for threads in (1, 2)
    )
    assert one > 1000 * two
