"""PyTorch as it comes, in inference mode."""

from __future__ import annotations

from collections.abc import Callable

import torch
from peers.block import load_block
from peers.task import Array, Model, Task

PACKAGES = ("torch", "numpy")


def build(task: Task) -> Model:
    module = load_block(task)

    def bind(x: Array, mask: Array) -> Callable[[], torch.Tensor]:
        inputs = torch.from_numpy(x), torch.from_numpy(mask)

        def run() -> torch.Tensor:
            with torch.inference_mode():
                return module(*inputs)

        return run

    return Model(bind)
