"""What an engine says where it cannot run, that the calls are the real library's, and runs on a GPU."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import fake_tensorrt
import numpy as np
import pytest
import torch
from fake_tensorrt import (
    CudaGraphStrategy,
    DataType,
    DynamicShapesKernelSpecializationStrategy,
    HostMemory,
    TensorIOMode,
)
from gpu_engines import open_engine, write_plan

from mha_deploy.errors import MissingError
from mha_deploy.file_record import FileRecord
from mha_deploy.precision import Precision
from mha_deploy.sessions import Placement, memory, open_session
from mha_deploy.sessions.engine import EngineError
from mha_deploy.sessions.reference import ReferenceSession
from mha_deploy.sessions.tensorrt import TensorRtSession
from mha_deploy.tensorrt import backend

BACKENDS = pytest.mark.parametrize("name", ["tensorrt", "tensorrt-rtx"])


@pytest.fixture
def no_driver(monkeypatch):
    for module in (memory, backend):
        monkeypatch.setattr(module, "has_cuda_driver", lambda: False)


@BACKENDS
@pytest.mark.usefixtures("no_driver")
def test_without_a_gpu_opening_an_engine_says_so_and_exits_3(small_bundle, tmp_path, name):
    (tmp_path / "model.plan").write_bytes(b"a plan")
    engine = replace(
        small_bundle.artifact(),
        name="fp16",
        runtime=name,
        files=(FileRecord.of(tmp_path, "model.plan"),),
        details={"passport": {"command": "mha-deploy build-engine BUNDLE --fp16"}},
    )
    with pytest.raises(MissingError, match="runs on an NVIDIA GPU, and no NVIDIA driver with") as caught:
        open_session(tmp_path, engine, Placement())
    assert caught.value.exit_code == 3


def test_without_cuda_in_torch_opening_an_engine_says_so_before_the_plan_is_read(
    small_bundle, tmp_path, monkeypatch
):
    monkeypatch.setattr(memory, "has_cuda_driver", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    signature = small_bundle.artifact().signature
    with pytest.raises(MissingError, match=rf"PyTorch {torch.__version__.split('+')[0]}.* reaches no GPU"):
        TensorRtSession(tmp_path / "none.plan", signature, backend="tensorrt-rtx")


@pytest.mark.usefixtures("no_driver")
def test_without_the_package_opening_an_engine_says_so_before_the_plan_is_read(
    small_bundle, tmp_path, monkeypatch
):
    monkeypatch.setitem(backend._MODULES, "tensorrt-rtx", "tensorrt_of_nowhere")
    backend._load.cache_clear()
    signature = small_bundle.artifact().signature
    with pytest.raises(MissingError, match=r"package tensorrt_of_nowhere cannot be imported.*mha-deploy\["):
        TensorRtSession(tmp_path / "none.plan", signature, backend="tensorrt-rtx", memory=HostMemory)
    backend._load.cache_clear()


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (lambda plan: plan, MissingError, "this needs an NVIDIA GPU with its driver, and none answers here"),
        (lambda plan: plan[:1000], EngineError, r"it said: .*plan\.header\.size"),
        (lambda plan: b"garbage" + plan, EngineError, "it said: .*incompatible serialization version"),
        (lambda _: b"", EngineError, "it said: .*empty memory buffer"),
    ],
    ids=["whole", "cut short", "garbage", "empty"],
)
def test_a_plan_that_the_real_library_does_not_load_is_an_error(small_bundle, tmp_path, change, error, said):
    if backend.has_cuda_driver():
        pytest.skip("a driver answers here, so that the whole plan may load")
    path = write_plan(small_bundle, "tensorrt-rtx", tmp_path / "model.plan")
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(error, match=said) as caught:
        TensorRtSession(
            path,
            small_bundle.artifact().signature,
            backend="tensorrt-rtx",
            memory=HostMemory,
            rebuild="mha-deploy build-engine B --fp16",
        )
    assert "build it again with: mha-deploy build-engine B --fp16" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["Engine", "Context", "Runtime", "RuntimeConfig"])
def test_the_fake_has_no_method_that_the_real_library_has_not(name):
    real = pytest.importorskip("tensorrt_rtx")
    names = {"Engine": "ICudaEngine", "Context": "IExecutionContext", "RuntimeConfig": "IRuntimeConfig"}
    fake = {method for method in vars(getattr(fake_tensorrt, f"Fake{name}")) if method[0] != "_"}
    assert fake
    assert fake - set(dir(getattr(real, names.get(name, name)))) == set()


def test_the_values_that_sessions_name_are_the_real_library_s():
    real = pytest.importorskip("tensorrt_rtx")
    for enum in (DataType, TensorIOMode, CudaGraphStrategy, DynamicShapesKernelSpecializationStrategy):
        assert {member.name for member in enum} <= set(getattr(real, enum.__name__).__members__)


def test_memory_over_torch_copies_and_fills_what_it_is_told():
    buffer = memory._TorchBuffer(host_torch(), SimpleNamespace(device="cuda:0"), 8)
    buffer.host[:] = range(8)
    buffer.upload(8)
    buffer.host[:] = 0
    buffer.download(3)
    assert list(buffer.host) == [0, 1, 2, 0, 0, 0, 0, 0]
    buffer.fill(memory.POISON)
    buffer.download(8)
    assert list(buffer.host) == [255] * 8
    assert buffer.address == buffer._device.data_ptr() != buffer._host.data_ptr()


def host_torch():
    """torch, with its CUDA device and its page-locked memory on the host."""

    def empty(size, *, dtype, device="cpu", pin_memory=False):
        assert (str(device) == "cuda:0") != pin_memory
        return torch.empty(size, dtype=dtype)

    cuda = SimpleNamespace(stream=lambda _: nullcontext())
    return SimpleNamespace(uint8=torch.uint8, empty=empty, cuda=cuda)


def test_what_sessions_call_of_torch_on_cuda_is_there():
    assert {"stream", "capture_error_mode"} <= set(inspect.signature(torch.cuda.graph).parameters)
    assert hasattr(torch.cuda.Stream, "synchronize")
    assert hasattr(torch.cuda.CUDAGraph, "replay")


def feeds(batch, seq, seed=0):
    random = np.random.default_rng((seed, batch, seq))
    x = random.standard_normal((batch, seq, 32), dtype=np.float32)
    return {"x": x, "mask": random.random((batch, seq)) < 0.7}


@pytest.mark.gpu
@BACKENDS
@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_an_engine_gives_the_answers_of_the_reference_in_any_order_of_shapes(
    small_bundle, tmp_path, name, cuda_graphs
):
    truth = ReferenceSession(small_bundle.reference(), Precision.FP64)
    profiles = ("batch=1:2:6,seq=1:8:64", "batch=1:1:1,seq=1:8:64")
    options = {"cuda_graphs": cuda_graphs, "poison": True, "precision": Precision.FP32}
    with open_engine(small_bundle, name, tmp_path, *profiles, **options) as session:
        for run in range(4):
            for shape in ((6, 64), (2, 5), (1, 5), (1, 64)):
                given = feeds(*shape, seed=run)
                np.testing.assert_allclose(
                    session.run(given)["y"], truth.run(given)["y"], rtol=1e-5, atol=1e-5
                )
