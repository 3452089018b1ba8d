"""Which candidate, or which two: one for short inputs and one for long ones where no single one wins."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mha_deploy.benchmark import compare_medians
from mha_deploy.latency import CONFIDENCE

# Nearer to each other than this two candidates are alike, and the simpler one stays.
ALIKE = 0.01
# A second engine, which takes memory of its own, has to gain more than the first over all sizes; or more than
# the second at one, which whoever has no other sizes would feel; or there more than the third, beyond doubt.
MARGIN, SOMEWHERE, SURELY = 0.03, 0.05, 0.02
RULE = (
    "chosen: the least geometric mean of time over the fastest one's, over all sizes; the simpler of two "
    f"within {ALIKE:.0%}; two engines, one for short inputs and one for long ones, where they are more than "
    f"{MARGIN:.0%} faster than one for all; or faster, at no size slower by so much, and at one by more "
    f"than {SOMEWHERE:.0%}, or {SURELY:.0%} with a {CONFIDENCE:.0%} interval over rounds that excludes 1"
)


@dataclass(frozen=True, slots=True)
class Size:
    """One size: its query length, and by candidate the time over the fastest one's, and the medians of the
    rounds in which the best ran together."""

    length: int
    ratios: Mapping[str, float]
    rounds_ms: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def behind(self, name: str, other: str) -> bool:
        """Whether `name` is so much slower than `other` that `other` is worth having for this size."""
        ratio = self.ratios[name] / self.ratios[other]
        if ratio > 1 + SOMEWHERE:
            return True
        if ratio <= 1 + SURELY or not {name, other} <= self.rounds_ms.keys():
            return False
        return compare_medians(self.rounds_ms[other], self.rounds_ms[name]).interval.low > 1


@dataclass(frozen=True, slots=True)
class Route:
    """`short` up to `up_to_length`, `long` beyond; they are one where a single candidate is chosen."""

    short: str
    long: str
    up_to_length: int = 0

    @property
    def single(self) -> bool:
        return self.short == self.long

    def at(self, length: int) -> str:
        return self.short if length <= self.up_to_length else self.long

    def to_json(self) -> dict[str, Any]:
        return {"short": self.short, "long": self.long, "up_to_length": self.up_to_length}


def choose(sizes: Sequence[Size], names: Sequence[str]) -> Route:
    """The route among `names`, given in order of their simplicity, for `sizes`.

    Every size counts the same. All pairs and all boundaries between lengths are tried.
    """
    best = _simplest([Route(name, name) for name in names], sizes)
    lengths = sorted({size.length for size in sizes})
    pairs = [
        Route(short, long, limit)
        for limit in lengths[:-1]
        for short in names
        for long in names
        if short != long
    ]
    if not pairs:
        return best
    two = min(pairs, key=lambda pair: _cost(pair, sizes))  # of two engines none is simple
    one_s, two_s = _cost(best, sizes), _cost(two, sizes)
    gains = any(size.behind(best.at(size.length), two.at(size.length)) for size in sizes)
    loses = any(size.behind(two.at(size.length), best.at(size.length)) for size in sizes)
    return two if (gains and not loses and one_s > two_s) or one_s > two_s * (1 + MARGIN) else best


def _simplest(routes: Sequence[Route], sizes: Sequence[Size]) -> Route:
    """The first that is like the fastest."""
    limit = (1 + ALIKE) * min(_cost(route, sizes) for route in routes)
    return next(route for route in routes if _cost(route, sizes) <= limit)


def _cost(route: Route, sizes: Sequence[Size]) -> float:
    return math.exp(sum(math.log(size.ratios[route.at(size.length)]) for size in sizes) / len(sizes))
