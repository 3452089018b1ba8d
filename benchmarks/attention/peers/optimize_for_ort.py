"""onnxscript's `optimize_for_ort` on the default export, in ONNX Runtime."""

from __future__ import annotations

from collections import Counter

import onnx_ir
from onnxscript.rewriter.ort_fusions import optimize_for_ort
from peers.ort import exported, opset, served
from peers.task import Model, Task

PACKAGES = ("torch", "onnx", "onnxscript", "onnxruntime", "numpy")


def build(task: Task) -> Model:
    program, path = exported(task), task.folder / "model.onnx"
    model, _ = optimize_for_ort(program.model)
    onnx_ir.save(model, path)
    counted = Counter(node.op_type for node in model.graph if node.domain)
    fused = ", ".join(f"{name} x{count}" for name, count in sorted(counted.items())) or "none"
    return served(path, task, (opset(program), f"contrib operators after fusion: {fused}"))
