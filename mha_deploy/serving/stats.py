"""What the server counts of its requests, and Triton's statistics made of that and of the runner's.

A request of several rows counts once here and row by row in the runner.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mha_deploy.latency import samples_needed
from mha_deploy.runner import Answer, RunnerLoad, RunnerSnapshot
from mha_deploy.runner.histogram import Histogram, Recording, WindowedRecordings
from mha_deploy.serving.faults import Outcome

HISTORY_S = 300
PHASES = ("queue", "batch", "compute", "scatter")


@dataclass(frozen=True, slots=True)
class Second:
    """One second of the server's life, as the live page draws it. Latency is of answered requests."""

    time_s: int
    answered: int
    tokens: int
    others: int
    p50_ms: float
    p99_ms: float
    queued: int
    pending: int
    batches: dict[int, float]

    def to_json(self) -> dict[str, Any]:
        return {
            "time_s": self.time_s,
            "answered": self.answered,
            "tokens": self.tokens,
            "others": self.others,
            "p50_ms": self.p50_ms if self.answered else None,
            "p99_ms": self.p99_ms if self.answered else None,
            "queued": self.queued,
            "pending": self.pending,
            "batches": {str(size): round(count, 3) for size, count in sorted(self.batches.items())},
        }


@dataclass(slots=True)
class _Tally:
    """What happened since the last second was closed."""

    durations: Recording = field(default_factory=Recording)
    others: int = 0
    tokens: int = 0
    batches: Counter[int] = field(default_factory=Counter)


@dataclass(slots=True)
class ServerStats:
    """Counts of one event loop's thread, which alone writes them.

    `received` = the sum of `outcomes` + `in_progress`, at every moment. Durations are from the arrival
    of a request's head to the moment its answer is handed to the connection.
    """

    received: int = 0
    in_progress: int = 0
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    outcome_ns: Counter[Outcome] = field(default_factory=Counter)
    phase_ns: Counter[str] = field(default_factory=Counter)
    rows: int = 0
    last_inference_ms: int = 0
    durations: WindowedRecordings = field(default_factory=lambda: WindowedRecordings(("request",)))
    history: deque[Second] = field(default_factory=lambda: deque(maxlen=HISTORY_S))
    _tally: _Tally = field(default_factory=_Tally)

    def begun(self) -> None:
        self.received += 1
        self.in_progress += 1

    def ended(self, outcome: Outcome, seconds: float) -> None:
        """A request that had begun has come to its one end."""
        self.in_progress -= 1
        self.outcomes[outcome] += 1
        self.outcome_ns[outcome] += int(seconds * 1e9)
        if outcome is Outcome.ANSWERED:
            self.durations.at(time.monotonic())[0].record(seconds * 1e6)
            self._tally.durations.record(seconds * 1e6)
            self.last_inference_ms = int(time.time() * 1e3)
        else:
            self._tally.others += 1

    def computed(self, answers: Sequence[Answer], rows: int, tokens: int) -> None:
        """A request's rows were answered; its phases are those of the row that took the longest."""
        self.rows += rows
        self._tally.tokens += tokens
        for answer in answers:
            self._tally.batches[answer.batch_size] += 1
        if answers:
            for phase, us in zip(PHASES, phases_us(slowest(answers)), strict=True):
                self.phase_ns[phase] += int(us * 1e3)

    def close_second(self, end_s: int, load: RunnerLoad) -> None:
        """Put what happened since the last call into the history, as of the second that ended at `end_s`."""
        tally, self._tally = self._tally, _Tally()
        taken = tally.durations.taken()
        self.history.append(
            Second(
                end_s,
                taken.count,
                tally.tokens,
                tally.others,
                taken.percentile_us(0.5) / 1e3,
                taken.percentile_us(0.99) / 1e3,
                load.queued_requests,
                load.pending,
                {size: members / size for size, members in tally.batches.items()},
            )
        )

    def latency(self) -> tuple[Histogram, Histogram]:
        """Of all answered requests, and of those of the last seconds."""
        return self.durations.total()["request"], self.durations.window(time.monotonic())["request"]


def slowest(answers: Sequence[Answer]) -> Answer:
    if len(answers) == 1:
        return answers[0]
    return max(answers, key=lambda answer: sum(phases_us(answer)))


def phases_us(answer: Answer) -> tuple[float, float, float, float]:
    return answer.queue_us, answer.batch_us, answer.compute_us, answer.scatter_us


def triton_stats(name: str, version: str, stats: ServerStats, snapshot: RunnerSnapshot) -> dict[str, Any]:
    """Statistics in the form of Triton's statistics extension.

    As there, `inference_stats` is by request: each adds the whole time of the batch it was in;
    `batch_stats` is by execution.
    """
    good, answered = stats.outcomes[Outcome.ANSWERED], stats.outcome_ns[Outcome.ANSWERED]
    bad = sum(stats.outcomes.values()) - good
    bad_ns = sum(stats.outcome_ns.values()) - answered
    phase = {name: _counted(good, stats.phase_ns[name]) for name in PHASES}
    return {
        "name": name,
        "version": version,
        "last_inference": stats.last_inference_ms,
        "inference_count": stats.rows,
        "execution_count": sum(figures.count for figures in snapshot.batches.values()),
        "inference_stats": {
            "success": _counted(good, answered),
            "fail": _counted(bad, bad_ns),
            "queue": phase["queue"],
            "compute_input": phase["batch"],
            "compute_infer": phase["compute"],
            "compute_output": phase["scatter"],
            "cache_hit": _counted(0, 0),
            "cache_miss": _counted(0, 0),
        },
        "response_stats": {},
        "batch_stats": [
            {
                "batch_size": size,
                "compute_input": _counted(figures.count, int(figures.batch_us * 1e3)),
                "compute_infer": _counted(figures.count, int(figures.compute_us * 1e3)),
                "compute_output": _counted(figures.count, int(figures.scatter_us * 1e3)),
            }
            for size, figures in sorted(snapshot.batches.items())
        ],
        "memory_usage": [],
    }


def _counted(count: int, ns: int) -> dict[str, int]:
    return {"count": count, "ns": ns}


def latency_json(histogram: Histogram) -> dict[str, Any]:
    """Percentiles in milliseconds, each with its 95 % interval; null where there are too few to say."""
    figures: dict[str, Any] = {"count": histogram.count}
    for name, q in (("p50", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99), ("p99.9", 0.999)):
        low, high = histogram.interval_us(q)
        enough = histogram.count >= samples_needed(q)
        figures[f"{name}_ms"] = _ms(histogram.percentile_us(q)) if enough else None
        figures[f"{name}_interval_ms"] = [_ms(low), _ms(high)]
    figures["max_ms"] = _ms(histogram.max_us) if histogram.count else None
    figures["mean_ms"] = _ms(histogram.sum_us / histogram.count) if histogram.count else None
    return figures


def _ms(us: float) -> float | None:
    return None if math.isnan(us) else round(us / 1e3, 4)
