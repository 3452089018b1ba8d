"""The session contract, over every runtime there is, a fake one included."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from conftest import small_spec
from fake_tensorrt import FakePlan, HostMemory
from gpu_engines import open_engine

from mha_deploy.attention import MultiHeadAttention
from mha_deploy.errors import FeedError, FrozenAxisError, GraphError, MissingError, SessionError
from mha_deploy.machine import cpu_features, version
from mha_deploy.precision import Precision
from mha_deploy.sessions import Placement, RoutedSession, open_session, openvino
from mha_deploy.sessions.fake import FakeSession
from mha_deploy.sessions.onnx_runtime import OnnxRuntimeSession
from mha_deploy.sessions.onnx_runtime_cuda import OnnxRuntimeCudaSession
from mha_deploy.sessions.openvino import OpenVinoSession
from mha_deploy.sessions.reference import ReferenceSession
from mha_deploy.sessions.tensorrt import TensorRtSession
from mha_deploy.sessions.torch_module import TorchSession

SIGNATURE = small_spec().signature
with_openvino = pytest.mark.skipif(not version("openvino"), reason="needs openvino")
with_bf16 = pytest.mark.skipif(
    not {"avx512_bf16", "amx_bf16"} & set(cpu_features()), reason="needs a CPU that computes in bf16"
)
ON_A_GPU = ("tensorrt", "tensorrt-rtx", "onnxruntime-cuda")
RUNTIMES = [
    *("fake", "torch-fp64", "torch-fp32", "torch-fp16", "torch-bf16", "onnxruntime"),
    *("onnxruntime-bound", "onnxruntime-not-spinning", "tensorrt-fake", "tensorrt-fake-graphs"),
    *("torch-eager", "routed"),
    pytest.param("openvino-fp32", marks=with_openvino),
    pytest.param("openvino-bf16", marks=[with_openvino, with_bf16]),
    *(pytest.param(name, marks=pytest.mark.gpu) for name in ON_A_GPU),
]


def open_runtime(runtime, bundle, folder):
    artifact = bundle.artifact()
    path, signature = artifact.path(bundle.folder), artifact.signature
    kind, _, rest = runtime.partition("-")
    openers = {
        "fake": lambda: FakeSession(SIGNATURE, lambda feeds: {"y": feeds["x"]}),
        "torch-eager": lambda: TorchSession(bundle.reference(), placement=Placement(threads=1)),
        "torch": lambda: ReferenceSession(bundle.reference(), Precision(rest)),
        "routed": lambda: open_routed(bundle, folder),
        "openvino": lambda: OpenVinoSession(path, signature, precision=Precision(rest)),
        "onnxruntime": bundle.open_session,
        "onnxruntime-not-spinning": lambda: OnnxRuntimeSession(path, signature, spinning=False),
        # The code is the same, only the memory is not.
        "onnxruntime-bound": lambda: OnnxRuntimeCudaSession(path, signature, placement=Placement("cpu")),
        "onnxruntime-cuda": lambda: OnnxRuntimeCudaSession(path, signature, placement=Placement("cuda")),
        "tensorrt-fake": lambda: open_fake_engine(folder),
        "tensorrt-fake-graphs": lambda: open_fake_engine(folder, cuda_graphs=True),
        "tensorrt": lambda: open_engine(bundle, runtime, folder),
    }
    return openers.get(runtime, openers[kind])()


def open_routed(bundle, folder):
    short, long = (open_runtime(each, bundle, folder) for each in ("onnxruntime", "torch-eager"))
    return RoutedSession(short, long, up_to_length=4)


def open_fake_engine(folder, **options):
    (folder / "model.plan").write_bytes(b"a plan")
    ranges = {dim.name: (dim.min, dim.max) for dim in SIGNATURE.dims}
    plan = FakePlan(SIGNATURE, (ranges,), lambda feeds: {"y": feeds["x"] * feeds["mask"][..., None]})
    return TensorRtSession(
        folder / "model.plan", SIGNATURE, backend=plan.backend(), memory=HostMemory, **options
    )


@pytest.fixture(params=RUNTIMES)
def session(request, small_bundle, tmp_path):
    with open_runtime(request.param, small_bundle, tmp_path) as opened:
        yield opened


def feeds(batch=2, seq=5):
    x = np.random.default_rng(batch * 100 + seq).standard_normal((batch, seq, 32), dtype=np.float32)
    return {"x": x, "mask": np.ones((batch, seq), bool)}


def test_outputs_have_the_names_shapes_and_dtypes_of_the_signature(session):
    outputs = session.run(feeds())
    assert {name: (a.shape, a.dtype.name) for name, a in outputs.items()} == {
        "y": ((2, 5, 32), session.signature.outputs[0].dtype)
    }


def test_an_answer_belongs_to_the_caller_and_a_later_run_does_not_touch_it(session):
    first = session.run(feeds())["y"]
    kept = first.copy()
    session.run({name: np.zeros_like(array) for name, array in feeds().items()})
    np.testing.assert_array_equal(first, kept)
    first += 1
    np.testing.assert_array_equal(session.run(feeds())["y"], kept)


def test_inputs_are_left_as_they_were(session):
    given = feeds()
    before = {name: array.copy() for name, array in given.items()}
    session.run(given)
    assert all(np.array_equal(given[name], before[name]) for name in given)


def test_a_large_run_leaves_nothing_in_a_small_one(session):
    alone = session.run(feeds(1, 3))["y"]
    session.run(feeds(6, 64))
    after = session.run(feeds(1, 3))["y"]
    assert after.shape == (1, 3, 32)
    np.testing.assert_array_equal(after, alone)


def test_read_only_and_strided_inputs_run(session):
    given = feeds()
    given["x"].setflags(write=False)
    wide = np.zeros((2, 10), bool)
    wide[:, ::2] = True
    np.testing.assert_array_equal(
        session.run({**given, "mask": wide[:, ::2]})["y"], session.run(feeds())["y"]
    )


def test_run_after_close_is_refused_and_closing_twice_is_not(session):
    session.close()
    session.close()
    with pytest.raises(SessionError, match="is closed; open a new one"):
        session.run(feeds())


def test_a_second_thread_is_refused(session):
    session.run(feeds())
    caught = []

    def run():
        try:
            session.run(feeds())
        except SessionError as error:
            caught.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert "belongs to another thread; open one per thread" in caught[0]


def on_another_thread(session, given):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(session.run, given).result()["y"]


SHARED = {
    "onnxruntime": lambda bundle: bundle.open_session(placement=Placement(threads=1)),
    "routed": lambda bundle: RoutedSession(*map(SHARED["onnxruntime"], [bundle] * 2), up_to_length=4),
}


@pytest.mark.parametrize("kind", SHARED)
def test_a_session_for_another_thread_answers_bit_for_bit_and_outlives_the_first(small_bundle, kind):
    with SHARED[kind](small_bundle) as first:
        right = first.run(feeds())["y"]
        another = first.for_another_thread()
    with another:
        np.testing.assert_array_equal(on_another_thread(another, feeds()), right)
        with pytest.raises(SessionError, match="belongs to another thread"):
            another.run(feeds())
    for of_a_closed_one in (lambda: first.run(feeds()), first.for_another_thread):
        with pytest.raises(SessionError, match="is closed"):
            of_a_closed_one()


def test_two_threads_at_once_over_one_set_of_weights_answer_as_one_alone(small_bundle):
    sizes = [(1, 3), (2, 64), (6, 17), (1, 64)]
    with SHARED["onnxruntime"](small_bundle) as first, first.for_another_thread() as second:
        with SHARED["onnxruntime"](small_bundle) as alone:
            right = [alone.run(feeds(*size))["y"] for size in sizes]
        begin = threading.Barrier(2)

        def runs(session):
            begin.wait()
            return [session.run(feeds(*size))["y"] for size in sizes * 50]

        with ThreadPoolExecutor(2) as pool:
            both = list(pool.map(runs, (first, second)))
    for answers in both:
        for answer, expected in zip(answers, right * 50, strict=True):
            np.testing.assert_array_equal(answer, expected)


def test_what_has_threads_or_memory_of_its_own_is_opened_for_each_thread(small_bundle, tmp_path):
    for kind in ("onnxruntime", "onnxruntime-bound", "torch-eager", "tensorrt-fake", "routed"):
        with open_runtime(kind, small_bundle, tmp_path) as session:
            assert session.for_another_thread() is None, kind


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"x": np.zeros((2, 65, 32), np.float32), "mask": np.ones((2, 65), bool)},
            r"seq = 65; .* takes seq 1\.\.64",
        ),
        (
            {"x": np.zeros((2, 5, 31), np.float32)},
            r"shape \[2, 5, 31\]; expected x \[batch, seq, 32\] float32",
        ),
        ({"x": np.zeros((2, 5, 32))}, "dtype float64; expected x .* float32"),
        ({"mask": np.ones((2, 6), bool)}, r"shape \[2, 6\], so seq = 6, but an earlier input has seq = 5"),
        ({"mask": np.ones((2, 5), np.int64)}, "dtype int64; expected mask .*True = keep"),
        ({"extra": np.zeros(1)}, "got inputs extra, mask, x; expected mask, x"),
    ],
)
def test_feeds_that_do_not_meet_the_signature_are_refused_before_the_runtime(session, change, message):
    with pytest.raises(FeedError, match=message):
        session.run({**feeds(), **change})


def test_an_answer_of_another_shape_than_the_signature_says_is_an_error():
    fake = FakeSession(SIGNATURE, lambda feeds: {"y": feeds["x"][:1]})
    with pytest.raises(FrozenAxisError, match=r"'y' with shape \[1, 5, 32\]; expected \[2, 5, 32\]"):
        fake.run(feeds())


def test_cuda_on_a_machine_without_it_is_an_error_that_names_both_providers(small_bundle):
    with pytest.raises(
        MissingError, match=r"CUDAExecutionProvider was asked for, but .*CPUExecutionProvider"
    ) as caught:
        small_bundle.open_session(placement=Placement("cuda"))
    assert caught.value.exit_code == 3


def test_an_allowed_fallback_runs_and_shows_what_runs(small_bundle):
    with small_bundle.open_session(placement=Placement("cuda", fallback="cpu")) as session:
        assert session.provider == "CPUExecutionProvider"
        assert session.run(feeds())["y"].shape == (2, 5, 32)


def test_onnxruntime_uses_the_threads_it_is_given(small_bundle):
    with small_bundle.open_session(placement=Placement(threads=1)) as session:
        assert session._session.get_session_options().intra_op_num_threads == 1


def test_an_unknown_device_is_refused():
    with pytest.raises(SessionError, match=r"device 'tpu'.* expected a device of cpu, cuda"):
        Placement("tpu")


def test_a_file_that_onnxruntime_cannot_load_is_one_line(tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(b"garbage")
    with pytest.raises(GraphError, match=r"ONNX Runtime cannot load .*model\.onnx: .+") as caught:
        OnnxRuntimeSession(path, SIGNATURE)
    assert "\n" not in str(caught.value)


def test_an_artifact_of_an_unknown_runtime_is_refused(small_bundle):
    from dataclasses import replace

    with pytest.raises(SessionError, match="needs runtime 'abacus'"):
        open_session(small_bundle.folder, replace(small_bundle.artifact(), runtime="abacus"), Placement())


def test_the_reference_goes_through_a_large_batch_in_parts_with_the_same_answer(small_bundle, monkeypatch):
    module = small_bundle.reference()
    assert isinstance(module, MultiHeadAttention)
    whole = ReferenceSession(module, Precision.FP64).run(feeds(6, 9))["y"]
    monkeypatch.setattr("mha_deploy.sessions.reference.SCORES_AT_ONCE", 4 * 9 * 9)
    parts = ReferenceSession(module, Precision.FP64).run(feeds(6, 9))["y"]
    np.testing.assert_allclose(parts, whole, rtol=0, atol=1e-14)


def test_a_routed_session_goes_by_length_whatever_the_batch_and_says_who_runs():
    short = FakeSession(SIGNATURE, lambda feeds: {"y": feeds["x"]})
    long = FakeSession(SIGNATURE, lambda feeds: {"y": -feeds["x"]}, precision=Precision.BF16)
    with RoutedSession(short, long, up_to_length=8) as session:
        for batch in (1, 6):
            for seq, sign in ((1, 1), (8, 1), (9, -1)):
                given = feeds(batch, seq)
                np.testing.assert_array_equal(session.run(given)["y"], sign * given["x"])
        assert session.precision is Precision.BF16
        assert session.provider == "fake up to length 8, fake beyond"
    with pytest.raises(SessionError, match="is closed"):
        long.run(feeds())


def test_openvino_refuses_a_precision_that_it_would_not_compute_in(small_bundle):
    artifact = small_bundle.artifact()
    with pytest.raises(MissingError, match="runs the block in fp32 or bf16 here, and fp16 was asked for"):
        OpenVinoSession(artifact.path(small_bundle.folder), artifact.signature, precision=Precision.FP16)


@with_openvino
def test_openvino_in_fp32_is_not_bf16(small_bundle):
    artifact = small_bundle.artifact()
    truth = ReferenceSession(small_bundle.reference(), Precision.FP64).run(feeds())["y"]
    with OpenVinoSession(artifact.path(small_bundle.folder), artifact.signature) as session:
        assert np.abs(session.run(feeds())["y"] - truth).max() < 1e-5
        assert session.provider == "OpenVINO CPU fp32"


def cores_by_thread():
    """The cores that each thread of this process may run on, by the kernel's id."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended
            found[task.name] = os.sched_getaffinity(int(task.name))
    return found


