"""Histograms of latency: log-linear, mergeable, over all time and over the last seconds.

Each power of two is divided into 64 equal parts (as HdrHistogram does, Gil Tene), so that a part's
middle lies within 1/128 of every value in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from mha_deploy.latency import rank_of

_PARTS_BITS = 6
_LARGEST_NS = (1 << 37) - 1  # 137 s
_LARGEST_US = _LARGEST_NS / 1e3
WINDOW_S = 10


def _bucket(us: float) -> int:
    ns = int(us * 1e3) if us < _LARGEST_US else _LARGEST_NS
    shift = ns.bit_length() - _PARTS_BITS - 1
    return ns if shift <= 0 else (shift << _PARTS_BITS) + (ns >> shift)


def _middle_us(bucket: int) -> float:
    shift = max(0, (bucket >> _PARTS_BITS) - 1)
    low = (bucket - (shift << _PARTS_BITS)) << shift
    return (low + (1 << shift) / 2) / 1e3


@dataclass(frozen=True, slots=True)
class Histogram:
    """Durations counted by bucket (in ascending order), as they were when it was taken.

    Percentiles, by nearest rank, are within 1 % of the exact ones from 1 us to 100 s; count, sum, least
    and largest are exact. Durations beyond 137 s share the last bucket.
    """

    buckets: tuple[tuple[int, int], ...] = ()
    count: int = 0
    sum_us: float = 0.0
    min_us: float = math.nan
    max_us: float = math.nan

    def percentile_us(self, q: float) -> float:
        """The smallest duration with at least the share `q` (0..1] at or below it; NaN when empty."""
        return self.at_rank_us(rank_of(q, self.count))

    def at_rank_us(self, rank: int) -> float:
        """The `rank`-th smallest duration, counted from 1; NaN where there is none."""
        if not 1 <= rank <= self.count:
            return math.nan
        sums = accumulate(count for _, count in self.buckets)
        found = next(bucket for (bucket, _), seen in zip(self.buckets, sums, strict=True) if seen >= rank)
        return min(max(_middle_us(found), self.min_us), self.max_us)

    def interval_us(self, q: float) -> tuple[float, float]:
        """95 % confidence bounds of a percentile from order statistics; NaN where there are too few.

        The number of samples below a quantile is binomial, nearly normal: ranks n q -+ 1.96 sqrt(n q (1 -
        q)), rounded outwards (Conover, "Practical Nonparametric Statistics", section 3.2).
        """
        spread = 1.96 * math.sqrt(self.count * q * (1 - q))
        low, high = math.floor(self.count * q - spread), math.ceil(self.count * q + spread)
        return self.at_rank_us(low), self.at_rank_us(high)

    def at_or_below(self, bounds_us: Sequence[float]) -> list[int]:
        """How many durations lie at or below each bound; the bound's own bucket counts as below."""
        lasts = [_bucket(bound) for bound in bounds_us]
        return [sum(count for bucket, count in self.buckets if bucket <= last) for last in lasts]

    @classmethod
    def merged(cls, parts: Iterable[Histogram]) -> Histogram:
        """All durations of `parts` in one: percentiles are taken of the merged, never averaged."""
        total = Recording()
        for part in parts:
            total.add(part)
        return total.taken()


class Recording:
    """A histogram being filled. Not locked: whoever records holds a lock."""

    __slots__ = ("_counts", "count", "max_us", "min_us", "sum_us")

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.count, self.sum_us, self.min_us, self.max_us = 0, 0.0, math.inf, 0.0

    def record(self, us: float, times: int = 1) -> None:
        """Count a duration of 0 or more microseconds, `times` times."""
        # `_bucket` and `max` written out: this runs five times a request.
        ns = int(us * 1e3) if us < _LARGEST_US else _LARGEST_NS
        shift = ns.bit_length() - _PARTS_BITS - 1
        bucket = ns if shift <= 0 else (shift << _PARTS_BITS) + (ns >> shift)
        counts = self._counts
        counts[bucket] = counts.get(bucket, 0) + times
        self.count += times
        self.sum_us += us * times
        if us > self.max_us:  # noqa: PLR1730
            self.max_us = us
        if us < self.min_us:  # noqa: PLR1730
            self.min_us = us

    def add(self, other: Histogram | Recording) -> None:
        if not other.count:
            return
        for bucket, count in other.buckets if isinstance(other, Histogram) else other._counts.items():
            self._counts[bucket] = self._counts.get(bucket, 0) + count
        self.count += other.count
        self.sum_us += other.sum_us
        self.min_us = min(self.min_us, other.min_us)
        self.max_us = max(self.max_us, other.max_us)

    def taken(self) -> Histogram:
        if not self.count:
            return Histogram()
        return Histogram(
            tuple(sorted(self._counts.items())), self.count, self.sum_us, self.min_us, self.max_us
        )


class WindowedRecordings:
    """Histograms by name, over all time and over the last `WINDOW_S` seconds, for one count a duration.

    A duration is counted in the current second's histogram alone, which joins the others when they
    are read or when it leaves the window.
    """

    __slots__ = ("_names", "_past", "_ring", "_second", "_slot")

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._past = self._new()
        self._ring: dict[int, tuple[Recording, ...]] = {}
        self._second, self._slot = -1, self._new()

    def _new(self) -> tuple[Recording, ...]:
        return tuple(Recording() for _ in self._names)

    def at(self, now_s: float) -> tuple[Recording, ...]:
        """What to record in at this moment, in the order of the names."""
        second = int(now_s)
        if second != self._second:
            self._second = second
            for old in [each for each in self._ring if each <= second - WINDOW_S]:
                for past, part in zip(self._past, self._ring.pop(old), strict=True):
                    past.add(part)
            self._slot = self._ring.setdefault(second, self._new())
        return self._slot

    def total(self) -> dict[str, Histogram]:
        return self._taken(self._past, *self._ring.values())

    def window(self, now_s: float) -> dict[str, Histogram]:
        """Of the current second and the `WINDOW_S - 1` before it."""
        first = int(now_s) - WINDOW_S
        return self._taken(*(part for second, part in self._ring.items() if second > first))

    def _taken(self, *parts: tuple[Recording, ...]) -> dict[str, Histogram]:
        totals = self._new()
        for part in parts:
            for total, one in zip(totals, part, strict=True):
                total.add(one)
        return {name: total.taken() for name, total in zip(self._names, totals, strict=True)}
