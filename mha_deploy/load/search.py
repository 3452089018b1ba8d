"""The highest rate that holds a p99 target: where latency turns up, found by bisection."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mha_deploy.errors import InputError
from mha_deploy.load.report import CPU_SHARE, LAG_SHARE, LoadReport

_GROWTH = 2.0
_LONGEST = 24
# Below this share of what one client alone gets through, no rate is tried.
_LOWEST = 1 / 16


@dataclass(frozen=True, slots=True)
class Trial:
    """One rate, its run, and why it did not hold the target ("" where it did).

    A rate holds when its run counts, every request was answered, and p99 from the intended send is at most
    the target. A run also counts where the generator's lag, which is part of that latency, is small beside
    the target; where it does not, that says nothing of who was asked.
    """

    rate_per_s: float
    report: LoadReport
    why_not: str
    counts: bool

    @property
    def held(self) -> bool:
        return not self.why_not

    @classmethod
    def judged(cls, rate_per_s: float, report: LoadReport, target_p99_ms: float) -> Trial:
        """Of the run at a rate."""
        why_not = _why_not(report, target_p99_ms)
        return cls(rate_per_s, report, why_not, _counts(report, target_p99_ms))


@dataclass(frozen=True, slots=True)
class SearchReport:
    """`rate_per_s` is the highest rate tried that held; 0 where none did.

    `failed_per_s` is the lowest rate tried that did not, inf where all held. `limited_by_generator`
    says that the run there did not count, so that the target may hold more. `alone` is the run of one
    request at a time that went first.
    """

    target_p99_ms: float
    alone: LoadReport
    rate_per_s: float
    failed_per_s: float
    limited_by_generator: bool
    trials: tuple[Trial, ...]

    @property
    def failures(self) -> tuple[str, ...]:
        """What the target did wrong: anything while one request was sent at a time, a wrong answer at any
        rate. What else is lost at a rate is why that rate does not hold."""
        alone = [f"one at a time: {failure}" for failure in self.alone.failures]
        wrong = [(trial.rate_per_s, trial.report.check.failure) for trial in self.trials]
        return (*alone, *(f"{rate:,.1f} requests/s: {failure}" for rate, failure in wrong if failure))

    @property
    def passed(self) -> bool:
        """Whether a rate was found, and the target did nothing wrong."""
        return self.rate_per_s > 0 and not self.failures

    def to_json(self, *, samples: bool = False) -> dict[str, Any]:
        return {
            "target_p99_ms": self.target_p99_ms,
            "rate_per_s": self.rate_per_s,
            "failed_per_s": None if math.isinf(self.failed_per_s) else self.failed_per_s,
            "limited_by_generator": self.limited_by_generator,
            "failures": list(self.failures),
            "passed": self.passed,
            "alone": self.alone.to_json(samples=samples),
            "trials": [
                {
                    "rate_per_s": trial.rate_per_s,
                    "held": trial.held,
                    "why_not": trial.why_not,
                    "report": trial.report.to_json(samples=samples),
                }
                for trial in self.trials
            ],
        }


def find_rate(
    run_at: Callable[[float], LoadReport],
    alone: LoadReport,
    target_p99_ms: float,
    *,
    tolerance: float = 0.05,
    progress: Callable[[str], None] = lambda _: None,
) -> SearchReport:
    """Double or halve the rate until one holds and one does not, then halve the interval between them
    (geometrically) until its ends are within `tolerance` of each other.

    `alone` is a run of one request at a time: half of its throughput is where the search starts, and
    where its p99 is beyond the target already no rate is tried. `Trial` says when a rate holds.

    Raises:
        InputError: a target or a tolerance that is not above 0.
    """
    if not (target_p99_ms > 0 and tolerance > 0):
        raise InputError(f"p99 target {target_p99_ms} ms, tolerance {tolerance}; expected both above 0")
    trials: list[Trial] = []
    low, high = 0.0, math.inf
    if alone.latency.percentiles_ms["p99"] > target_p99_ms or not alone.outcomes["answered"]:
        return SearchReport(target_p99_ms, alone, 0.0, 0.0, limited_by_generator=False, trials=())
    rate, lowest = alone.answered_per_s / 2, alone.answered_per_s * _LOWEST
    while len(trials) < _LONGEST and rate >= lowest and (low == 0.0 or high > low * (1 + tolerance)):
        progress(f"{rate:.1f} requests/s (holds {low:.1f}, fails {high:.1f})")
        trial = Trial.judged(rate, run_at(rate), target_p99_ms)
        trials.append(trial)
        if trial.held:
            low = rate
        else:
            high = rate
        rate = _next(low, high)
    limited = any(not trial.counts for trial in trials if trial.rate_per_s == high)
    return SearchReport(target_p99_ms, alone, low, high, limited, tuple(trials))


def _next(low: float, high: float) -> float:
    if math.isinf(high):
        return low * _GROWTH
    return math.sqrt(low * high) if low else high / _GROWTH


def _why_not(report: LoadReport, target_p99_ms: float) -> str:
    lost = report.planned - report.outcomes["answered"]
    p99 = report.latency.percentiles_ms["p99"]
    if lost:
        counts = [
            f"{count} {name}" for name, count in report.outcomes.items() if count and name != "answered"
        ]
        return f"{', '.join(counts)} of {report.planned}"
    if not _counts(report, target_p99_ms):
        return f"does not count: {report.faults[0]}"
    if not p99 <= target_p99_ms:
        return f"p99 {p99:.3f} ms"
    return ""


def _counts(report: LoadReport, target_p99_ms: float) -> bool:
    lag_p99_ms = report.lag.percentiles_ms["p99"]
    return report.valid or (report.generator_cpu <= CPU_SHARE and lag_p99_ms <= LAG_SHARE * target_p99_ms)
