"""What a record holds, read strictly: an entry is what a search writes, or it is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mha_deploy.json_part import JsonPart, Kind
from mha_deploy.search.gate import Verdict
from mha_deploy.search.measuring import Timing


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
    verdict = Verdict.from_json(JsonPart.of(data).entries(_VERDICT))
    if verdict.passed and not math.isfinite(verdict.error_ratio):
        raise ValueError("passed, without an error that is a number")
    return verdict


def as_found(data: object) -> Found:
    """Raises ValueError where it is none."""
    table = JsonPart.of(data).entries(_FOUND)
    found = Found(table["candidates"], table["ceiling_gflops"], table["notices"])
    if len({len(timing.rounds_p50_ms) for timing in found.timings.values() if timing.final}) != 1:
        raise ValueError("those in the final ran in the same rounds")
    return found


def _measured(part: JsonPart) -> float:
    """Above 0, and such that ratios of two of them are numbers too."""
    if not isinstance(part.value, float) or not 1e-12 < part.value < 1e12:
        raise part.wrong("a float between 1e-12 and 1e12")
    return part.value


def _ratio(part: JsonPart) -> float:
    if not isinstance(part.value, float):
        raise part.wrong("a float")
    return part.number()


def _or_none(read: Kind) -> Kind:
    """None stands for what is no number."""
    return lambda part: None if part.value is None else read(part)


def _timing(part: JsonPart) -> Timing:
    return Timing.from_json(part.entries(_TIMING))


_VERDICT: Mapping[str, Kind] = {
    "passed": JsonPart.flag,
    "error_ratio": _or_none(_ratio),
    "case": JsonPart.text,
    "cases": JsonPart.whole,
    "note": JsonPart.text,
}
_TIMING: Mapping[str, Kind] = {
    "final": JsonPart.flag,
    "ratio": _measured,
    "p50_ms": _measured,
    "p99_ms": _or_none(_measured),
    "samples": JsonPart.whole,
    "rounds_p50_ms": lambda part: tuple(_measured(each) for each in part.parts(least=1)),
}
_FOUND: Mapping[str, Kind] = {
    "candidates": lambda part: {name: _timing(part[name]) for name in part.members()},
    "ceiling_gflops": _measured,
    "notices": JsonPart.texts,
}
