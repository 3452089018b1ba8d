"""A bundle object: what is recorded through it shows in it, and nothing else changes it."""

import dataclasses
import shutil
import threading

import numpy as np
import pytest

from mha_deploy import BatchRunner, RunnerOptions, Variant, bench, optimize, verify
from mha_deploy.bundle import CANONICAL, Bundle
from mha_deploy.errors import BundleError
from mha_deploy.precision import Precision
from mha_deploy.ragged import Request
from mha_deploy.search.candidates import all_candidates
from mha_deploy.sessions import Placement
from mha_deploy.variants import portable_artifact, typed_artifact

ONE_THREAD = Placement(threads=1)
NAME = "lean-attention"
ONLY = tuple(each for each in all_candidates() if each.name == NAME)
GRID = {"batch": [1], "seq": [4]}


@pytest.fixture(scope="module")
def typed(small_bundle, tmp_path_factory):
    """A copy that has an fp16 form, made through this very object."""
    folder = shutil.copytree(small_bundle.folder, tmp_path_factory.mktemp("typed") / "bundle")
    bundle = Bundle.load(folder)
    typed_artifact(bundle, Variant(Precision.FP16))
    return bundle


@pytest.fixture
def bundle(small_bundle, tmp_path):
    """A copy to write to."""
    return Bundle.load(shutil.copytree(small_bundle.folder, tmp_path / "bundle"))


def names(bundle):
    return [artifact.name for artifact in bundle.artifacts]


def named(bundle, name):
    """The canonical graph under another name."""
    return dataclasses.replace(bundle.artifact(CANONICAL), name=name)


def test_after_a_search_the_bundle_runs_measures_and_verifies_what_was_chosen(bundle):
    chosen = optimize(bundle, candidates=ONLY, grid=GRID, seconds=0.02, placement=ONE_THREAD).artifact
    assert chosen == NAME
    assert bundle == Bundle.load(bundle.folder)
    assert bundle.artifact("", ONE_THREAD).name == NAME
    for name in ("", chosen):
        with bundle.open_session(name, ONE_THREAD) as session:
            assert session.name == NAME
    options = RunnerOptions(workers=1, threads=1)
    with BatchRunner.over(bundle, placement=ONE_THREAD, options=options) as runner:
        assert runner.submit(Request({"x": np.ones((3, 32), np.float32)}, 3, 3)).result().y.shape == (3, 32)
    assert list((bundle.folder / "calibration").glob(f"{NAME}-*.json"))
    assert bench(bundle, grid=GRID, seconds=0.02, placement=ONE_THREAD).artifact == NAME
    report = verify(bundle, names=["min"])
    assert report.passed
    assert {case.artifact for case in report.cases} == {CANONICAL, NAME}


def test_a_form_that_was_made_opens_in_the_bundle_that_it_was_made_for(typed):
    assert names(typed) == [CANONICAL, "fp16"]
    feeds = {"x": np.ones((1, 3, 32), np.float32), "mask": np.ones((1, 3), bool)}
    with typed.open_session("fp16") as session:
        assert session.run(feeds)["y"].shape == (1, 3, 32)


def test_the_portable_form_opens_too(bundle):
    portable_artifact(bundle)
    with bundle.open_session("portable") as session:
        assert session.name == "portable"


def test_a_form_that_another_has_made_meanwhile_is_taken_in_when_it_is_asked_for(typed, tmp_path):
    folder = shutil.copytree(typed.folder, tmp_path / "bundle")
    other = Bundle(folder, dataclasses.replace(typed.manifest, artifacts=typed.artifacts[:1]))
    with pytest.raises(BundleError, match="has no artifact 'fp16'; it has canonical"):
        other.artifact("fp16")
    before = (folder / "variants/fp16/model.onnx").stat().st_mtime_ns
    assert typed_artifact(other, Variant(Precision.FP16)) == other.artifact("fp16")
    assert (folder / "variants/fp16/model.onnx").stat().st_mtime_ns == before


def test_what_two_threads_record_through_one_bundle_is_all_there(bundle):
    def recording(prefix):
        for number in range(10):
            bundle.record(named(bundle, f"{prefix}-{number}"))

    threads = [threading.Thread(target=recording, args=(prefix,)) for prefix in ("one", "other")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = {CANONICAL, *(f"{prefix}-{number}" for prefix in ("one", "other") for number in range(10))}
    assert set(names(bundle)) == set(names(Bundle.load(bundle.folder))) == expected


def test_what_is_recorded_through_one_bundle_shows_in_another_once_it_looks(bundle):
    other = Bundle.load(bundle.folder)
    bundle.record(named(bundle, "one"))
    assert names(other) == [CANONICAL]
    other.refresh()
    assert names(other) == [CANONICAL, "one"]
    bundle.record(named(bundle, "two"))
    other.record(named(bundle, "three"))
    assert names(other) == [CANONICAL, "one", "two", "three"]


def test_a_change_that_fails_leaves_the_bundle_and_its_folder_as_they_were(bundle):
    def failing(_manifest):
        raise BundleError("no")

    before = bundle.manifest
    with pytest.raises(BundleError, match=r"^no$"):
        bundle.change(failing)
    assert bundle.manifest is before
    assert Bundle.load(bundle.folder).manifest == before


def test_a_bundle_as_it_would_be_leaves_this_one_as_it_is(bundle):
    would_be = bundle.with_artifact(named(bundle, "one"))
    assert names(would_be) == [CANONICAL, "one"]
    assert names(bundle) == names(Bundle.load(bundle.folder)) == [CANONICAL]
