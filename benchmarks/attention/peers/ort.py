"""PyTorch's export and ONNX Runtime's session, for the peers that stand on both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from peers.block import example, load_block
from peers.task import Array, Model, Task


def exported(task: Task) -> torch.onnx.ONNXProgram:
    """`torch.onnx.export` at its default opset, batch and seq dynamic."""
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("seq")}
    program = torch.onnx.export(
        load_block(task),
        example(task),
        input_names=["x", "mask"],
        output_names=["y"],
        dynamic_shapes={"x": axes, "mask": axes},
        dynamo=True,
        verbose=False,
    )
    assert program is not None
    return program


def served(path: Path, task: Task, notes: tuple[str, ...] = ()) -> Model:
    """A session over the file, with ONNX Runtime's default options and this many threads."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = task.threads
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def bind(x: Array, mask: Array) -> Callable[[], Any]:
        feeds = {"x": x, "mask": mask}
        return lambda: session.run(None, feeds)[0]

    return Model(bind, notes)


def opset(program: torch.onnx.ONNXProgram) -> str:
    return f"opset {program.model.opset_imports['']}"
