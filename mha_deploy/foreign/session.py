"""A foreign file in ONNX Runtime, behind the inputs and the one output that a judge knows."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mha_deploy.errors import FrozenAxisError
from mha_deploy.foreign.onnx_file import ForeignFile
from mha_deploy.precision import Precision
from mha_deploy.sessions import Placement
from mha_deploy.sessions.onnx_runtime import OnnxRuntimeSession
from mha_deploy.signature import Array, Feeds, Signature, Sizes, TensorSpec

Translate = Callable[[Feeds], dict[str, Array]]


def through_twin(file: ForeignFile, placement: Placement) -> bool:
    """ONNX Runtime computes no bf16 on a CPU; there the file's fp32 twin runs."""
    return file.precision is Precision.BF16 and placement.device == "cpu"


def twin_note(file: ForeignFile, placement: Placement) -> tuple[str, ...]:
    """What cannot be checked through a twin."""
    said = "how a GPU orders bf16 sums: ONNX Runtime computes no bf16 on a CPU, so an fp32 twin ran"
    return (said,) if through_twin(file, placement) else ()


def in_fp32(tensor: TensorSpec) -> TensorSpec:
    """An input of a bf16 file as its twin takes it."""
    return replace(tensor, dtype="float32") if tensor.dtype == "bfloat16" else tensor


@contextlib.contextmanager
def runnable(file: ForeignFile, placement: Placement) -> Iterator[Path]:
    """The file, or its twin."""
    if not through_twin(file, placement):
        yield file.path
        return
    from mha_deploy.twin import write_twin

    with tempfile.TemporaryDirectory() as folder:
        twin = Path(folder) / "twin.onnx"
        write_twin(file.path, twin)
        yield twin


@dataclass(frozen=True, slots=True)
class Foreign:
    """A file, and how to run it behind feeds of `signature`.

    `translate` makes the file's own inputs of them; in fp32 where the file's are in bf16 and `twin`
    is true. `output` is the one to compare.
    """

    file: ForeignFile
    signature: Signature
    output: str
    translate: Callable[..., Translate]
    placement: Placement

    def open(self, runs: Path, *, output: str = "") -> FileSession:
        """A session over `runs`: what `runnable` gave, or a copy of that with more outputs, one named.

        Raises: as OnnxRuntimeSession.
        """
        return FileSession(self, runs, output)


class FileSession(OnnxRuntimeSession):
    """Takes feeds of the signature and answers `y`: the file's output as [batch, rows, features].

    Axes between the first and the last are folded into rows.
    """

    def __init__(self, foreign: Foreign, runs: Path, output: str) -> None:
        file = foreign.file
        super().__init__(
            runs,
            foreign.signature,
            name=file.path.name,
            precision=file.precision,
            placement=foreign.placement,
        )
        self._outputs = [output or foreign.output]
        self._shaped = bool(foreign.signature.outputs) and not output
        self._translate = foreign.translate(twin=through_twin(file, foreign.placement))

    def _execute(self, feeds: Feeds) -> dict[str, Array]:
        (answer,) = super()._execute(self._translate(feeds)).values()
        return {"y": as_rows(answer)}

    def _check_outputs(self, outputs: dict[str, Array], sizes: Sizes) -> None:
        """Against the signature where it says anything; a judge compares shapes with the reference's."""
        if self._shaped:
            super()._check_outputs(outputs, sizes)


def as_rows(answer: Array) -> Array:
    """[batch, rows, features] of an array of any rank; a vector or a number is one row.

    Raises:
        FrozenAxisError: the array is empty.
    """
    if not answer.size:
        raise FrozenAxisError(f"the output is empty, of shape {list(answer.shape)}")
    if answer.dtype.kind not in "fV":
        answer = answer.astype(np.float32)
    if answer.ndim < 2:
        return answer.reshape(1, 1, -1)
    return answer.reshape(answer.shape[0], -1, answer.shape[-1])
