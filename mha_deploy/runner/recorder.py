"""What a runner counts and times, and the picture of it that others read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mha_deploy.runner.histogram import Histogram, WindowedRecording
from mha_deploy.runner.ticket import Answer, Outcome

PHASES = ("queue", "batch", "compute", "scatter", "total")
REASONS = ("idle", "backlog", "aged", "retry")


@dataclass(frozen=True, slots=True)
class BatchFigures:
    """Batches of one size: how many ran well, and the time of their phases summed up."""

    count: int = 0
    batch_us: float = 0.0
    compute_us: float = 0.0
    scatter_us: float = 0.0


@dataclass(frozen=True, slots=True)
class RunnerLoad:
    """What waits, what waits or is being run (`pending` requests), and how many workers run."""

    queued_requests: int
    queued_tokens: int
    pending: int
    busy_workers: int


@dataclass(frozen=True, slots=True)
class RunnerSnapshot:
    """A runner at one moment.

    `received` = the sum of `outcomes` + `pending`, at every moment. `pending` requests are in the
    queue or being run. `phases` hold answered requests since the start, `window` those of the last
    `window_s` seconds. `tokens` and `padded_tokens` were computed in batches that ran well;
    `batches` is by their size, `dispatch_reasons` says why a batch began: a worker was idle, a
    backlog waited for one, a request had waited for too long, or a failed batch's members were
    tried one by one. `longest_run_s` is how long the oldest run in progress has taken so far.
    """

    name: str
    provider: str
    mode: str
    workers: int
    threads: int
    received: int
    outcomes: Mapping[str, int]
    outcome_us: Mapping[str, float]
    pending: int
    queued_requests: int
    queued_tokens: int
    queued_bytes: int
    queued_work_us: float
    busy_workers: int
    longest_run_s: float
    batches: Mapping[int, BatchFigures]
    dispatch_reasons: Mapping[str, int]
    tokens: int
    padded_tokens: int
    phases: Mapping[str, Histogram]
    window: Mapping[str, Histogram]
    window_s: int
    uptime_s: float
    closing: bool
    cost_model: Mapping[str, Any]


@dataclass(slots=True)
class Recorder:
    """Counts and times. Not locked: whoever records holds the runner's lock."""

    received: int = 0
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    outcome_us: dict[Outcome, float] = field(default_factory=lambda: dict.fromkeys(Outcome, 0.0))
    reasons: Counter[str] = field(default_factory=Counter)
    batches: dict[int, BatchFigures] = field(default_factory=dict)
    ran_batches: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    phases: dict[str, WindowedRecording] = field(
        default_factory=lambda: {phase: WindowedRecording() for phase in PHASES}
    )

    def settled(self, outcome: Outcome, us: float) -> None:
        """One more request has come to its end, so long after it was received."""
        self.outcomes[outcome] += 1
        self.outcome_us[outcome] += us

    def ran(self, size: int, tokens: int, padded_tokens: int, phases: Sequence[float]) -> int:
        """A batch ran well, with so long in batch, compute and scatter (us); which batch it was."""
        old = self.batches.get(size, BatchFigures())
        batch_us, compute_us, scatter_us = phases
        self.batches[size] = BatchFigures(
            old.count + 1, old.batch_us + batch_us, old.compute_us + compute_us, old.scatter_us + scatter_us
        )
        self.tokens += tokens
        self.padded_tokens += padded_tokens
        self.ran_batches += 1
        return self.ran_batches

    def answered(self, answers: Sequence[Answer], now_s: float) -> None:
        """Requests of one batch were answered."""
        first = answers[0]
        shared = (first.batch_us, first.compute_us, first.scatter_us)
        for phase, us in zip(PHASES[1:4], shared, strict=True):
            self.phases[phase].record(us, now_s, len(answers))
        queue, total, rest = self.phases["queue"], self.phases["total"], sum(shared)
        for answer in answers:
            queue.record(answer.queue_us, now_s)
            total.record(answer.queue_us + rest, now_s)

    def histograms(self, now_s: float) -> tuple[dict[str, Histogram], dict[str, Histogram]]:
        """By phase: since the start, and of the last window's seconds."""
        total = {phase: recording.total() for phase, recording in self.phases.items()}
        return total, {phase: recording.window(now_s) for phase, recording in self.phases.items()}
