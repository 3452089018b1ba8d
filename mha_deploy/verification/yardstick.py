"""The reference's own answers: the truth in fp64, and what PyTorch scatters around it at a precision.

Each is computed once, however many artifacts are judged by it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from mha_deploy.cases import Case
from mha_deploy.precision import Precision
from mha_deploy.sessions import Session
from mha_deploy.signature import Array, Feeds
from mha_deploy.verification.metrics import Errors, independent_rows, root_mean_square

if TYPE_CHECKING:
    from mha_deploy.attention import MultiHeadAttention

PERTURBED_RUNS = 8


@dataclass(frozen=True, slots=True)
class Truth:
    """The fp64 answer [draws x batch, query, d_model] of a case, its draws one after the other.

    `rows` marks what is compared, `largest` and `features` [d_model] are the greatest and the root
    mean square truth there.
    """

    y: Array
    rows: Array
    finite: bool
    largest: float
    features: Array


@dataclass(frozen=True, slots=True)
class Yardstick:
    """The worst of ten PyTorch runs at one precision: largest error, relative error, and the root
    mean square error of each feature [d_model]. `independent_rows` is how many rows that is the mean
    of: rows that are alike repeat one error, and a few that are ill-conditioned outweigh the rest.
    """

    max_abs: float
    relative: float
    features: Array
    independent_rows: float


class Reference(Protocol):
    """What is right, at a precision, by one of several paths to the same numbers: "fused", "spelled-out"
    and, where no input can be moved, "moved-0" and on, with weights moved by up to one eps instead."""

    def open(self, path: str, precision: Precision) -> Session:
        """A session that takes fp32 inputs and answers `y` [batch, rows, features] in fp64."""


class Block:
    """The reference of our own attention blocks."""

    def __init__(self, module: MultiHeadAttention) -> None:
        self._module = module

    def open(self, path: str, precision: Precision) -> Session:
        from mha_deploy.sessions.reference import ReferenceSession

        self._module.path = path
        return ReferenceSession(self._module, precision)


def as_reference(reference: MultiHeadAttention | Reference) -> Reference:
    from mha_deploy.attention import MultiHeadAttention

    return Block(reference) if isinstance(reference, MultiHeadAttention) else reference


class References:
    """One reference's answers in every precision; it is converted once for each."""

    def __init__(self, reference: MultiHeadAttention | Reference) -> None:
        self._reference = as_reference(reference)
        self._sessions: dict[tuple[str, Precision], Session] = {}
        self._truths: dict[Case, Truth] = {}
        self._yardsticks: dict[tuple[Case, Precision], Yardstick] = {}

    def truth(self, case: Case) -> Truth:
        if case not in self._truths:
            y = np.concatenate([self.run("fused", Precision.FP64, feeds) for _, feeds in case.draws])
            rows = np.concatenate([case.reference_compared] * len(case.draws))
            right = y[rows]
            finite = bool(np.isfinite(right).all())
            largest = float(np.abs(right).max(initial=0.0))
            self._truths[case] = Truth(y, rows, finite, largest, root_mean_square(right))
        return self._truths[case]

    def yardstick(self, case: Case, precision: Precision) -> Yardstick:
        key = (case, precision)
        if key not in self._yardsticks:
            truth = self.truth(case)
            kinds = zip(*(self._runs(precision, feeds) for _, feeds in case.draws), strict=True)
            found, independent = [], np.inf
            for kind in kinds:
                answer = np.concatenate(kind)
                found.append(Errors.of(answer, truth.y, truth.rows))
                independent = min(independent, independent_rows((answer - truth.y)[truth.rows]))
            self._yardsticks[key] = Yardstick(
                max(each.max_abs for each in found),
                max(each.relative for each in found),
                np.max([each.features for each in found], axis=0),
                independent,
            )
        return self._yardsticks[key]

    def in_range(self, precision: Precision, feeds: Feeds) -> bool:
        """Whether PyTorch at `precision` answers with finite numbers, however it computes."""
        with np.errstate(over="ignore"):
            return all(
                bool(np.isfinite(self.run(path, precision, feeds)).all()) for path in ("fused", "spelled-out")
            )

    def run(self, path: str, precision: Precision, feeds: Feeds) -> Array:
        """The module's answer in fp64, computed by `path` at `precision`."""
        key = (path, precision)
        if key not in self._sessions:
            self._sessions[key] = self._reference.open(path, precision)
        return self._sessions[key].run(feeds)["y"]

    def _runs(self, precision: Precision, feeds: Feeds) -> Iterator[Array]:
        """Fused, spelled out, and eight runs with inputs moved by up to one eps, as a runtime's
        other order of operations would. One run alone is chaotic once the softmax saturates. Where all
        that could be moved is 0, which stays where it is, the weights are instead."""
        yield self.run("fused", precision, feeds)
        yield self.run("spelled-out", precision, feeds)
        if not any(array.dtype.kind == "f" and array.any() for array in feeds.values()):
            yield from (self.run(f"moved-{n}", precision, feeds) for n in range(PERTURBED_RUNS))
            return
        random = np.random.default_rng(0)
        for _ in range(PERTURBED_RUNS):
            moved = {
                name: array if array.dtype.kind != "f" else _moved(array, precision.eps, random)
                for name, array in feeds.items()
            }
            yield self.run("fused", precision, moved)


def _moved(array: Array, eps: float, random: np.random.Generator) -> Array:
    """Every number moved by up to one eps of itself, but for one that would not be finite then."""
    moved = (array * (1 + eps * random.uniform(-1, 1, array.shape))).astype(array.dtype)
    return np.where(np.isfinite(moved), moved, array)
