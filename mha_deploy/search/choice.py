"""Which candidate, or which two: one for short inputs and one for long ones where no single one wins."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Nearer to each other than this two candidates are alike, and the simpler one stays.
ALIKE = 0.01
# A second engine, which takes memory of its own, has to gain more than this over all sizes; or more than
# that at one of them, which whoever has no other sizes would feel, and over all more than nothing.
MARGIN, SOMEWHERE = 0.03, 0.05
RULE = (
    "chosen: the least geometric mean of time over the fastest one's, over all sizes; the simpler of two "
    f"within {ALIKE:.0%}; two engines, one for short inputs and one for long ones, where they are more than "
    f"{MARGIN:.0%} faster than one for all, or {ALIKE:.0%} and at some size more than {SOMEWHERE:.0%}"
)


@dataclass(frozen=True, slots=True)
class Size:
    """One size: its query length, and by candidate the time over the fastest one's."""

    length: int
    ratios: Mapping[str, float]


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
    far = max(size.ratios[best.at(size.length)] / size.ratios[two.at(size.length)] for size in sizes)
    feels = far > 1 + SOMEWHERE and one_s > two_s * (1 + ALIKE)
    return two if feels or one_s > two_s * (1 + MARGIN) else best


def _simplest(routes: Sequence[Route], sizes: Sequence[Size]) -> Route:
    """The first that is like the fastest."""
    limit = (1 + ALIKE) * min(_cost(route, sizes) for route in routes)
    return next(route for route in routes if _cost(route, sizes) <= limit)


def _cost(route: Route, sizes: Sequence[Size]) -> float:
    return math.exp(sum(math.log(size.ratios[route.at(size.length)]) for size in sizes) / len(sizes))
