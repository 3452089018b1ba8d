"""A run in figures: latency from the intended send, what became of all requests, whether it counts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from mha_deploy.latency import PERCENTILE_RULE, figure, nearest_rank, percentile
from mha_deploy.load.check import CheckReport
from mha_deploy.load.records import Outcome, Records

QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99.9": 0.999}
# The generator was late: its send lag's p99 is beyond both of these.
LAG_MS, LAG_SHARE = 1.0, 0.1
# The generator was at its end: its thread used more of a core than this.
CPU_SHARE = 0.9
VALIDITY_RULE = (
    f"invalid when the send lag's p99 is beyond max({LAG_MS:g} ms, {LAG_SHARE:.0%} of the p50 latency) or "
    f"the generator used more than {CPU_SHARE:.0%} of a core"
)
# A server under load may say no in time: such answers are counted, and the reader judges.
_SAID = (Outcome.ANSWERED, Outcome.REFUSED, Outcome.EXPIRED)
FAILURE_RULE = (
    "failed when no request was answered, one was neither answered nor refused (503, 429) nor expired (504), "
    "or a sampled answer is wrong"
)
_UNSAID = {
    Outcome.UNANSWERED: "on its way still when the wait for answers ended",
    Outcome.NOT_SENT: "never sent, since no answer came before it",
}


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles in milliseconds by `QUANTILES`' names, NaN where there were too few samples to say."""

    percentiles_ms: Mapping[str, float]
    max_ms: float
    samples: int

    @classmethod
    def of(cls, samples_ms: Sequence[float]) -> Self:
        ordered = sorted(samples_ms)
        found = {name: percentile(ordered, q) for name, q in QUANTILES.items()}
        return cls(found, ordered[-1] if ordered else math.nan, len(ordered))

    def to_json(self) -> dict[str, Any]:
        shown = {f"{name}_ms": figure(value) for name, value in self.percentiles_ms.items()}
        return {**shown, "max_ms": figure(self.max_ms), "samples": self.samples}


@dataclass(frozen=True, slots=True)
class LoadReport:
    """One run, or several of one kind merged.

    `latency` runs from the intended send to the answer, `service` from the real one, `lag` between the
    two. Both latencies are of answered requests; `outcomes` add up to `planned`. `faults` say why the
    run does not count (`VALIDITY_RULE`, which is about the generator), `failures` what the target did
    wrong (`FAILURE_RULE`); each is empty where there is nothing.
    """

    target: str
    plan: str
    outcomes: Mapping[str, int]
    wall_s: float
    tokens: int
    latency: Spread
    service: Spread
    lag: Spread
    generator_cpu: float
    faults: tuple[str, ...]
    failures: tuple[str, ...]
    notes: Mapping[str, int]
    check: CheckReport
    machine: Mapping[str, Any]
    records: Records = field(repr=False)

    @classmethod
    def of(
        cls,
        records: Records,
        *,
        target: str,
        plan: str,
        wall_s: float,
        generator_cpu: float,
        check: CheckReport,
        reasons: Mapping[tuple[Outcome, str], int],
        machine: Mapping[str, Any],
    ) -> Self:
        """`reasons` count what went wrong by what became of the request."""
        latency_ms, lag_ms = records.latency_ms(), records.lag_ms()
        notes = Counter[str]()
        for (_, note), count in reasons.items():
            notes[note] += count
        return cls(
            target=target,
            plan=plan,
            outcomes=records.counts(),
            wall_s=wall_s,
            tokens=int(records.lengths[records.answered].sum()),
            latency=Spread.of(latency_ms),
            service=Spread.of(records.service_ms()),
            lag=Spread.of(lag_ms),
            generator_cpu=generator_cpu,
            faults=_faults(latency_ms, lag_ms, generator_cpu),
            failures=_failures(records.counts(), reasons, check),
            notes=notes,
            check=check,
            machine=machine,
            records=records,
        )

    @property
    def planned(self) -> int:
        return sum(self.outcomes.values())

    @property
    def valid(self) -> bool:
        return not self.faults

    @property
    def passed(self) -> bool:
        """Whether the run counts and the target did nothing wrong."""
        return self.valid and not self.failures

    @property
    def verdict(self) -> str:
        """VALID, or why not: a line for what makes it INVALID, and one for what FAILED."""
        lines = [
            f"{word}: {'; '.join(found)}"
            for word, found in (("INVALID", self.faults), ("FAILED", self.failures))
            if found
        ]
        return "\n".join(lines) or "VALID"

    @property
    def answered_per_s(self) -> float:
        return self.outcomes["answered"] / self.wall_s

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s

    def to_json(self, *, samples: bool = False) -> dict[str, Any]:
        """As plain data; with `samples`, also every request's times and outcome."""
        data = {
            "target": self.target,
            "plan": self.plan,
            "planned": self.planned,
            "outcomes": dict(self.outcomes),
            "wall_s": self.wall_s,
            "answered_per_s": self.answered_per_s,
            "tokens_per_s": self.tokens_per_s,
            "latency": self.latency.to_json(),
            "service": self.service.to_json(),
            "send_lag": self.lag.to_json(),
            "percentiles": PERCENTILE_RULE,
            "generator_cpu": self.generator_cpu,
            "valid": self.valid,
            "faults": list(self.faults),
            "rule": VALIDITY_RULE,
            "failures": list(self.failures),
            "failure_rule": FAILURE_RULE,
            "verdict": self.verdict,
            "notes": dict(self.notes),
            "check": self.check.to_json(),
            "passed": self.passed,
            "machine": dict(self.machine),
        }
        return {**data, "samples": _samples(self.records)} if samples else data


