"""`torch.onnx.export` at its default opset, in ONNX Runtime."""

from __future__ import annotations

from peers.ort import exported, opset, served
from peers.task import Model, Task

PACKAGES = ("torch", "onnx", "onnxscript", "onnxruntime", "numpy")


def build(task: Task) -> Model:
    program, path = exported(task), task.folder / "model.onnx"
    program.save(path)
    return served(path, task, (opset(program),))
