"""What a record holds, read strictly: an entry is what a search writes, or it is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mha_deploy.search.gate import Verdict
from mha_deploy.search.measuring import Timing

Holds = Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Found:
    """One size: timings by candidate, the ceiling in GFLOP/s, and what else went on meanwhile."""

    timings: Mapping[str, Timing]
    ceiling_gflops: float
    notices: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "candidates": {name: timing.to_json() for name, timing in self.timings.items()},
            "ceiling_gflops": self.ceiling_gflops,
            "notices": list(self.notices),
        }


def as_verdict(data: object) -> Verdict:
    """Raises ValueError where it is none."""
    verdict = Verdict.from_json(_table(data, _VERDICT))
    if verdict.passed and not math.isfinite(verdict.error_ratio):
        raise ValueError("passed, without an error that is a number")
    return verdict


def as_found(data: object) -> Found:
    """Raises ValueError where it is none."""
    table = _table(data, _FOUND)
    timings = {name: Timing.from_json(_table(each, _TIMING)) for name, each in table["candidates"].items()}
    if len({len(timing.rounds_p50_ms) for timing in timings.values() if timing.final}) != 1:
        raise ValueError("those in the final ran in the same rounds")
    return Found(timings, table["ceiling_gflops"], tuple(table["notices"]))


def _table(data: object, fields: Mapping[str, Holds]) -> dict[str, Any]:
    """`data` as a table of these fields and no others, each of which holds."""
    if not isinstance(data, dict) or data.keys() != fields.keys():
        raise ValueError(f"expected {', '.join(fields)}")
    wrong = [name for name, holds in fields.items() if not holds(data[name])]
    if wrong:
        raise ValueError(f"wrong: {', '.join(wrong)}")
    return data


def _is(kind: type) -> Holds:
    return lambda value: isinstance(value, kind)


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _measured(value: object) -> bool:
    """Above 0, and such that ratios of two of them are numbers too."""
    return isinstance(value, float) and 1e-12 < value < 1e12


def _list_of(holds: Holds, least: int = 0) -> Holds:
    return lambda value: isinstance(value, list) and len(value) >= least and all(map(holds, value))


_VERDICT: dict[str, Holds] = {
    "passed": _is(bool),
    "error_ratio": lambda value: value is None or (isinstance(value, float) and 0 <= value < math.inf),
    "case": _is(str),
    "cases": _count,
    "note": _is(str),
}
_TIMING: dict[str, Holds] = {
    "final": _is(bool),
    "ratio": _measured,
    "p50_ms": _measured,
    "p99_ms": lambda value: value is None or _measured(value),
    "samples": _count,
    "rounds_p50_ms": _list_of(_measured, least=1),
}
_FOUND: dict[str, Holds] = {
    "candidates": _is(dict),
    "ceiling_gflops": _measured,
    "notices": _list_of(_is(str)),
}
