"""PyTorch as a user would otherwise keep it, eager or compiled: what other runtimes are held against."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from mha_deploy.attention import MultiHeadAttention
from mha_deploy.errors import GraphError, MissingError
from mha_deploy.machine import lacks_cxx_compiler, usable_cpus
from mha_deploy.precision import Precision
from mha_deploy.sessions.base import Session
from mha_deploy.sessions.placement import DEFAULT_PLACEMENT, Placement
from mha_deploy.signature import Array, Feeds


class TorchSession(Session):
    """The reference module in fp32 on the CPU. `compiled` runs it through torch.compile, all sizes dynamic.

    The number of threads is the process's in PyTorch; each run sets it.

    Raises:
        MissingError: torch.compile is asked for, and there is no C++ compiler.
    """

    def __init__(
        self, module: MultiHeadAttention, *, compiled: bool = False, placement: Placement = DEFAULT_PLACEMENT
    ) -> None:
        lacking = lacks_cxx_compiler() if compiled else ""
        if lacking:
            raise MissingError(lacking)
        self._run: Any = torch.compile(module.eval(), dynamic=True) if compiled else module.eval()
        self._threads = placement.threads or usable_cpus()
        name = "torch-compile" if compiled else "torch-eager"
        super().__init__(name, module.spec.signature, Precision.FP32, f"{name.replace('-', ' ')} cpu")

    def _execute(self, feeds: Feeds) -> dict[str, Array]:
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        with torch.inference_mode(), warnings.catch_warnings():
            # Of read-only arrays, which nobody writes to, and of what the compiler itself imports.
            warnings.simplefilter("ignore")
            tensors = [torch.from_numpy(feeds[tensor.name]) for tensor in self.signature.inputs]
            try:
                y: torch.Tensor = self._run(*tensors)
            except RuntimeError as error:
                raise GraphError(f"PyTorch failed to run {self.name!r}: {_one_line(error)}") from error
        return {"y": y.numpy()}

    def _release(self) -> None:
        self._run = None


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
