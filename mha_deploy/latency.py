"""Percentiles and medians that can be believed: from raw samples, and only from enough of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

PERCENTILE_RULE = "nearest rank"
CONFIDENCE = 0.99


def samples_needed(q: float, confidence: float = CONFIDENCE) -> int:
    """Samples for the largest of them to bound quantile `q` (0..1) with that confidence.

    All n lie below the quantile with probability q^n, so n >= ln(1 - confidence) / ln(q): 459 for
    p99. (Order statistics; e.g. Conover, "Practical Nonparametric Statistics", tolerance limits.)
    """
    return math.ceil(math.log(1 - confidence) / math.log(q))


def rank_of(q: float, count: int) -> int:
    """The rank, from 1, that has at least the share `q` (0..1] of `count` samples at or below it."""
    # In floating point 0.07 x 100 is above 7, and its ceiling a rank too high.
    return max(1, math.ceil(Fraction(repr(q)) * count))


def nearest_rank(samples: Sequence[float], q: float) -> float:
    """The smallest sample with at least the share `q` (0..1] of all samples at or below it."""
    return sorted(samples)[rank_of(q, len(samples)) - 1]


def percentile(samples: Sequence[float], q: float) -> float:
    """As `nearest_rank`; NaN where there are too few samples to say (see `samples_needed`)."""
    return nearest_rank(samples, q) if len(samples) >= samples_needed(q) else math.nan


@dataclass(frozen=True, slots=True)
class Interval:
    """A confidence interval, its ends included; NaN where there was too little to give one."""

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def to_json(self) -> list[float | None]:
        return [figure(self.low), figure(self.high)]


NO_INTERVAL = Interval(math.nan, math.nan)


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Interval of the median by order statistics, whatever the distribution; 99 % takes 8 values.

    Of n independent values, the k-th smallest lies above the median with the probability that fewer
    than k of n fair coins show heads. (David & Nagaraja, "Order Statistics", 7.1.)
    """
    n = len(values)
    tail, k = 0, 0
    while (tail + math.comb(n, k)) / 2**n <= (1 - confidence) / 2:
        tail += math.comb(n, k)
        k += 1
    ordered = sorted(values)
    return Interval(ordered[k - 1], ordered[n - k]) if k else NO_INTERVAL


def figure(value: float) -> float | None:
    """The value as JSON has it, which has no NaN."""
    return None if math.isnan(value) else value


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Latency in milliseconds; NaN where there were too few samples to say."""

    p50_ms: float
    p90_ms: float
    p99_ms: float
    samples: int

    @classmethod
    def of(cls, samples_ms: Sequence[float]) -> Percentiles:
        p50, p90, p99 = (percentile(samples_ms, q) for q in (0.5, 0.9, 0.99))
        return cls(p50, p90, p99, len(samples_ms))
