"""Whether a request is taken in: there must be room for it, and time left.

No thread, no clock and no lock of its own: whoever calls holds the runner's lock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mha_deploy.errors import DeadlineError, MhaDeployError, QueueFullError
from mha_deploy.runner.backlog import Backlog
from mha_deploy.runner.cost import CostModel
from mha_deploy.runner.options import RunnerOptions
from mha_deploy.runner.planner import Planner
from mha_deploy.runner.ticket import Outcome, Ticket


@dataclass(slots=True)
class Progress:
    """What one worker is at: since when, and until when as predicted (inf and 0: idle)."""

    since: float = math.inf
    until: float = 0.0

    @property
    def busy(self) -> bool:
        return self.since < math.inf


class Admission:
    """Refuses who would find no room, and who would get no answer in time."""

    def __init__(self, planner: Planner, model: CostModel, options: RunnerOptions, backlog: Backlog) -> None:
        self._planner, self._model, self._options, self._backlog = planner, model, options, backlog

    def refusal(
        self, ticket: Ticket, workers: Sequence[Progress], *, free: bool
    ) -> tuple[Outcome, MhaDeployError] | None:
        """How this request ends at once, if it does; `free`: a worker waits for it.

        A refusal for a predicted finish makes the prediction count for less.
        """
        allowed_s = ticket.deadline - ticket.arrived
        if allowed_s <= 0:
            message = f"a request came with {allowed_s * 1e3:.3g} ms left; expected more than 0"
            return Outcome.REFUSED_DEADLINE, DeadlineError(message, predicted=False)
        full = None if free else self._backlog.full(ticket)
        if full:
            return full, self._queue_full(full, len(workers))
        needed_s = 0.0 if allowed_s == math.inf else self._predicted_s(ticket, workers, free=free)
        if needed_s <= allowed_s:
            return None
        self._model.doubt(self._planner.size(1, ticket.shape))
        message = (
            f"an answer is predicted in {needed_s * 1e3:.3g} ms, but the request allows "
            f"{allowed_s * 1e3:.3g} ms; try again later or allow more"
        )
        return Outcome.REFUSED_DEADLINE, DeadlineError(message, predicted=True)

    def _queue_full(self, full: Outcome, workers: int) -> QueueFullError:
        backlog, options = self._backlog, self._options
        held = {
            Outcome.REFUSED_QUEUE_REQUESTS: f"{backlog.requests} of {options.max_queue_requests} requests",
            Outcome.REFUSED_QUEUE_TOKENS: f"{backlog.tokens} of {options.max_queue_tokens} tokens",
            Outcome.REFUSED_QUEUE_BYTES: f"{backlog.nbytes} of {options.max_queue_bytes} bytes",
        }[full]
        retry_s = backlog.work_us / max(1, workers) / 2e6
        return QueueFullError(f"the queue is full: it holds {held}; try again later", retry_after_s=retry_s)

    def _predicted_s(self, ticket: Ticket, workers: Sequence[Progress], *, free: bool) -> float:
        """From now until this request's answer, if it is taken in; 0 where no measurement says."""
        if not self._model.is_measured(self._planner.size(1, ticket.shape)):
            return 0.0
        own_s = self._planner.work_us(1, ticket.shape) / 1e6
        if free:
            return own_s
        left = [max(0.0, each.until - ticket.arrived) if each.busy else 0.0 for each in workers]
        ahead_s = sum(left) + self._backlog.work_ahead_us(ticket) / 1e6
        return max(min(left), ahead_s / len(left)) + own_s
