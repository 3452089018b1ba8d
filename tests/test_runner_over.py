"""A runner over a bundle's artifact: which it refuses, and what its sessions have done before a request."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from runner_blocks import SELF, Cheap, request

from mha_deploy.bundle import Bundle
from mha_deploy.errors import BundleError
from mha_deploy.ragged import Request
from mha_deploy.runner import BatchRunner, RunnerOptions
from mha_deploy.runner.calibration import calibrate
from mha_deploy.sessions import Placement
from mha_deploy.sessions.fake import FakeSession

ONE = RunnerOptions(workers=1, threads=1)


@pytest.fixture
def dependent(small_bundle, tmp_path):
    """A bundle whose artifact says of itself what one quantised with a scale for the whole batch says."""
    copy = Bundle.load(shutil.copytree(small_bundle.folder, tmp_path / "bundle"))
    artifact = copy.artifact()
    copy.record(replace(artifact, details={**artifact.details, "batch_dependent": True}))
    return copy


def one_scale(feeds):
    """x in 8 bits, with one scale for all there is."""
    step = 2 * abs(feeds["x"]).max() / 255
    return {"y": (np.round(feeds["x"] / step) * step).astype(np.float32)}


def quantised(_threads=0):
    return FakeSession(SELF.signature, one_scale)


def neighbours():
    """0.3 beside values within 1, and a request of values of 100."""
    x, loud = np.ones((2, 4), np.float32), np.full((2, 4), 100, np.float32)
    x[0, 0] = 0.3
    return [replace(request(SELF, 2), tensors={"x": each}) for each in (x, loud, loud, loud)]


def test_an_artifact_whose_answers_depend_on_batch_mates_is_refused(dependent):
    with pytest.raises(BundleError, match=r"depend on what else is in their batch .* scales per token or"):
        BatchRunner.over(dependent, options=ONE)
    with BatchRunner.over(dependent, options=replace(ONE, allow_batch_dependent=True)) as runner:
        assert runner.name == "canonical"


def test_serve_refuses_it_with_one_line_and_says_what_to_do(dependent, cli):
    result = cli("serve", dependent.folder, "--port", 0)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "--allow-batch-dependent" in result.stderr


@pytest.mark.parametrize(("threads", "opened"), [(1, 1), (2, 3)])
def test_workers_of_one_thread_run_over_one_set_of_weights(small_bundle, threads, opened):
    seen = []

    def open_session(wanted):
        seen.append(wanted)
        return small_bundle.open_session(placement=Placement(threads=wanted))

    random, lengths = np.random.default_rng(0), (5, 9, 33) * 20
    xs = [random.standard_normal((length, small_bundle.spec.d_model), np.float32) for length in lengths]
    options = RunnerOptions(workers=3, threads=threads)
    with BatchRunner(open_session, small_bundle.spec, options) as runner:
        futures = runner.submit_all([Request({"x": x}, len(x), len(x)) for x in xs])
        answers = [future.result(30).y for future in futures]
    with small_bundle.open_session(placement=Placement(threads=threads)) as alone:
        for x, answer in zip(xs, answers, strict=True):
            feeds = {"x": x[None], "mask": np.ones((1, len(x)), bool)}
            np.testing.assert_array_equal(answer, alone.run(feeds)["y"][0])
    assert seen == [threads] * opened


def test_a_scale_for_the_whole_batch_shows_where_it_is_allowed_and_nowhere_else():
    drift = calibrate(quantised, SELF, ONE, cores=1).drift
    assert drift > 1e-3
    seen = {}
    for allowed in (False, True):
        options = replace(ONE, allow_batch_dependent=allowed)
        with BatchRunner(quantised, SELF, options, Cheap(SELF, {}), drift=drift) as runner:
            answers = [future.result(20) for future in runner.submit_all(neighbours())]
            seen[allowed] = (float(answers[0].y[0, 0]), answers[0].batch_size, runner.snapshot().batching)
            assert runner.snapshot().drift == drift
    assert seen[False] == (pytest.approx(0.298, abs=1e-3), 1, False)
    assert seen[True] == (0.0, 4, True)


def test_every_worker_has_run_once_before_the_first_request_and_that_is_not_counted():
    runs = []

    def open_session(_threads):
        return FakeSession(SELF.signature, lambda feeds: runs.append(feeds["x"].shape) or {"y": feeds["x"]})

    with BatchRunner(open_session, SELF, RunnerOptions(workers=2), warm=True) as runner:
        assert runs == [(1, 8, 4)] * 2
        seen = runner.snapshot()
        assert (seen.received, seen.tokens, dict(seen.batches)) == (0, 0, {})
        assert all(histogram.count == 0 for histogram in seen.phases.values())
        runner.submit(request(SELF, 3)).result(20)
        assert runner.snapshot().phases["compute"].count == 1


def test_a_session_that_fails_its_first_run_answers_the_first_request_with_that():
    def broken(_feeds):
        raise ArithmeticError("no kernel for this")

    with BatchRunner(lambda _: FakeSession(SELF.signature, broken), SELF, ONE, warm=True) as runner:
        error = runner.submit(request(SELF, 3)).exception(20)
    assert str(error) == "no kernel for this"


def test_a_runner_over_a_bundle_is_warm(small_bundle, tmp_path, monkeypatch):
    bundle = Bundle.load(shutil.copytree(small_bundle.folder, tmp_path / "bundle"))
    BatchRunner.over(bundle, options=ONE).close()  # which calibrates
    assert json.loads(next((bundle.folder / "calibration").iterdir()).read_text())["workers"] == 1
    runs = []

    def fake(_bundle, _name, _placement):
        return FakeSession(bundle.signature, lambda feeds: runs.append(feeds["x"].shape) or {"y": feeds["x"]})

    monkeypatch.setattr(Bundle, "open_session", fake)
    with BatchRunner.over(bundle, options=ONE):
        assert runs == [(1, 8, 32)]


@pytest.fixture
def of_one_thread(small_bundle, tmp_path):
    """A bundle with a variant, as `optimize` makes one, whose sessions have one thread whatever is asked."""
    copy = Bundle.load(shutil.copytree(small_bundle.folder, tmp_path / "bundle"))
    details = {"settings": {"threads": 1}}
    return copy.with_artifact(replace(copy.artifact(), name="one-thread", details=details))


@pytest.mark.parametrize(("workers", "found"), [(1, 1), (0, 2)])
def test_the_threads_of_sessions_are_those_that_their_artifact_asks_for(of_one_thread, workers, found):
    options = RunnerOptions(workers=workers)
    with BatchRunner.over(
        of_one_thread, "one-thread", placement=Placement(threads=2), options=options
    ) as runner:
        seen = runner.snapshot()
    assert (seen.workers, seen.threads, seen.soloist) == (found, 1, 0)
