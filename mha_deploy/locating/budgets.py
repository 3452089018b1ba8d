"""What every value inside a graph may be off by: the rule of verification, value by value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mha_deploy.locating.exposed import ExposedGraph
from mha_deploy.locating.inputs import is_float
from mha_deploy.precision import Precision
from mha_deploy.signature import Array, Feeds
from mha_deploy.verification.metrics import relative_error
from mha_deploy.verification.report import YARDSTICK_FACTOR

MOVED_RUNS = 8


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far a value is off, what it may be, where it is worst, and what else is wrong with it."""

    error: float
    allowed: float
    worst: tuple[int, ...] = ()
    how: str = ""

    @property
    def held(self) -> bool:
        return not self.how and self.error <= self.allowed


@dataclass(slots=True)
class Budget:
    """One value's. `truth` is it in fp64; `yardstick` the worst error of the runs so far; `settled`
    marks elements at which every run was finite or equal to the truth."""

    truth: Array
    yardstick: float = 0.0
    settled: Array = field(default_factory=lambda: np.ones((), bool))

    def add(self, run: Array) -> None:
        if run.shape != self.truth.shape or self.truth.dtype.kind != "f":
            return
        finite = np.isfinite(run)
        same = (run == self.truth) | (np.isnan(run) & np.isnan(self.truth))
        self.settled = self.settled & (finite | same)
        off = np.abs(run.astype(np.float64) - self.truth)[finite & np.isfinite(self.truth)]
        self.yardstick = max(self.yardstick, float(off.max(initial=0.0)))

    def deviation(self, value: Array, precision: Precision, max_relative_error: float) -> Deviation:
        """How `value` stands to the truth: within 2 x the yardstick + eps / 2 x max|truth|, or, for an
        integer precision, within a relative error; what is no float is equal."""
        truth = self.truth
        if value.shape != truth.shape:
            return Deviation(
                np.inf, 0.0, (), f"shape {list(value.shape)}, the reference has {list(truth.shape)}"
            )
        if truth.dtype.kind != "f":
            wrong = np.asarray(value != truth)
            return Deviation(float(wrong.sum()), 0.0, _place(wrong), "")
        ours = value.astype(np.float64)
        finite = np.isfinite(truth)
        strange = self.settled & np.where(
            finite, ~np.isfinite(ours), ~((ours == truth) | (np.isnan(ours) & np.isnan(truth)))
        )
        if strange.any():
            found, right = ours[strange].flat[0], truth[strange].flat[0]
            return Deviation(np.inf, 0.0, _place(strange), f"{found:g} where the reference has {right:.3g}")
        compared = finite & self.settled
        error = np.where(compared, np.abs(np.where(compared, ours - truth, 0.0)), 0.0)
        if precision.is_integer:
            relative = relative_error(ours[compared], truth[compared])
            return Deviation(relative, max_relative_error, _place(error))
        largest = float(np.abs(truth[compared]).max(initial=0.0))
        allowed = YARDSTICK_FACTOR * self.yardstick + precision.eps / 2 * largest
        return Deviation(float(error.max(initial=0.0)), allowed, _place(error))


def budgets(
    truths: Mapping[str, Array], expected: ExposedGraph, feeds: Feeds, precision: Precision
) -> dict[str, Budget]:
    """The budget of every value of the graph as it should be, from nine runs of it.

    One with `feeds`, eight with its inputs moved by up to one eps, as the yardstick of a case.
    """
    found: dict[str, Budget] = {}
    with np.errstate(invalid="ignore", over="ignore"):
        for each in _moved(feeds, precision):
            for name, run in expected.run(each).items():
                if name in truths:
                    found.setdefault(name, Budget(truths[name])).add(run)
    return found


def _moved(feeds: Feeds, precision: Precision) -> Sequence[Feeds]:
    random = np.random.default_rng(0)
    runs: list[Feeds] = [feeds]
    for _ in range(MOVED_RUNS):
        runs.append(
            {
                name: array
                if not is_float(array)
                else (array * (1 + precision.eps * random.uniform(-1, 1, array.shape))).astype(array.dtype)
                for name, array in feeds.items()
            }
        )
    return runs


def _place(error: Array) -> tuple[int, ...]:
    if not error.size:
        return ()
    return tuple(int(index) for index in np.unravel_index(int(np.argmax(error)), error.shape))
