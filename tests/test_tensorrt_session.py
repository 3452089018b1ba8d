"""TensorRT sessions, all of their logic, over a fake engine that reads and writes real memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from conftest import small_spec
from engine_sessions import SIGNATURE, THREE, double, feeds, make_plan, right
from fake_tensorrt import FakeContext, HostMemory

from mha_deploy.errors import FeedError, FrozenAxisError
from mha_deploy.precision import Precision
from mha_deploy.sessions.engine import EngineError


def test_32_rows_and_then_5_show_nothing_of_the_first(opened):
    session, memory = opened(make_plan())
    right(session, feeds(32, 9))
    given = feeds(5, 9)
    answer = session.run(given)["y"]
    np.testing.assert_array_equal(answer, double(given)["y"])
    # What could have been shown is there: the device still holds rows 5 to 31 of the first run.
    device = memory.buffers[-1].device[: 32 * 9 * 32 * 4].view(np.float32).reshape(32, 9, 32)
    np.testing.assert_array_equal(device[5:], double(feeds(32, 9))["y"][5:])
    assert answer.base is None


def test_memory_is_taken_once_for_the_largest_shapes_of_any_profile(opened):
    session, memory = opened(make_plan(*THREE))
    for shape in ((1, 1), (8, 64), (32, 8)):
        right(session, feeds(*shape))
    x, mask, y = (buffer.size for buffer in memory.buffers)
    assert (x, mask, y) == (8 * 64 * 32 * 4, 8 * 64, 8 * 64 * 32 * 4)


@pytest.mark.parametrize(
    ("shape", "profile"), [((1, 64), 2), ((1, 5), 2), ((2, 5), 1), ((2, 3), 0), ((8, 9), 0), ((9, 8), 1)]
)
def test_a_request_takes_the_smallest_profile_that_covers_it(opened, shape, profile):
    session, _ = opened(make_plan(*THREE))
    assert session._engine.profile_for({"x": (*shape, 32), "mask": shape}).index == profile
    right(session, feeds(*shape))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((9, 9), r"covers batch = 9 \(takes 1\.\.8\) in the nearest of its 3; .*--profile"),
        ((32, 64), r"covers batch = 32 \(takes 1\.\.8\) in the nearest of its 3"),
    ],
)
def test_a_request_that_no_profile_covers_names_the_axis_and_is_not_run(opened, shape, message):
    plan = make_plan(*THREE)
    session, _ = opened(plan)
    with pytest.raises(FeedError, match=message):
        session.run(feeds(*shape))
    assert "execute_async_v3" not in plan.calls


def test_the_steps_of_a_run_come_in_their_order_and_only_when_needed(opened):
    plan = make_plan()
    session, _ = opened(plan)
    session.run(feeds(2, 5))
    shapes_and_addresses = ["set_input_shape"] * 2 + ["infer_shapes"] + ["set_tensor_address"] * 3
    assert plan.calls == [
        "deserialize_cuda_engine",
        "create_execution_context",
        "set_optimization_profile_async",
        *shapes_and_addresses,
        "execute_async_v3",
    ]
    plan.calls.clear()
    session.run(feeds(2, 5, seed=1))
    assert plan.calls == ["execute_async_v3"]
    plan.calls.clear()
    session.run(feeds(3, 5))
    assert plan.calls == [*shapes_and_addresses, "execute_async_v3"]


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("create_execution_context", "made no execution context"),
        ("set_optimization_profile_async", "refused profile 0"),
        (
            "set_input_shape",
            r"shape \[2, 5, 32\] for input 'x'\. TensorRT said: .*x has no such shape",
        ),
        ("infer_shapes", "cannot tell the shapes of x, mask"),
        ("set_tensor_address", "refused the address of 'x'"),
        ("execute_async_v3", "refused to run"),
    ],
)
def test_what_tensorrt_refuses_is_one_line_and_the_next_run_starts_afresh(opened, method, message):
    plan = make_plan()
    session, _ = opened(plan)
    plan.refuses.add(method)
    with pytest.raises(EngineError, match=message) as caught:
        session.run(feeds(2, 5))
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    assert "engine 'engine' failed on x [2, 5, 32], mask [2, 5]" in str(caught.value)
    plan.refuses.clear()
    plan.calls.clear()
    right(session, feeds(2, 5))
    assert plan.calls[0] == "create_execution_context"


def test_a_run_that_was_interrupted_leaves_nothing_half_prepared(opened, monkeypatch):
    session, _ = opened(make_plan())
    right(session, feeds(2, 5))

    def interrupt(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(FakeContext, "infer_shapes", interrupt)
        with pytest.raises(KeyboardInterrupt):
            session.run(feeds(3, 5))
    right(session, feeds(2, 5, seed=1))


def test_an_error_of_the_device_is_an_error_of_the_engine(opened, monkeypatch):
    session, memory = opened(make_plan())
    right(session, feeds())

    def fail():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(memory, "synchronize", fail)
    with pytest.raises(EngineError, match=r"failed on .*: CUDA error: an illegal memory access"):
        session.run(feeds())


def test_too_little_memory_is_an_error_of_the_engine_and_leaves_nothing_loaded(opened, monkeypatch):
    def fail(self, size):
        raise RuntimeError("CUDA out of memory. Tried to allocate 65536 bytes\nmore")

    monkeypatch.setattr(HostMemory, "allocate", fail)
    plan = make_plan()
    with pytest.raises(EngineError, match=r"526336 bytes for its .*: CUDA out of memory.*smaller --"):
        opened(plan)
    assert plan.ended == ["engine", "runtime"]


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.FP16, Precision.BF16])
def test_poisoned_memory_shows_what_the_engine_left_unwritten(opened, precision):
    signature = SIGNATURE.at(precision)
    plan = make_plan(signature=signature)
    given = feeds(4, 5, dtype=precision.dtype_name)
    for poison in (True, False):
        session, _ = opened(plan, poison=poison, precision=precision)
        plan.writes = lambda rows: rows
        session.run(given)
        plan.writes = lambda rows: rows - 1
        answer = session.run({**given, "x": given["x"] + given["x"].dtype.type(1)})["y"].astype(np.float32)
        unwritten = answer[3]
        assert np.isnan(unwritten).all() if poison else np.array_equal(unwritten, double(given)["y"][3])
        assert not np.isnan(answer[:3]).any()


def test_poisoned_memory_shows_what_the_engine_reads_beyond_its_inputs(opened):
    session, memory = opened(make_plan(), poison=True)
    right(session, feeds(32, 9))
    right(session, feeds(5, 9))
    beyond = memory.buffers[0].device[5 * 9 * 32 * 4 : memory.buffers[0].size]
    assert np.isnan(beyond.view(np.float32)).all()


@pytest.mark.parametrize("precision", [Precision.FP16, Precision.BF16])
def test_sixteen_bit_inputs_and_outputs_pass_unchanged(opened, precision):
    signature = SIGNATURE.at(precision)
    session, _ = opened(make_plan(signature=signature), precision=precision)
    given = feeds(3, 7, dtype=precision.dtype_name)
    answer = session.run(given)["y"]
    assert answer.dtype.name == precision.dtype_name
    np.testing.assert_array_equal(
        answer.view(np.uint16), double(given)["y"].astype(answer.dtype).view(np.uint16)
    )


def test_an_output_too_large_for_its_memory_is_refused_before_the_run(opened):
    plan = make_plan(answers=lambda _: (33, 64, 32))
    session, _ = opened(plan)
    with pytest.raises(FrozenAxisError, match=r"would answer 'y' with shape \[33, 64, 32\]"):
        session.run(feeds())
    assert "execute_async_v3" not in plan.calls


def test_an_output_of_another_shape_is_never_taken_for_the_right_one(opened):
    session, _ = opened(make_plan(answers=lambda shape: (1, *shape[1:])))
    with pytest.raises(FrozenAxisError, match=r"'y' with shape \[1, 5, 32\]; expected \[2, 5, 32\]"):
        session.run(feeds())


def test_a_plan_that_does_not_deserialise_says_what_tensorrt_said_and_how_to_rebuild(opened, tmp_path):
    with pytest.raises(EngineError, match=r"model\.plan: it said: .*a plan is not comp") as caught:
        opened(make_plan(refuses={"deserialize_cuda_engine"}))
    assert str(caught.value).endswith("build it again with: mha-deploy build-engine")


@pytest.mark.parametrize(
    "other",
    [
        SIGNATURE.at(Precision.FP16),
        replace(SIGNATURE, inputs=SIGNATURE.inputs[:1]),
        replace(SIGNATURE, inputs=SIGNATURE.outputs, outputs=SIGNATURE.inputs),
        small_spec(d_model=64, dims=SIGNATURE.dims).signature,
    ],
)
def test_a_plan_with_other_tensors_is_refused(opened, other):
    with pytest.raises(
        EngineError, match=r"has tensors .*; expected x \[batch, seq, 32\] float32.*again with"
    ):
        opened(make_plan(signature=other), SIGNATURE)


def test_contexts_end_before_their_engine_and_that_before_its_runtime(opened):
    plan = make_plan()
    session, _ = opened(plan)
    right(session, feeds())
    assert plan.ended == []
    session.close()
    assert plan.ended == ["context", "engine", "runtime"]


def test_what_runs_is_named_by_library_and_device(opened):
    session, _ = opened(make_plan(), rtx=True)
    assert session.provider == "tensorrt-rtx 0 on a GPU that is none"
