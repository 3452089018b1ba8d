"""Copies and computing of a run on a device, timed apart."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import small_spec
from engine_sessions import feeds, make_plan, right
from fake_tensorrt import FakePlan
from gpu_engines import MODULES, open_engine

from mha_deploy.errors import FeedError
from mha_deploy.packed import RunCost, graph_signature
from mha_deploy.sessions import Placement, RoutedSession
from mha_deploy.sessions.fake import FakeSession
from mha_deploy.sessions.onnx_runtime_cuda import OnnxRuntimeCudaSession
from mha_deploy.sessions.packed import PackedSession, PaddedView
from mha_deploy.sessions.stages import StagedSession, Stages


@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize("cold", [False, True])
def test_copies_and_computing_are_timed_apart_and_what_empties_the_cache_is_in_neither(
    opened, cuda_graphs, cold
):
    session, memory = opened(make_plan(), cuda_graphs=cuda_graphs)
    for _ in range(3):  # with graphs: an ordinary run, a capture, a replay
        assert session.run_in_stages(feeds(), cold=cold) == Stages(2.0, 5.0, 2.0)
    assert (memory.captured, memory.replayed) == ((1, 2) if cuda_graphs else (0, 0))


def test_emptying_the_cache_writes_twice_its_bytes(opened):
    session, memory = opened(make_plan())
    before = len(memory.buffers)
    session.run_in_stages(feeds(), cold=True)
    (flush,) = memory.buffers[before:]
    assert flush.size == 2 * memory.cache_bytes


def test_a_run_after_a_timed_one_is_an_ordinary_one(opened):
    session, memory = opened(make_plan())
    session.run_in_stages(feeds(), cold=True)
    spent = memory.now_ms
    right(session, feeds(seed=1))
    assert memory.now_ms - spent == 2 * 1 + 5 + 2


def test_a_failed_run_leaves_nothing_timed_behind(opened):
    plan = make_plan()
    session, _ = opened(plan)
    plan.refuses = {"execute_async_v3"}
    with pytest.raises(Exception, match="failed on"):
        session.run_in_stages(feeds(), cold=True)
    plan.refuses = set()
    right(session, feeds())


def test_bound_runs_of_onnx_runtime_are_timed_by_the_hosts_clock(small_bundle):
    artifact = small_bundle.artifact()
    path = artifact.path(small_bundle.folder)
    given = {"x": np.ones((2, 5, 32), np.float32), "mask": np.ones((2, 5), bool)}
    with OnnxRuntimeCudaSession(path, artifact.signature, placement=Placement("cpu", threads=1)) as session:
        found = session.run_in_stages(given, cold=False)
        assert isinstance(session, StagedSession)
        assert min(found.upload_ms, found.compute_ms, found.download_ms) > 0
        assert session.run(given)["y"].shape == (2, 5, 32)


def test_sessions_on_the_host_have_no_stages(small_bundle, opened):
    with small_bundle.open_session() as session:
        assert not isinstance(session, StagedSession)
    assert isinstance(opened(make_plan())[0], StagedSession)


def test_a_routed_session_has_the_stages_of_the_route_that_answers(opened):
    (short, one), (long, other) = opened(make_plan()), opened(make_plan())
    session = RoutedSession(short, long, up_to_length=8)
    assert isinstance(session, StagedSession)
    for length, ran in ((8, one), (9, other)):
        idle = other if ran is one else one
        before = idle.now_ms
        assert session.run_in_stages(feeds(2, length), cold=True) == Stages(2.0, 5.0, 2.0)
        assert idle.now_ms == before
    assert (one.now_ms, other.now_ms) == (39.0, 39.0)
    with pytest.raises(FeedError, match="got inputs mask; expected mask, x"):
        session.run_in_stages({"mask": np.ones((2, 5), bool)}, cold=False)


def test_a_session_of_which_a_route_is_on_the_host_has_no_stages(small_bundle, opened):
    staged, host = opened(make_plan())[0], small_bundle.open_session
    for short, long in ((host(), staged), (staged, host()), (host(), host())):
        assert not isinstance(RoutedSession(short, long, up_to_length=8), StagedSession)


def test_a_padded_view_has_the_stages_of_all_the_runs_that_its_batch_takes(opened):
    """Two lengths that go apart: of each run its own copies and computing, of the first an empty cache."""
    spec = small_spec()
    signature = graph_signature(spec)
    ranges = {dim.name: (dim.min, dim.max) for dim in signature.dims}
    engine, memory = opened(FakePlan(signature, (ranges,), lambda given: {"y": given["x"]}))
    view = PaddedView(PackedSession(engine, spec, cost=RunCost(0.0, 1.0, 1.0)))
    assert isinstance(view, StagedSession)
    given = {"x": np.ones((2, 20, 32), np.float32), "mask": np.arange(20) < [[20], [3]]}
    uploads = len(signature.inputs)
    assert view.run_in_stages(given, cold=True) == Stages(2.0 * uploads, 2 * 5.0, 2 * 2.0)
    assert memory.now_ms == 2 * (uploads + 5 + 2) + 30
    host = FakeSession(signature, lambda given: {"y": given["x"]})
    assert not isinstance(PaddedView(PackedSession(host, spec)), StagedSession)


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize("backend", MODULES)
def test_an_engine_is_timed_on_a_gpu(small_bundle, tmp_path, backend, cuda_graphs):
    given = {"x": np.ones((2, 5, 32), np.float32), "mask": np.ones((2, 5), bool)}
    with open_engine(small_bundle, backend, tmp_path, cuda_graphs=cuda_graphs) as session:
        for cold in (False, True, True):
            found = session.run_in_stages(given, cold=cold)
            assert min(found.upload_ms, found.compute_ms, found.download_ms) > 0


@pytest.mark.gpu
def test_the_cuda_provider_is_timed_on_a_gpu(small_bundle):
    given = {"x": np.ones((2, 5, 32), np.float32), "mask": np.ones((2, 5), bool)}
    with small_bundle.open_session(placement=Placement("cuda")) as session:
        for cold in (False, True):
            assert session.run_in_stages(given, cold=cold).compute_ms > 0