@with_openvino
@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs Linux")
def test_openvino_keeps_its_threads_on_no_core_of_its_choice(small_bundle):
    artifact, runs, done = small_bundle.artifact(), threading.Event(), threading.Event()
    everywhere, before = os.sched_getaffinity(0), cores_by_thread()

    def run():
        path, placement = artifact.path(small_bundle.folder), Placement(threads=1)
        with OpenVinoSession(path, artifact.signature, placement=placement) as session:
            while not done.is_set():
                session.run(feeds(4, 64))
                runs.set()

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)
        try:
            assert runs.wait(20)  # to compile it takes threads of its own
            for _ in range(300):
                time.sleep(0.001)
                new = {task: cores for task, cores in cores_by_thread().items() if task not in before}
                assert new
                assert set(map(frozenset, new.values())) == {frozenset(everywhere)}
        finally:
            done.set()
        running.result()


class PluginThatPicksBf16:
    """Stands for OpenVINO's core, its compiled model and a property: it takes the hint as a hint."""

    def get_property(self, *names):
        return ["FP32", "BF16"] if len(names) == 2 else self

    def compile_model(self, *_):
        return self

    def get_type_name(self):
        return "bf16"


@with_openvino
def test_openvino_that_takes_another_precision_than_asked_for_is_an_error(monkeypatch):
    monkeypatch.setattr(openvino, "_core", PluginThatPicksBf16)
    with pytest.raises(MissingError, match="OpenVINO was asked for fp32 and took bf16"):
        OpenVinoSession(Path("model.onnx"), SIGNATURE)


