"""OpenVINO, converting the PyTorch module itself, fp32, for latency."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openvino
from peers.block import example, load_block
from peers.task import Array, Model, Task

PACKAGES = ("openvino", "torch", "numpy")


def build(task: Task) -> Model:
    core = openvino.Core()
    x, mask = example(task)
    shapes = [("x", [-1, -1, task.d_model]), ("mask", [-1, -1])]
    converted = openvino.convert_model(load_block(task), example_input={"x": x, "mask": mask}, input=shapes)
    settings = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": task.threads,
        "INFERENCE_PRECISION_HINT": "f32",
    }
    compiled = core.compile_model(converted, "CPU", settings)

    def bind(x: Array, mask: Array) -> Callable[[], Any]:
        # A request of its own, since the reused one of `compiled` hands out views of the last answer.
        request, inputs = compiled.create_infer_request(), {0: x, 1: mask}
        return lambda: request.infer(inputs, share_inputs=True)[0]

    return Model(bind, ("converted from the PyTorch module",))
