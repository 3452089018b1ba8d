"""Predicted costs: exact where measured, corrected by what runs, kept beside the artifact."""

import itertools
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runner_blocks import CROSS, SELF, WIDTH, Cheap, block, slow

from mha_deploy.bundle import Bundle
from mha_deploy.errors import BundleError
from mha_deploy.runner import BatchRunner, CostModel, RunnerOptions
from mha_deploy.runner.calibration import FOLDER, calibrate, calibrated, stored
from mha_deploy.runner.cost import REMEMBERED
from mha_deploy.runner.crew import crews
from mha_deploy.runner.layout import PaddedLayout
from mha_deploy.runner.planner import Planner
from mha_deploy.sessions import DEFAULT_PLACEMENT
from mha_deploy.signature import Dim

OPTIONS = RunnerOptions()


def price(spec, size, overhead_us=50.0, flops_per_us=1000.0):
    names = [spec.dims[0].name, spec.query_axis, spec.key_axis]
    return overhead_us + spec.flops(dict(zip(names, size, strict=True))) / flops_per_us


def measured(spec, **terms):
    lengths = (1, 4, 16, 24)
    if spec.kind == "self":
        sizes = [(rows, length, length) for rows in (1, 2, 4) for length in lengths]
    else:
        sizes = [(rows, q, kv) for rows in (1, 2, 4) for q in lengths for kv in lengths]
    return CostModel(spec, {size: price(spec, size, **terms) for size in sizes})


sizes = st.tuples(st.integers(1, 4), st.integers(1, 24), st.integers(1, 24))


@settings(deadline=None)
@given(size=sizes, spec=st.sampled_from([SELF, CROSS]), overhead=st.sampled_from([0.0, 50.0, 5000.0]))
def test_a_cost_that_follows_the_flops_is_predicted_at_sizes_that_were_not_measured(size, spec, overhead):
    if spec.kind == "self":
        size = (size[0], size[1], size[1])
    found = measured(spec, overhead_us=overhead).predict_us(size)
    assert found == pytest.approx(price(spec, size, overhead_us=overhead), rel=0.01)


@pytest.mark.parametrize("slack", [0.0, 0.25, 1.0])
def test_positions_that_hold_no_token_cost_as_much_of_their_projections_as_the_slack_says(slack):
    size, tokens, positions = (4, 16, 16), 22, 64
    whole = price(SELF, size, overhead_us=0.0)
    core = price(SELF, (1, 16, 16), overhead_us=0.0) * 4 - 64 * 2 * 4 * WIDTH * WIDTH / 1000
    model = CostModel(SELF, measured(SELF, overhead_us=0.0).samples, slack=slack)
    assert model.predict_us(size) == pytest.approx(whole, rel=0.01)
    paid = tokens + slack * (positions - tokens)
    expected = core + (whole - core) * paid / positions
    assert model.predict_us(size, tokens / positions) == pytest.approx(expected, rel=0.01)
    again = CostModel.from_json(SELF, json.loads(json.dumps(model.to_json())))
    assert again.predict_us(size, 0.5) == model.predict_us(size, 0.5)


@pytest.mark.parametrize("slack", [-0.1, 1.1, float("nan")])
def test_a_stored_slack_that_is_no_share_is_refused(slack):
    with pytest.raises(BundleError, match=r"slack .*; expected 0 to 1"):
        CostModel.from_json(SELF, {**measured(SELF).to_json(), "slack": slack})


def test_what_a_batch_with_padding_took_corrects_one_without():
    model = CostModel(SELF, measured(SELF).samples, slack=0.0)
    full, half = model.predict_us((4, 16, 16)), model.predict_us((4, 16, 16), 0.5)
    for _ in range(100):
        model.observe((4, 16, 16), 2 * half, 0.5)
    assert model.predict_us((4, 16, 16)) == pytest.approx(2 * full, rel=0.01)


def test_a_size_that_is_dearer_than_its_flops_is_predicted_as_it_was_measured():
    samples = dict(measured(SELF).samples)
    samples[4, 16, 16] *= 3
    model = CostModel(SELF, samples)
    assert model.predict_us((4, 16, 16)) == pytest.approx(samples[4, 16, 16], rel=0.05)
    assert model.predict_us((1, 1, 1)) == pytest.approx(samples[1, 1, 1], rel=0.5)


def test_predictions_follow_what_runs():
    model = measured(SELF)
    before, far = model.predict_us((1, 4, 4)), model.predict_us((4, 24, 24))
    for _ in range(100):
        model.observe((1, 4, 4), 2 * before)
    assert model.predict_us((1, 4, 4)) == pytest.approx(2 * before, rel=0.01)
    assert model.predict_us((4, 24, 24)) == pytest.approx(2 * far, rel=0.01)  # nothing ran there yet


def test_one_run_that_took_a_thousand_times_as_long_moves_a_prediction_little():
    model = measured(SELF)
    before = model.predict_us((1, 4, 4))
    model.observe((1, 4, 4), 1000 * before)
    assert model.predict_us((1, 4, 4)) < 1.5 * before


def test_the_first_run_gives_a_guess_its_scale():
    model = CostModel(SELF, {})
    assert not model.is_measured((1, 4, 4))
    model.observe((1, 4, 4), 12_345.0)
    assert model.predict_us((1, 4, 4)) == pytest.approx(12_345.0)
    assert model.is_measured((1, 4, 4))


