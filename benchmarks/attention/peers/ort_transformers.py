"""onnxruntime.transformers' optimizer on the default export, in ONNX Runtime."""

from __future__ import annotations

from onnxruntime.transformers import optimizer
from peers.ort import exported, opset, served
from peers.task import Model, Task

PACKAGES = ("torch", "onnx", "onnxscript", "onnxruntime", "numpy")


def build(task: Task) -> Model:
    program, plain = exported(task), task.folder / "exported.onnx"
    program.save(plain)
    path = task.folder / "model.onnx"
    optimised = optimizer.optimize_model(
        str(plain), model_type="bert", num_heads=task.num_heads, hidden_size=task.d_model
    )
    optimised.save_model_to_file(str(path))
    found = {name: count for name, count in optimised.get_fused_operator_statistics().items() if count}
    fused = ", ".join(f"{name} x{count}" for name, count in found.items()) or "none"
    return served(path, task, (opset(program), f"fused operators: {fused}"))
