"""torch.compile, once for each shape: static shapes are its fastest, and the first run does not count."""

from __future__ import annotations

from collections.abc import Callable

import torch
from peers.block import load_block
from peers.task import Array, Model, Task

PACKAGES = ("torch", "numpy")


def build(task: Task) -> Model:
    module = load_block(task)
    # Every shape of a size stays compiled while others are timed.
    torch._dynamo.config.recompile_limit = 64
    torch.compiler.reset()
    compiled = torch.compile(module, dynamic=False)

    def bind(x: Array, mask: Array) -> Callable[[], torch.Tensor]:
        inputs = torch.from_numpy(x), torch.from_numpy(mask)

        def run() -> torch.Tensor:
            with torch.inference_mode():
                return compiled(*inputs)

        return run

    return Model(bind, ("compiled for each shape by itself (dynamic=False)",))
