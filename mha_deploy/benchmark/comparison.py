"""Which of two is faster, answered by the interval of their ratio.

The unit is the round, not the sample: samples within a round share its disturbances and count as one.
Each round gives log(median of B / median of A). The order of a round is drawn by chance; were A and B
the same, swapping their names would only flip the sign of that number, and either sign was as likely
whatever the machine did meanwhile: drift, slow spells, heavy tails and correlation from round to round
change the sizes of the numbers, never the fairness of their signs. So Wilcoxon's signed-rank test is
exact (a randomisation test: Fisher, "The Design of Experiments", 1935; Ernst, "Permutation Methods",
Statistical Science 19, 2004), and its inversion is the interval: order statistics of the Walsh
averages, around Hodges and Lehmann's estimate (Hollander, Wolfe & Chicken, "Nonparametric Statistical
Methods", 3.2 and 3.3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mha_deploy.benchmark.rounds import ROUNDS, Samples
from mha_deploy.errors import BenchError
from mha_deploy.latency import CONFIDENCE, NO_INTERVAL, Interval

MARGIN = 0.03
DIFFERENT, SAME, INCONCLUSIVE = "different", "no difference", "inconclusive"
RULE = (
    f"{CONFIDENCE:.0%} interval of the ratio over rounds (signed ranks): different = it excludes 1; "
    f"no difference = it lies within 1 +- {MARGIN:.0%}; else inconclusive"
)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A ratio of times with its 99 % interval; above 1 the second is slower."""

    ratio: float
    interval: Interval

    def to_json(self) -> dict[str, Any]:
        return {"ratio": self.ratio, "interval": self.interval.to_json(), "confidence": CONFIDENCE}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Time of `b` over time of `a`."""

    a: Samples
    b: Samples
    estimate: Estimate

    @property
    def answer(self) -> str:
        interval = self.estimate.interval
        if 1 not in interval:
            return DIFFERENT
        return SAME if interval.low >= 1 - MARGIN and interval.high <= 1 + MARGIN else INCONCLUSIVE

    def to_json(self) -> dict[str, Any]:
        return {
            "answer": self.answer,
            **self.estimate.to_json(),
            "a": _side(self.a),
            "b": _side(self.b),
        }


def compare(a: Samples, b: Samples) -> Comparison:
    """Hold `b` against `a`, both from one call of `measure`.

    Raises:
        BenchError: they have no rounds in common, or fewer than a 99 % interval takes.
    """
    if len(a.rounds_ms) != len(b.rounds_ms):
        raise BenchError(
            f"{a.name} has {len(a.rounds_ms)} rounds and {b.name} {len(b.rounds_ms)}; expected two turns of "
            "the same rounds"
        )
    check_rounds(len(a.rounds_ms))
    return Comparison(a, b, compare_medians(a.medians_ms, b.medians_ms))


def compare_medians(a: Sequence[float], b: Sequence[float]) -> Estimate:
    """The ratio of `b` to `a` (one positive number a round), measured in the same rounds.

    The interval is NaN where there are too few rounds.
    """
    logs = [math.log(two / one) for one, two in zip(a, b, strict=True)]
    averages = [(one + two) / 2 for i, one in enumerate(logs) for two in logs[i:]]
    return _estimate(averages, _signed_rank_counts(len(logs)))


def check_rounds(rounds: int) -> None:
    """Raise BenchError where so few rounds could give no interval."""
    if rounds < ROUNDS:
        raise BenchError(
            f"{rounds} rounds; a {CONFIDENCE:.0%} interval takes {ROUNDS} or more: ask for more rounds"
        )


def compare_apart(a: Sequence[float], b: Sequence[float]) -> Estimate:
    """The ratio of `b` to `a` (one positive number a round), measured at different times.

    Mann and Whitney's test inverted: order statistics of all log ratios (Hollander, Wolfe & Chicken,
    4.2 and 4.3). Rounds count as independent, so a difference between the two times is in the ratio.
    The interval is NaN where there are too few rounds.
    """
    ratios = [math.log(two / one) for one in a for two in b]
    return _estimate(ratios, _rank_sum_counts(len(a), len(b)))


def _estimate(candidates: list[float], counts: Sequence[int]) -> Estimate:
    """The median of `candidates`, and those at the ranks that the test's distribution leaves.

    `counts[k]` is how many of the equally likely outcomes give the statistic k; it is symmetric.
    """
    ordered, size = sorted(candidates), len(candidates)
    middle = (ordered[(size - 1) // 2] + ordered[size // 2]) / 2
    allowed, tail, rank = (1 - CONFIDENCE) / 2 * sum(counts), 0, 0
    while tail + counts[rank] <= allowed:
        tail += counts[rank]
        rank += 1
    interval = Interval(math.exp(ordered[rank - 1]), math.exp(ordered[size - rank])) if rank else NO_INTERVAL
    return Estimate(math.exp(middle), interval)


def _signed_rank_counts(n: int) -> list[int]:
    """How many of the 2^n choices of signs give each sum of the positive ranks 1..n."""
    counts = [1]
    for rank in range(1, n + 1):
        counts = [
            (counts[k] if k < len(counts) else 0) + (counts[k - rank] if k >= rank else 0)
            for k in range(len(counts) + rank)
        ]
    return counts


def _rank_sum_counts(m: int, n: int) -> list[int]:
    """How many of the orders of m and n things give each number of inversions: a Gaussian binomial."""
    counts = [1] + [0] * (m * n)
    for i in range(1, m + 1):
        for k in range(m * n, n + i - 1, -1):
            counts[k] -= counts[k - n - i]
        for k in range(i, m * n + 1):
            counts[k] += counts[k - i]
    return counts


def _side(samples: Samples) -> dict[str, Any]:
    return {"name": samples.name, "p50_ms": samples.median_ms, **samples.to_json()}
