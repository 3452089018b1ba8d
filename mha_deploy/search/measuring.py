"""One size, all candidates in turns: a short heat first, and a final among those near its winner.

A heat that ends early is how the time holds (successive halving: Jamieson & Talwalkar, "Non-stochastic
Best Arm Identification", 2016). It goes by each one's fastest run, since what disturbs a run only adds
to it and the rounds are few, and drops what is clearly slower even so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mha_deploy.benchmark import Samples, Schedule, Turn, compare, measure
from mha_deploy.benchmark.rounds import WALL, Clock

HEAT_ROUNDS = 3
HEAT_SHARE = 0.3
# Slower than the heat's winner by more than this, and out. The final has room for so many.
CLEARLY_SLOWER = 1.3
FINALISTS = 4


@dataclass(frozen=True, slots=True)
class Timing:
    """One candidate at one size. `ratio` is its time over that of the fastest candidate: in the final by
    the rounds that both ran, and by the fastest runs of the heat where it was dropped there (`final`
    False). A NaN percentile has too few samples."""

    final: bool
    ratio: float
    p50_ms: float
    p99_ms: float
    samples: int
    rounds_p50_ms: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "final": self.final,
            "ratio": self.ratio,
            "p50_ms": self.p50_ms,
            "p99_ms": self.p99_ms if math.isfinite(self.p99_ms) else None,
            "samples": self.samples,
            "rounds_p50_ms": list(self.rounds_p50_ms),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Timing:
        p99_ms = math.nan if data["p99_ms"] is None else data["p99_ms"]
        return cls(**{**data, "p99_ms": p99_ms, "rounds_p50_ms": tuple(data["rounds_p50_ms"])})


def race(
    turns: Sequence[Turn],
    seconds: float,
    *,
    keep: Sequence[str] = (),
    beside: Sequence[Turn] = (),
    clock: Clock = WALL,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[dict[str, Timing], dict[str, Samples]]:
    """Time `turns` for `seconds` in all, warm-up and pauses not counted; and what `beside` took.

    Turns named in `keep` are in the final whatever the heat says. `beside` are yardsticks: they run in
    the final and do not compete.
    """
    heat = Schedule(seconds=HEAT_SHARE * seconds / len(turns), rounds=HEAT_ROUNDS)
    taken = measure(turns, heat, clock=clock, progress=progress)
    fastest_ms = {name: min(samples.merged_ms) for name, samples in taken.items()}
    names = finalists(fastest_ms, keep)
    least_ms = min(fastest_ms.values())
    found = {
        name: _timing(samples, fastest_ms[name] / least_ms, final=False) for name, samples in taken.items()
    }
    final = Schedule(seconds=(1 - HEAT_SHARE) * seconds / len(names))
    chosen = [turn for turn in turns if turn.name in names]
    last = measure([*chosen, *beside], final, clock=clock, progress=progress)
    # All against one of them: then the ratios of any two agree, and the least is that of the fastest.
    ratios = {name: compare(last[names[0]], last[name]).estimate.ratio for name in names}
    least = min(ratios.values())
    found |= {name: _timing(last[name], ratios[name] / least, final=True) for name in names}
    return found, {turn.name: last[turn.name] for turn in beside}


def finalists(times_ms: Mapping[str, float], keep: Sequence[str]) -> list[str]:
    """Who goes on: those not clearly slower, the fastest first where there are many, and `keep`."""
    limit = CLEARLY_SLOWER * min(times_ms.values())
    near = sorted((name for name in times_ms if times_ms[name] <= limit), key=times_ms.__getitem__)
    chosen = {*near[:FINALISTS], *keep}
    return [name for name in times_ms if name in chosen]


def _timing(samples: Samples, ratio: float, *, final: bool) -> Timing:
    p99_ms = samples.latency.p99_ms
    return Timing(final, ratio, samples.median_ms, p99_ms, len(samples.merged_ms), samples.medians_ms)
