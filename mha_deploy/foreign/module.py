"""A PyTorch module out of a Python file that the user names, as the reference of a verification.

The file's code runs in this process, with this process's rights: only because it was named.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from mha_deploy.errors import InputError
from mha_deploy.foreign.session import as_rows
from mha_deploy.precision import Precision
from mha_deploy.sessions import Session
from mha_deploy.sessions.onnx_runtime import one_line
from mha_deploy.sessions.reference import MOVED, move_weights
from mha_deploy.signature import Array, Feeds, Signature


def load_module(reference: str) -> nn.Module:
    """The module that `factory()` of "file.py:factory" returns, in evaluation mode.

    Raises:
        InputError: no such file or factory, or what it does fails or returns no torch.nn.Module.
    """
    file, _, factory = reference.rpartition(":")
    path = Path(file)
    if not file or not factory or not path.is_file():
        raise InputError(
            f"--reference {reference!r}; expected a Python file and a function in it, as file.py:factory"
        )
    spec = importlib.util.spec_from_file_location(f"mha_deploy_reference_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise InputError(f"--reference {reference!r}: {path.name} is no Python file")
    loaded = importlib.util.module_from_spec(spec)
    with _beside(path):
        try:
            spec.loader.exec_module(loaded)
            made = getattr(loaded, factory)()
        except Exception as error:  # whatever the user's own code raises
            raise InputError(
                f"--reference {reference!r} failed: {type(error).__name__}: {one_line(error)}"
            ) from error
    if not isinstance(made, nn.Module):
        raise InputError(
            f"--reference {reference!r} returned a {type(made).__name__}; expected a torch.nn.Module"
        )
    return made.eval()


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[None]:
    """Imports as `python file.py` would find them."""
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)


class ModuleReference:
    """A judge's reference over any module: `signature` has the inputs of its forward, in order.

    `position` is that of the output to compare among the tensors that forward returns.
    """

    def __init__(self, module: nn.Module, signature: Signature, position: int) -> None:
        self._module, self._signature, self._position = module, signature, position

    def open(self, path: str, precision: Precision) -> Session:
        return _ModuleSession(self._module, self._signature, self._position, path, precision)


class _ModuleSession(Session):
    """Takes fp32 inputs, computes in `precision`, answers `y` [batch, rows, features] in fp64."""

    def __init__(
        self, module: nn.Module, signature: Signature, position: int, path: str, precision: Precision
    ) -> None:
        super().__init__(f"torch {precision.value} {path}", signature, precision, "torch cpu")
        self._dtype: torch.dtype = getattr(torch, precision.dtype_name)
        self._spelled_out, self._position = path == "spelled-out", position
        try:
            self._module = copy.deepcopy(module).to(self._dtype).eval()
            if path.startswith(MOVED):
                move_weights(self._module, precision, int(path.removeprefix(MOVED)))
        except Exception as error:  # of the user's own module
            raise InputError(
                f"the reference module cannot be converted to {precision.value}: {one_line(error)}"
            ) from error

    def _execute(self, feeds: Feeds) -> dict[str, Array]:
        tensors = [self._tensor(feeds[tensor.name]) for tensor in self.signature.inputs]
        try:
            with torch.inference_mode(), _paths(spelled_out=self._spelled_out):
                answers = list(_tensors(self._module(*tensors)))
        except Exception as error:  # as above
            given = ", ".join(f"{n} {list(a.shape)} {a.dtype.name}" for n, a in feeds.items())
            raise InputError(
                f"the reference module does not run in {self.precision.value} on {given}: {one_line(error)}"
            ) from error
        if len(answers) <= self._position:
            raise InputError(
                f"the reference module returns {len(answers)} tensors; output number {self._position + 1} of "
                "the file has no counterpart, name another with --output-name"
            )
        return {"y": as_rows(answers[self._position].to(torch.float64).numpy())}

    def _tensor(self, array: Array) -> torch.Tensor:
        tensor = torch.from_numpy(np.array(array))
        if not tensor.is_floating_point():
            return tensor
        masked = tensor == torch.finfo(tensor.dtype).min  # which a cast to fp16 would make -inf
        lowest = max(torch.finfo(tensor.dtype).min, torch.finfo(self._dtype).min)
        return tensor.to(self._dtype).masked_fill(masked, lowest)

    def _check_outputs(self, outputs: dict[str, Array], sizes: Mapping[str, int]) -> None:
        """Whatever shape the reference answers with is right."""


@contextlib.contextmanager
def _paths(*, spelled_out: bool) -> Iterator[None]:
    """Attention fused as PyTorch likes, or by its plain formula, without the encoder's fast path."""
    if not spelled_out:
        yield
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel

    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _tensors(answer: Any) -> Iterator[torch.Tensor]:
    """The tensors of what a forward returns, in order: one, a tuple or a mapping (Hugging Face's)."""
    if isinstance(answer, torch.Tensor):
        yield answer
    elif isinstance(answer, Mapping):
        for each in answer.values():
            yield from _tensors(each)
    elif isinstance(answer, tuple | list):
        for each in answer:
            yield from _tensors(each)
