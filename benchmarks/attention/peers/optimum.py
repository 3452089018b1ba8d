"""Optimum-ONNX: its exporter, its optimizer at level O2, its model class over ONNX Runtime.

The block goes in as a model of type "bert", which is what its optimizer's attention fusion is for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnxruntime
import torch
from optimum.exporters.onnx import OnnxConfig, export
from optimum.onnxruntime import AutoOptimizationConfig, ORTModelForCustomTasks, ORTOptimizer
from optimum.utils import NormalizedTextConfig
from peers.block import SelfAttention, example, load_block
from peers.task import Array, Model, Task
from transformers import BertConfig, PreTrainedModel

PACKAGES = ("optimum-onnx", "optimum", "transformers", "torch", "onnx", "onnxruntime", "numpy")
AXES = {0: "batch", 1: "seq"}


class BlockModel(PreTrainedModel):
    """The block in the form that the exporter takes."""

    config_class = BertConfig

    def __init__(self, config: BertConfig, block: SelfAttention) -> None:
        super().__init__(config)
        self.block = block

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": self.block(x, mask)}


class BlockOnnxConfig(OnnxConfig):
    """Its inputs and outputs."""

    NORMALIZED_CONFIG_CLASS = NormalizedTextConfig
    task_of_block: Task

    @property
    def inputs(self) -> dict[str, dict[int, str]]:
        return {"x": AXES, "mask": AXES}

    @property
    def outputs(self) -> dict[str, dict[int, str]]:
        return {"y": AXES}

    def generate_dummy_inputs(self, framework: str = "pt", **_: Any) -> dict[str, torch.Tensor]:
        assert framework == "pt"
        x, mask = example(self.task_of_block)
        return {"x": x, "mask": mask}


def build(task: Task) -> Model:
    settings = BertConfig(hidden_size=task.d_model, num_attention_heads=task.num_heads, num_hidden_layers=1)
    model = BlockModel(settings, load_block(task))
    config = BlockOnnxConfig(settings, task="feature-extraction")
    config.task_of_block = task
    plain = task.folder / "exported"
    plain.mkdir(exist_ok=True)
    export(model, config, plain / "model.onnx")
    settings.save_pretrained(plain)
    optimizer = ORTOptimizer.from_pretrained(plain)
    folder = optimizer.optimize(AutoOptimizationConfig.O2(), task.folder / "optimized")
    fused = ORTOptimizer.get_fused_operators(str(folder / "model_optimized.onnx"))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = task.threads
    served = ORTModelForCustomTasks.from_pretrained(
        folder, file_name="model_optimized.onnx", session_options=options
    )

    def bind(x: Array, mask: Array) -> Callable[[], Any]:
        return lambda: served(x=x, mask=mask)["y"]

    named = ", ".join(f"{name} x{count}" for name, count in fused.items()) or "none"
    return Model(bind, (f"opset {config.DEFAULT_ONNX_OPSET}", f"fused operators: {named}"))
