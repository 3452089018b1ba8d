"""bench of artifacts that say themselves where they run."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
from engine_sessions import feeds, make_plan

from mha_deploy.benchmark import bench, candidate, contest, profile
from mha_deploy.benchmark.baseline import Baseline
from mha_deploy.benchmark.turns import cells_of
from mha_deploy.benchmark.where import route_notices, stages_of, yardsticks_of
from mha_deploy.bundle import Bundle
from mha_deploy.errors import BenchError, MissingError
from mha_deploy.precision import Precision
from mha_deploy.search.routing import routed_artifact
from mha_deploy.sessions import DEFAULT_PLACEMENT, Placement, RoutedSession, placed
from mha_deploy.sessions.onnx_runtime import OnnxRuntimeSession
from mha_deploy.sessions.stages import Stages

TWO = Placement(threads=2)
GRID = {"batch": [1], "seq": [8]}


def with_settings(artifact, name, **settings):
    return replace(artifact, name=name, details={"settings": settings})


@pytest.fixture
def bundle(small_bundle, tmp_path):
    """A copy with variants as `optimize` makes them: one of one thread, one on a GPU, one by length."""
    copy = Bundle.load(shutil.copytree(small_bundle.folder, tmp_path / "bundle"))
    canonical = copy.artifact()
    one = with_settings(canonical, "one-thread", threads=1)
    for each in (one, with_settings(canonical, "cuda", device="cuda"), routed_artifact(one, canonical, 4)):
        copy = copy.with_artifact(each)
    return copy


def test_an_artifact_of_one_thread_is_held_against_the_ceilings_of_one(bundle):
    report = bench(bundle, "one-thread", grid=GRID, seconds=0.05, placement=TWO)
    assert (report.threads, report.ceilings.what[-9:]) == (1, "1 threads")
    assert report.title.endswith("1 thread)")
    assert report.to_json()["threads"] == 1


def test_a_baseline_is_of_the_threads_that_the_artifact_has(bundle, bench_report, tmp_path):
    path, cells = tmp_path / "baseline.json", cells_of(bundle.spec, GRID, GRID)
    for threads in (1, 2):
        data = {**bench_report.to_json(), "artifact": "one-thread", "threads": threads}
        path.write_text(json.dumps(data))
        if threads == 1:
            Baseline.read(path).admit(bundle, "one-thread", TWO, cells)
            continue
        with pytest.raises(BenchError, match="its threads is 2, here it is 1"):
            Baseline.read(path).admit(bundle, "one-thread", TWO, cells)


def test_routes_of_other_threads_are_held_against_the_most_and_that_is_said(bundle):
    report = bench(bundle, "one-thread-to-4-then-canonical", grid=GRID, seconds=0.05, placement=TWO)
    assert (report.threads, report.ceilings.what[-9:]) == (2, "2 threads")
    assert report.notices()[0] == (
        "its routes, the one for short requests first, have 1 and 2 threads: the ceilings are those of 2"
    )


@pytest.mark.parametrize(
    ("artifact", "placement", "expected"),
    [
        ("canonical", TWO, TWO),
        ("one-thread", TWO, Placement(threads=1)),
        ("one-thread", DEFAULT_PLACEMENT, Placement(threads=1)),
        ("cuda", TWO, Placement("cuda", threads=2)),
        ("one-thread-to-4-then-canonical", TWO, TWO),
        ("one-thread-to-4-then-canonical", DEFAULT_PLACEMENT, DEFAULT_PLACEMENT),
    ],
)
def test_what_an_artifact_asks_for_goes_before_what_a_caller_does(bundle, artifact, placement, expected):
    assert placed(bundle.artifact(artifact), placement) == expected


def test_a_device_that_the_artifact_asks_for_and_does_not_get_is_noticed(bundle):
    report = bench(bundle, "cuda", grid=GRID, seconds=0.05, placement=Placement(threads=1, fallback="cpu"))
    assert report.notices()[0] == "asked for cuda, which is not to be had here: ran on CPUExecutionProvider"


def test_the_device_of_a_candidate_is_the_one_that_its_artifact_asks_for(bundle):
    found = candidate("cuda@threads=1", bundle, Placement(fallback="cpu"))
    report = contest(found, found, grid=GRID, seconds=0.02, rounds=8)
    assert report.notices()[0] == "asked for cuda, which is not to be had here: ran on CPUExecutionProvider"


def test_the_profile_is_of_the_settings_that_the_artifact_runs_with(bundle, monkeypatch):
    seen, run = [], OnnxRuntimeSession.run

    def watched(self, feeds):
        seen.append(self._session.get_session_options())
        return run(self, feeds)

    monkeypatch.setattr(OnnxRuntimeSession, "run", watched)
    settled = with_settings(bundle.artifact(), "settled", threads=1, spinning=False)
    found = profile(bundle.with_artifact(settled), {"batch": 1, "seq": 8}, "settled", placement=TWO)
    assert found.runs == 30
    assert {options.intra_op_num_threads for options in seen} == {1}
    assert {o.get_session_config_entry("session.intra_op.allow_spinning") for o in seen} == {"0"}


def test_the_profile_is_of_the_device_that_the_artifact_asks_for(bundle):
    with pytest.raises(MissingError, match="CUDAExecutionProvider was asked for, but"):
        profile(bundle, {"batch": 1, "seq": 8}, "cuda")


def test_what_runs_on_a_device_behind_a_route_is_held_against_the_device(bundle, opened, monkeypatch):
    monkeypatch.setattr("mha_deploy.benchmark.where.gpu_yardsticks", lambda precision: precision)
    routed = bundle.artifact("one-thread-to-4-then-canonical")
    session = RoutedSession(opened(make_plan())[0], opened(make_plan())[0], up_to_length=4)
    with yardsticks_of(session, Placement("cuda")) as found:
        assert found is Precision.FP16
    assert set(stages_of(session, feeds())) == {Stages(2.0, 5.0, 2.0)}
    assert route_notices(session, routed, TWO) == []


def test_a_route_on_a_device_beside_one_on_the_host_is_said(bundle, opened):
    routed = bundle.artifact("one-thread-to-4-then-canonical")
    host = bundle.open_session("canonical", TWO)
    session = RoutedSession(host, opened(make_plan())[0], up_to_length=4)
    with yardsticks_of(session, Placement("cuda", threads=1)) as found:
        assert "CPUExecutionProvider, 1 threads" in found.what
    assert stages_of(session, feeds()) == ()
    (notice,) = route_notices(session, routed, TWO)
    assert notice.startswith(
        "one of its routes runs on a device, the other on the CPU: the ceilings are the "
    )
    session.close()
