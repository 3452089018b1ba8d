"""ONNX Runtime with I/O binding, over host memory, and how strictly CUDA is asked for."""

from __future__ import annotations

import json

import numpy as np
import onnxruntime
import pytest

from mha_deploy.errors import GraphError, MissingError
from mha_deploy.sessions import Placement, onnx_runtime
from mha_deploy.sessions.onnx_runtime_cuda import SHAPES_KEPT, OnnxRuntimeCudaSession

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"


@pytest.fixture
def session(small_bundle):
    artifact = small_bundle.artifact()
    path = artifact.path(small_bundle.folder)
    with OnnxRuntimeCudaSession(path, artifact.signature, placement=Placement("cpu", threads=1)) as opened:
        yield opened


@pytest.fixture
def cuda_build(monkeypatch):
    """An onnxruntime that says it has CUDA, as a build for it does whatever the machine."""
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, CPU])


def feeds(batch=2, seq=5, seed=0):
    x = np.random.default_rng((seed, batch, seq)).standard_normal((batch, seq, 32), dtype=np.float32)
    return {"x": x, "mask": np.ones((batch, seq), bool)}


def test_bound_tensors_give_the_answers_of_plain_runs(session, small_bundle):
    with small_bundle.open_session(placement=Placement(threads=1)) as plain:
        for shape in ((2, 5), (6, 64), (2, 5), (1, 1)):
            for seed in range(2):
                given = feeds(*shape, seed)
                np.testing.assert_array_equal(session.run(given)["y"], plain.run(given)["y"])


def test_tensors_are_kept_for_their_shapes_and_the_longest_unused_go_first(session):
    session.run(feeds(2, 1))
    first = session._bound(feeds(2, 1))
    for seq in range(2, SHAPES_KEPT + 1):
        session.run(feeds(2, seq))
    assert session._bound(feeds(2, 1, seed=1)) is first
    session.run(feeds(2, SHAPES_KEPT + 1))
    assert len(session._recent) == SHAPES_KEPT
    assert session._bound(feeds(2, 1)) is first
    assert ((2, 2, 32), (2, 2)) not in session._recent


def test_graphs_are_numbered_from_1_for_the_first_shapes_and_the_others_run_without(session):
    session._cuda_graphs = True  # the CPU takes the option and has no graphs
    for seq in range(1, SHAPES_KEPT + 3):
        session.run(feeds(2, seq))
    ids = [
        session._bound(feeds(2, seq)).options.get_run_config_entry("gpu_graph_id")
        for seq in range(1, SHAPES_KEPT + 3)
    ]
    assert ids == [*map(str, range(1, SHAPES_KEPT + 1)), "-1", "-1"]


def test_a_run_that_fails_is_one_line(session, monkeypatch):
    def fail(*_):
        raise RuntimeError("\nCUDA failure 700: an illegal memory access\n1 more")

    monkeypatch.setattr(session._session, "run_with_iobinding", fail)
    with pytest.raises(GraphError, match=r"failed to run 'onnx': CUDA failure 700: an illegal mem\D+$"):
        session.run(feeds())


@pytest.mark.usefixtures("cuda_build")
def test_a_cuda_build_without_a_driver_is_missing_the_driver(small_bundle, monkeypatch):
    monkeypatch.setattr(onnx_runtime, "has_cuda_driver", lambda: False)
    with pytest.raises(MissingError, match="was asked for, but no NVIDIA driver with a GPU") as caught:
        small_bundle.open_session(placement=Placement("cuda"))
    assert caught.value.exit_code == 3


@pytest.mark.usefixtures("cuda_build")
@pytest.mark.filterwarnings("ignore:Specified provider 'CUDAExecutionProvider':UserWarning")
def test_a_session_that_fell_back_without_a_word_is_noticed(small_bundle, monkeypatch):
    monkeypatch.setattr(onnx_runtime, "has_cuda_driver", lambda: True)
    with pytest.raises(MissingError, match=f"{CUDA} was asked for, but ONNX Runtime fell back to {CPU}"):
        small_bundle.open_session(placement=Placement("cuda"))
    with small_bundle.open_session(placement=Placement("cuda", fallback="cpu")) as session:
        assert session.provider == CPU


@pytest.mark.usefixtures("cuda_build")
def test_a_device_that_fails_is_missing_and_may_fall_back(small_bundle, monkeypatch):
    real = onnxruntime.InferenceSession
    asked = []

    def fail_on_cuda(path, options, *, providers, **more):
        asked.append(providers)
        if providers[0] == CPU:
            return real(path, options, providers=providers)
        raise RuntimeError("CUDA failure 35: CUDA driver version is insufficient ; GPU=-1")

    monkeypatch.setattr(onnxruntime, "InferenceSession", fail_on_cuda)
    monkeypatch.setattr(onnx_runtime, "has_cuda_driver", lambda: True)
    with pytest.raises(MissingError, match="was asked for, but CUDA failure 35: CUDA driver version"):
        small_bundle.open_session(placement=Placement("cuda"))
    assert asked == [[(CUDA, {"use_tf32": "0", "enable_cuda_graph": "0"}), CPU]]
    with small_bundle.open_session(placement=Placement("cuda", fallback="cpu")) as session:
        assert session.provider == CPU
    anywhere = Placement("cuda", fallback="cpu")
    artifact = small_bundle.artifact()
    path = artifact.path(small_bundle.folder)
    with onnx_runtime.OnnxRuntimeSession(path, artifact.signature, placement=anywhere) as session:
        assert session.provider == CPU


@pytest.mark.usefixtures("cuda_build")
def test_a_bound_session_profiles_its_nodes_and_captures_no_graphs_then(small_bundle, tmp_path, monkeypatch):
    real, asked = onnxruntime.InferenceSession, []

    def on_the_host(path, options, *, providers, **_):
        asked.append(providers[0])
        return real(path, options, providers=[CPU])

    monkeypatch.setattr(onnxruntime, "InferenceSession", on_the_host)
    monkeypatch.setattr(onnx_runtime, "has_cuda_driver", lambda: True)
    artifact = small_bundle.artifact()
    path, anywhere = artifact.path(small_bundle.folder), Placement("cuda", threads=1, fallback="cpu")
    options = {"placement": anywhere, "cuda_graphs": True, "profile_into": str(tmp_path)}
    with OnnxRuntimeCudaSession(path, artifact.signature, **options) as session:
        session.run(feeds(2, 5))
    assert asked == [(CUDA, {"use_tf32": "0", "enable_cuda_graph": "0"})]
    (trace,) = tmp_path.iterdir()
    assert any(event["name"].endswith("_kernel_time") for event in json.loads(trace.read_text()))


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_cuda_gives_the_answers_of_the_cpu_in_any_order_of_shapes(small_bundle, cuda_graphs):
    artifact = small_bundle.artifact()
    path = artifact.path(small_bundle.folder)
    with (
        small_bundle.open_session() as plain,
        OnnxRuntimeCudaSession(path, artifact.signature, cuda_graphs=cuda_graphs) as session,
    ):
        assert session.provider == CUDA
        for shape in ((6, 64), (2, 5), (6, 64), (2, 5), (2, 5)):
            given = feeds(*shape, seed=1)
            np.testing.assert_allclose(session.run(given)["y"], plain.run(given)["y"], rtol=1e-5, atol=1e-5)