def _faults(latency_ms: Sequence[float], lag_ms: Sequence[float], generator_cpu: float) -> tuple[str, ...]:
    faults = []
    lag_p99 = nearest_rank(lag_ms, 0.99) if lag_ms else 0.0
    p50 = nearest_rank(latency_ms, 0.5) if latency_ms else 0.0
    allowed = max(LAG_MS, LAG_SHARE * p50)
    if lag_p99 > allowed:
        faults.append(
            f"the generator sent late: p99 of its lag is {lag_p99:.3f} ms, at most {allowed:.3f} ms may be"
        )
    if generator_cpu > CPU_SHARE:
        faults.append(
            f"the generator used {generator_cpu:.0%} of a core: it was at its end, not only the target"
        )
    return tuple(faults)


def _failures(
    counts: Mapping[str, int], reasons: Mapping[tuple[Outcome, str], int], check: CheckReport
) -> tuple[str, ...]:
    planned, answered = sum(counts.values()), counts["answered"]
    at_fault = [
        outcome for outcome in Outcome if counts[outcome.name.lower()] and not (answered and outcome in _SAID)
    ]
    failures = []
    if at_fault:
        found = {outcome: counts[outcome.name.lower()] for outcome in at_fault}
        what = ", ".join(
            f"{count:,} {outcome.name.lower().replace('_', ' ')}" for outcome, count in found.items()
        )
        head = f"{sum(found.values()):,} of {planned:,} requests got no answer"
        if not answered:
            head = f"none of {planned:,} requests was answered, so that there is no latency"
        failures.append(f"{head}: {what}; most often: {_most_often(found, reasons)}")
    return (*failures, check.failure) if check.failure else tuple(failures)


def _most_often(found: Mapping[Outcome, int], reasons: Mapping[tuple[Outcome, str], int]) -> str:
    """The most frequent reason among these outcomes, some of which have none but what they are."""
    counted = Counter({key: count for key, count in reasons.items() if key[0] in found})
    for outcome, words in _UNSAID.items():
        noted = sum(count for (each, _), count in counted.items() if each is outcome)
        counted[outcome, words] = found.get(outcome, 0) - noted
    ((_, reason), count) = counted.most_common(1)[0]
    return f"{reason} ({count:,} x)"


def _samples(records: Records) -> dict[str, Any]:
    times = {
        name: [figure(float(each)) for each in getattr(records, name)]
        for name in ("intended_s", "sent_s", "ended_s")
    }
    lengths, outcomes = records.lengths.tolist(), records.outcomes.tolist()
    return {"lengths": lengths, **times, "outcomes": outcomes}
