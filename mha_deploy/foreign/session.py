"""A foreign file in ONNX Runtime, behind the inputs and the one output that a judge knows."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from mha_deploy.errors import FrozenAxisError
from mha_deploy.foreign.onnx_file import ForeignFile
from mha_deploy.precision import Precision
from mha_deploy.sessions import Placement
from mha_deploy.sessions.onnx_runtime import OnnxRuntimeSession
from mha_deploy.signature import Array, Feeds, Signature, Sizes

Translate = Callable[[Feeds], dict[str, Array]]


class FileSession(OnnxRuntimeSession):
    """Takes feeds of `signature`, gives the file what `translate` makes of them, answers `y`.

    `y` is the file's output `output` as [batch, rows, features]: axes between the first and the last
    are folded into rows.

    Raises: as OnnxRuntimeSession.
    """

    def __init__(
        self,
        path: Path,
        file: ForeignFile,
        signature: Signature,
        *,
        translate: Translate,
        output: str,
        placement: Placement,
    ) -> None:
        super().__init__(path, signature, name=file.path.name, precision=file.precision, placement=placement)
        self._outputs, self._translate = [output], translate

    def _execute(self, feeds: Feeds) -> dict[str, Array]:
        (answer,) = super()._execute(self._translate(feeds)).values()
        return {"y": as_rows(answer)}

    def _check_outputs(self, outputs: dict[str, Array], sizes: Sizes) -> None:
        """Against the signature where it says anything; a judge compares shapes with the reference's."""
        if self.signature.outputs:
            super()._check_outputs(outputs, sizes)


@contextlib.contextmanager
def runnable(file: ForeignFile, placement: Placement) -> Iterator[tuple[Path, str]]:
    """The file to run, and what to say of it: bf16 goes through its fp32 twin on a CPU."""
    if file.precision is not Precision.BF16 or placement.device != "cpu":
        yield file.path, ""
        return
    from mha_deploy.twin import write_twin

    with tempfile.TemporaryDirectory() as folder:
        twin = Path(folder) / "twin.onnx"
        write_twin(file.path, twin)
        yield twin, "how a GPU orders bf16 sums: ONNX Runtime computes no bf16 on a CPU, so an fp32 twin ran"


def as_rows(answer: Array) -> Array:
    """[batch, rows, features] of an array of any rank; a vector or a number is one row."""
    if answer.dtype.kind not in "fV":
        answer = answer.astype(np.float32)
    if answer.ndim < 2:
        return answer.reshape(1, 1, -1)
    return answer.reshape(answer.shape[0], -1, answer.shape[-1]) if answer.size else _empty(answer)


def _empty(answer: Array) -> Array:
    raise FrozenAxisError(f"the output is empty, of shape {list(answer.shape)}")
