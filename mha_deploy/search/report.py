"""What a search found: plain data, which the command line and the JSON render."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mha_deploy.precision import Precision
from mha_deploy.search.choice import RULE, Route
from mha_deploy.search.gate import Verdict
from mha_deploy.search.measuring import Timing

BASELINE, PASSED, FAILED, NOT_HERE, NOT_ALLOWED = (
    "baseline",
    "passed",
    "failed",
    "not here",
    "not allowed",
)


@dataclass(frozen=True, slots=True)
class Tried:
    """One candidate: `outcome` is one of the words above, `why` its reason where it was not timed."""

    name: str
    precision: Precision
    outcome: str
    why: str = ""
    verdict: Verdict | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "precision": self.precision.value,
            "outcome": self.outcome,
            "why": self.why,
            "verdict": self.verdict.to_json() if self.verdict else None,
        }


@dataclass(frozen=True, slots=True)
class Measured:
    """One size, and what each candidate took there; `length` is that of the queries, and
    `notices` what else went on meanwhile."""

    sizes: Mapping[str, int]
    length: int
    tokens: int
    flops: int
    ceiling_gflops: float
    timings: Mapping[str, Timing]
    notices: tuple[str, ...] = ()

    def tokens_per_s(self, name: str) -> float:
        return self.tokens / self.timings[name].p50_ms * 1e3

    def ceiling_share(self, name: str) -> float:
        """Of the fp32 MatMul ceiling measured in the same rounds; a coarser precision may be beyond 1."""
        return self.flops / self.timings[name].p50_ms / 1e6 / self.ceiling_gflops

    def to_json(self) -> dict[str, Any]:
        return {
            "sizes": dict(self.sizes),
            "tokens": self.tokens,
            "ceiling_gflops": self.ceiling_gflops,
            "notices": list(self.notices),
            "candidates": {
                name: timing.to_json()
                | {"tokens_per_s": self.tokens_per_s(name), "ceiling_share": self.ceiling_share(name)}
                for name, timing in self.timings.items()
            },
        }


@dataclass(frozen=True, slots=True)
class SearchReport:
    """Every candidate, every size, and the choice. `artifact` is what `open_session()` opens from now on;
    `reused` counts the sizes whose timings were there already."""

    subject: str
    allowed: tuple[Precision, ...]
    tried: tuple[Tried, ...]
    measured: tuple[Measured, ...]
    route: Route
    artifact: str
    reused: int
    machine: Mapping[str, object]
    protocol: Mapping[str, object] = field(default_factory=dict)

    def notices(self) -> list[str]:
        """What a reader of the table should know."""
        reasons: dict[str, list[str]] = {}
        for each in self.tried:
            if each.why:
                reasons.setdefault(f"{each.outcome}: {each.why}", []).append(each.name)
        found = [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]
        for size in self.measured:
            sizes = " x ".join(map(str, size.sizes.values()))
            found += [f"{sizes}: {notice}" for notice in size.notices]
            chosen = self.route.at(size.length)
            for each in self.tried:
                timing = size.timings.get(each.name)
                if each.outcome == BASELINE and timing and timing.ratio < size.timings[chosen].ratio:
                    found.append(f"{each.name}, a baseline, is faster than {chosen} at {sizes}")
        return found

    def against_choice(self, name: str) -> float:
        """Time of `name` over the choice's, as a geometric mean over the sizes; NaN where not timed."""
        product = 1.0
        for size in self.measured:
            if name not in size.timings:
                return float("nan")
            product *= size.timings[name].ratio / size.timings[self.route.at(size.length)].ratio
        return float(product ** (1 / len(self.measured)))

    def to_json(self) -> dict[str, Any]:
        return {
            "subject": self.subject,
            "allowed": [precision.value for precision in self.allowed],
            "rule": RULE,
            "artifact": self.artifact,
            "route": self.route.to_json(),
            "candidates": [each.to_json() for each in self.tried],
            "sizes": [each.to_json() for each in self.measured],
            "reused_sizes": self.reused,
            "notices": self.notices(),
            "protocol": dict(self.protocol),
            "machine": dict(self.machine),
        }