@with_openvino
def test_a_bf16_that_the_cpu_lacks_is_an_error_and_not_fp32(small_bundle, monkeypatch):
    artifact = small_bundle.artifact()
    monkeypatch.setitem(openvino.HINTS, Precision.BF16, ("bf16", "NO SUCH CAPABILITY"))
    with pytest.raises(MissingError, match="this CPU does not compute in bf16"):
        OpenVinoSession(artifact.path(small_bundle.folder), artifact.signature, precision=Precision.BF16)


@with_openvino
def test_a_file_that_openvino_cannot_load_is_one_line(tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(b"garbage")
    with pytest.raises(GraphError, match=r"OpenVINO cannot load .*model\.onnx: .+") as caught:
        OpenVinoSession(path, SIGNATURE)
    assert "\n" not in str(caught.value)


def test_openvino_that_is_not_installed_is_named_with_what_brings_it(monkeypatch):
    monkeypatch.setattr(openvino, "version", lambda _: "")
    with pytest.raises(MissingError, match=r"openvino is not installed; .*mha-deploy\[openvino\]"):
        OpenVinoSession(Path("model.onnx"), SIGNATURE)


def test_torch_compile_without_a_compiler_is_named_with_what_brings_it(small_bundle, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(MissingError, match=r"torch.compile needs a C\+\+ compiler .*apt install g\+\+"):
        TorchSession(small_bundle.reference(), compiled=True)


def test_an_artifact_s_own_settings_go_before_the_placement(small_bundle):
    from dataclasses import replace

    details = {"settings": {"threads": 1, "spinning": False}}
    artifact = replace(small_bundle.artifact(), details=details)
    with open_session(small_bundle.folder, artifact, Placement(threads=2)) as session:
        options = session._session.get_session_options()
        assert options.intra_op_num_threads == 1
        assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"
