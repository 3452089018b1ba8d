"""What a runner counts and times, and the picture of it that others read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mha_deploy.runner.histogram import Histogram, WindowedRecordings
from mha_deploy.runner.ticket import Outcome

PHASES = ("queue", "batch", "compute", "scatter", "total")
REASONS = ("idle", "backlog", "aged", "retry", "solo")


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
    backlog waited for one, a request had waited for too long, a failed batch's members were tried one by
    one, or the soloist took a request that had every core to itself. `soloist` is how many threads that
    has, 0 where there is none. `batching` is False where mates `drift` an answer by more than the mode
    allows, and every request runs alone. `longest_run_s` is how long the oldest run in progress has taken.
    """

    name: str
    provider: str
    mode: str
    drift: float
    batching: bool
    workers: int
    threads: int
    soloist: int
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


class Recorder:
    """Counts and times. Not locked: whoever records holds the runner's lock."""

    def __init__(self) -> None:
        self.received = 0
        self.outcomes = dict.fromkeys(Outcome, 0)
        self.outcome_us = dict.fromkeys(Outcome, 0.0)
        self.reasons = dict.fromkeys(REASONS, 0)
        self.tokens = self.padded_tokens = self.ran_batches = 0
        self.phases = WindowedRecordings(PHASES)
        self._batches: dict[int, list[float]] = {}

    def settled(self, outcome: Outcome, us: float) -> None:
        """One more request has come to its end, so long after it was received."""
        self.outcomes[outcome] += 1
        self.outcome_us[outcome] += us

    def ran(self, size: int, tokens: int, padded_tokens: int, phases: Sequence[float]) -> int:
        """A batch ran well, with so long in batch, compute and scatter (us); which batch it was."""
        sums = self._batches.setdefault(size, [0, 0.0, 0.0, 0.0])
        sums[0] += 1
        for index, us in enumerate(phases, 1):
            sums[index] += us
        self.tokens += tokens
        self.padded_tokens += padded_tokens
        self.ran_batches += 1
        return self.ran_batches

    def answered(self, queue_us: Sequence[float], phases: Sequence[float], now_s: float) -> None:
        """Requests of one batch were answered, after so long in the queue each."""
        queue, batch, compute, scatter, total = self.phases.at(now_s)
        batch_us, compute_us, scatter_us = phases
        batch.record(batch_us, len(queue_us))
        compute.record(compute_us, len(queue_us))
        scatter.record(scatter_us, len(queue_us))
        together = batch_us + compute_us + scatter_us
        for us in queue_us:
            queue.record(us)
            total.record(us + together)

    def batches(self) -> dict[int, BatchFigures]:
        return {size: BatchFigures(int(sums[0]), *sums[1:]) for size, sums in self._batches.items()}
