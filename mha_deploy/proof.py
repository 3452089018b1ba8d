"""Two graphs that should mean the same, run side by side in ONNX Runtime.

For graphs with no reference module: a lowered ONNX file against the one it came from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mha_deploy.errors import CheckError, GraphError
from mha_deploy.precision import numpy_dtype
from mha_deploy.sessions.onnx_runtime import import_onnxruntime, one_line
from mha_deploy.signature import Array, TensorSpec

RUNS = 8
FLOAT_EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}


@dataclass(frozen=True, slots=True)
class Proof:
    """`proved` False means that one of the two could not be run, and `note` says why."""

    proved: bool
    note: str


def prove_same(
    original: Path, lowered: Path, inputs: Sequence[TensorSpec], sizes: Sequence[Mapping[str, int]]
) -> Proof:
    """Run both on random inputs at `sizes` and compare every output.

    Allowed is 2 x what the original itself scatters when its inputs move by one eps (eight runs),
    plus 2 eps of the largest output. Boolean inputs are mostly True; whole rows may be False.

    Raises:
        CheckError: they differ.
        GraphError: the lowered graph does not run.
    """
    try:
        before = _Runner(original)
        first = [before.run(_inputs(inputs, size, 0)) for size in sizes]
    except GraphError as error:
        return Proof(False, f"ONNX Runtime cannot run the original, so nothing was compared: {error}")
    after = _Runner(lowered)
    worst = 0.0
    for size, expected in zip(sizes, first, strict=True):
        feeds = _inputs(inputs, size, 0)
        answers = after.run(feeds)
        moved = [before.run(_moved(feeds, seed)) for seed in range(RUNS)]
        for name, right in expected.items():
            worst = max(worst, _compare(name, size, answers[name], right, [each[name] for each in moved]))
    return Proof(True, f"equal to the original in ONNX Runtime, largest difference {worst:.2g}")


def _compare(name: str, size: Mapping[str, int], answer: Array, right: Array, moved: list[Array]) -> float:
    if answer.shape != right.shape:
        raise CheckError(f"lowered output {name!r} has shape {answer.shape}, the original {right.shape}")
    if right.dtype.kind not in "fV":
        return float(not np.array_equal(answer, right))
    exact, ours = right.astype(np.float64), answer.astype(np.float64)
    compared = np.isfinite(exact)  # a fully masked row may be NaN in the original and is 0 in ours
    error = float(np.abs(ours - exact)[compared].max(initial=0.0))
    scatter = max(float(np.abs(each.astype(np.float64) - exact)[compared].max(initial=0.0)) for each in moved)
    allowed = 2 * scatter + 2 * FLOAT_EPS[right.dtype.name] * float(np.abs(exact[compared]).max(initial=0.0))
    if not np.isfinite(ours).all() or error > allowed:
        raise CheckError(
            f"the lowered graph differs from the original at {dict(size)} in {name!r}: {error:.3g}, "
            f"allowed {allowed:.3g}; this is a fault of the lowering, please report it"
        )
    return error


class _Runner:
    def __init__(self, path: Path) -> None:
        onnxruntime = import_onnxruntime()
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        try:
            self._session = onnxruntime.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # its exceptions share no public base class
            raise GraphError(one_line(error)) from error
        self._names = [output.name for output in self._session.get_outputs()]

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        try:
            values = self._session.run(self._names, dict(feeds))
        except Exception as error:  # as above
            raise GraphError(one_line(error)) from error
        return dict(zip(self._names, values, strict=True))


def _inputs(inputs: Sequence[TensorSpec], sizes: Mapping[str, int], seed: int) -> dict[str, Array]:
    random = np.random.default_rng(seed)
    feeds: dict[str, Array] = {}
    for tensor in inputs:
        shape = tuple(sizes[axis] if isinstance(axis, str) else axis for axis in tensor.shape)
        if tensor.is_float:
            feeds[tensor.name] = random.standard_normal(shape).astype(numpy_dtype(tensor.dtype))
        elif tensor.dtype == "bool":
            feeds[tensor.name] = random.random(shape) < 0.7
        else:
            feeds[tensor.name] = np.ones(shape, numpy_dtype(tensor.dtype))
    return feeds


def _moved(feeds: Mapping[str, Array], seed: int) -> dict[str, Array]:
    random = np.random.default_rng(seed)
    return {
        name: array
        if array.dtype.name not in FLOAT_EPS
        else (array * (1 + FLOAT_EPS[array.dtype.name] * random.uniform(-1, 1, array.shape))).astype(
            array.dtype
        )
        for name, array in feeds.items()
    }
