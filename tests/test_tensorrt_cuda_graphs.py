"""CUDA graphs of TensorRT sessions, over a fake engine that dies when a graph outlives its context."""

from __future__ import annotations

import pytest
from engine_sessions import THREE, feeds, make_plan, right
from fake_tensorrt import CudaGraphStrategy, DynamicShapesKernelSpecializationStrategy

from mha_deploy.sessions.engine import EngineError
from mha_deploy.sessions.tensorrt import GRAPHS_KEPT


def test_a_graph_is_captured_on_the_second_run_of_a_shape_and_replayed_from_then_on(opened):
    plan = make_plan()
    session, memory = opened(plan, cuda_graphs=True)
    for run in range(1, 5):
        right(session, feeds(2, 5, seed=run))
        assert (memory.captured, memory.replayed) == (int(run > 1), run - 1)
    assert plan.calls.count("execute_async_v3") == 2


def test_graphs_of_shapes_and_profiles_that_take_turns_stay_right(opened):
    session, memory = opened(make_plan(*THREE), cuda_graphs=True, poison=True)
    shapes = ((2, 5), (1, 64), (8, 64), (2, 6))
    for run in range(3):
        for shape in shapes:
            right(session, feeds(*shape, seed=run))
    assert (memory.captured, memory.replayed) == (4, 8)


def test_only_so_many_graphs_are_kept_and_the_longest_unused_goes_first(opened):
    plan = make_plan()
    session, memory = opened(plan, cuda_graphs=True)
    for seq in range(1, GRAPHS_KEPT + 1):
        right(session, feeds(2, seq))
    right(session, feeds(2, 1, seed=1))
    right(session, feeds(2, GRAPHS_KEPT + 1))
    assert len(plan.contexts) == GRAPHS_KEPT
    right(session, feeds(2, 1, seed=2))
    assert (memory.captured, memory.replayed) == (1, 2)
    right(session, feeds(2, 2, seed=1))
    assert plan.calls.count("create_execution_context") == GRAPHS_KEPT + 2


@pytest.mark.parametrize(("wanted", "strategy"), [(True, "WHOLE_GRAPH_CAPTURE"), (False, "DISABLED")])
def test_a_library_that_captures_itself_is_told_to_and_left_to_it(opened, wanted, strategy):
    plan = make_plan()
    session, memory = opened(plan, rtx=True, cuda_graphs=wanted)
    for shape in ((2, 5), (2, 5), (3, 6)):
        right(session, feeds(*shape))
    (config,) = plan.configs
    assert config.cuda_graph_strategy is CudaGraphStrategy[strategy]
    assert memory.captured == 0
    # One kernel a shape from its first run on, so that the same request has the same bits.
    eager = DynamicShapesKernelSpecializationStrategy.EAGER
    assert config.dynamic_shapes_kernel_specialization_strategy is eager


def test_a_graph_setting_that_the_library_ignores_is_an_error(opened):
    session, _ = opened(make_plan(refuses={"cuda_graph_strategy"}), rtx=True, cuda_graphs=True)
    with pytest.raises(EngineError, match="did not take the CUDA graph strategy"):
        session.run(feeds())