@pytest.mark.parametrize("model", [measured(SELF), CostModel(SELF, {})])
def test_refusals_wear_off_a_prediction_that_no_run_can_correct(model):
    size = (1, 4, 4)
    before = model.predict_us(size)
    for _ in range(100):
        model.observe(size, 50 * before)
    wrong = model.predict_us(size)
    for _ in range(200):
        model.doubt(size)
    assert model.predict_us(size) < 0.1 * wrong


def test_a_model_read_back_predicts_the_same():
    model = measured(CROSS)
    again = CostModel.from_json(CROSS, json.loads(json.dumps(model.to_json())))
    assert again.predict_us((3, 7, 11)) == model.predict_us((3, 7, 11))


@pytest.mark.parametrize(
    "data", [{}, *({"slack": 1.0, "samples": samples} for samples in ([], [[1, 1, 1]], [[1, 1, 1, 0.0]], 3))]
)
def test_a_stored_model_that_is_malformed_is_refused(data):
    with pytest.raises(BundleError, match="a stored cost model is malformed"):
        CostModel.from_json(SELF, data)


@pytest.mark.parametrize(
    ("asked", "possible"),
    [
        ({}, [(1, 4), (4, 1)]),
        ({"workers": 2}, [(2, 2)]),
        ({"threads": 4}, [(1, 4)]),
        ({"workers": 8}, [(8, 1)]),
        ({"workers": 3, "threads": 2}, [(3, 2)]),
    ],
)
def test_workers_and_threads_that_are_given_leave_nothing_to_measure(asked, possible):
    assert crews(RunnerOptions(**asked), 4) == possible


def test_sessions_that_do_not_gain_by_threads_are_given_a_worker_a_core():
    found = calibrate(lambda _: slow(SELF, lambda _: 0.004), SELF, OPTIONS, cores=2)
    assert (found.workers, found.threads) == (2, 1)


def test_sessions_that_gain_by_threads_more_than_by_company_are_given_the_threads():
    found = calibrate(lambda threads: slow(SELF, lambda _: 0.02 / threads**3), SELF, OPTIONS, cores=2)
    assert (found.workers, found.threads) == (1, 2)


def test_calibration_sees_what_batch_mates_change_of_an_answer():
    def noisy(y):
        return y + np.float32(1e-3 * (len(y) > 1))

    found = calibrate(lambda _: slow(SELF, lambda _: 0.0, noisy), SELF, OPTIONS, cores=1)
    assert 1e-4 < found.drift < 1e-2
    assert calibrate(lambda _: slow(SELF, lambda _: 0.0), SELF, OPTIONS, cores=1).drift == 0


def test_calibration_ends_in_time_with_a_session_that_is_slow():
    # The whole grid of twelve sizes would take it 2.2 s, 28 rows in four runs each.
    found = calibrate(lambda _: slow(SELF, lambda feeds: 0.02 * len(feeds["x"])), SELF, OPTIONS, cores=1)
    assert 3 <= len(found.model.samples) < 12
    assert found.model.predict_us((4, 24, 24)) > 2 * found.model.predict_us((1, 24, 24))


@pytest.fixture
def own_bundle(small_bundle, tmp_path):
    return Bundle.load(shutil.copytree(small_bundle.folder, tmp_path / "bundle"))


def test_a_calibration_is_kept_in_the_bundle_and_taken_up_again(own_bundle):
    first = calibrated(own_bundle, "canonical", DEFAULT_PLACEMENT, OPTIONS)
    again = calibrated(own_bundle, "canonical", DEFAULT_PLACEMENT, OPTIONS)
    assert again.to_json() == first.to_json()
    assert first.drift == 0
    other = replace(DEFAULT_PLACEMENT, threads=1)
    assert stored(own_bundle, "canonical", other, OPTIONS) is None


def test_a_damaged_calibration_is_made_again(own_bundle):
    first = calibrated(own_bundle, "canonical", DEFAULT_PLACEMENT, OPTIONS)
    paths = list((own_bundle.folder / FOLDER).iterdir())
    for text in (
        "{",
        "[]",
        "{}",
        *({**first.to_json(), **wrong} for wrong in ({"workers": 0}, {"drift": -1}, {"drift": "much"})),
    ):
        for path in paths:
            path.write_text(text if isinstance(text, str) else json.dumps(text), encoding="utf-8")
        assert stored(own_bundle, "canonical", DEFAULT_PLACEMENT, OPTIONS) is None
    calibrated(own_bundle, "canonical", DEFAULT_PLACEMENT, OPTIONS)
    assert stored(own_bundle, "canonical", DEFAULT_PLACEMENT, OPTIONS) is not None


def test_a_runner_over_a_bundle_runs_as_it_was_calibrated(own_bundle):
    found = calibrated(own_bundle, "canonical", DEFAULT_PLACEMENT, OPTIONS)
    with BatchRunner.over(own_bundle) as runner:
        seen = runner.snapshot()
    assert (seen.workers, seen.threads) == (found.workers, found.threads)
    assert seen.cost_model["samples"] == found.to_json()["cost_model"]["samples"]


def test_what_is_remembered_of_shapes_is_bounded_however_many_are_asked_for():
    longest = 300
    lengths = [Dim(name, 1, 8, longest) for name in ("q_len", "kv_len")]
    spec = block(Dim("batch", 1, 2, 4), *lengths, kind="cross")
    planner = Planner(spec, Cheap(spec, {}), OPTIONS, PaddedLayout(spec, spec.signature), alone=False)
    shapes = list(itertools.product(range(1, longest + 1), repeat=2))
    assert len(shapes) > REMEMBERED
    shares = [planner.share_us(shape) for shape in shapes]
    assert 0 < len(planner._cheapest) <= REMEMBERED
    assert [planner.share_us(shape) for shape in shapes[:9]] == shares[:9]
