"""Copies and computing of a run on a device, timed apart."""

from __future__ import annotations

import numpy as np
import pytest
from engine_sessions import feeds, make_plan, right
from gpu_engines import MODULES, open_engine

from mha_deploy.sessions import Placement
from mha_deploy.sessions.onnx_runtime_cuda import OnnxRuntimeCudaSession
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
