"""Answers through the runner are the requests' own, whatever shares their batch."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runner_blocks import (
    BLOCKS,
    PATIENCE_S,
    SELF,
    Cheap,
    Gate,
    alone,
    busy,
    counted,
    request,
    runner_behind,
    wait_until_idle,
)

from mha_deploy.runner import Answer, BatchRunner, RunnerOptions
from mha_deploy.runner.recorder import REASONS


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
