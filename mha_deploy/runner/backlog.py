"""The requests that wait: bounds at the door, an order, and which of them make the next batch.

Pure data: no thread, no clock and no lock of its own. Whoever calls holds the runner's lock and says
what time it is.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from mha_deploy.ragged import Request
from mha_deploy.runner.heap import LazyHeap
from mha_deploy.runner.options import RunnerOptions
from mha_deploy.runner.planner import Planner
from mha_deploy.runner.ticket import Outcome, Shape, Ticket

_CLASSES = 40


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests to run together, and the lengths that they are padded to (their own in exact mode)."""

    tickets: tuple[Ticket, ...]
    requests: tuple[Request, ...]
    shape: Shape
    reason: str


def _urgency(ticket: Ticket) -> tuple[float, ...]:
    return (ticket.priority, ticket.deadline)


def _is_queued(ticket: Ticket) -> bool:
    return ticket.queued


def _deadline_class(seconds: float) -> int:
    """Which power of two of milliseconds a time allowed lies in; the last class has no deadline."""
    if seconds == math.inf:
        return _CLASSES - 1
    return min(int(max(seconds, 0.0) * 1e3).bit_length(), _CLASSES - 2)


class Backlog:
    """Waiting requests by priority, then earliest deadline, then arrival, and by shape."""

    def __init__(self, options: RunnerOptions, planner: Planner) -> None:
        self._options, self._planner = options, planner
        self._urgent = LazyHeap(_urgency, _is_queued)
        self._oldest = LazyHeap(lambda ticket: ticket.arrived, _is_queued)
        self._shapes: dict[Shape, LazyHeap] = {}
        self._work_us = [[0.0] * _CLASSES for _ in range(options.priority_levels + 1)]
        self._sequence = itertools.count()
        self._turn_of_age = False
        self.requests = self.tokens = self.nbytes = 0

    def full(self, ticket: Ticket) -> Outcome | None:
        """Which bound has no room for this request, if any."""
        options = self._options
        if self.requests + 1 > options.max_queue_requests:
            return Outcome.REFUSED_QUEUE_REQUESTS
        if self.tokens + ticket.tokens > options.max_queue_tokens:
            return Outcome.REFUSED_QUEUE_TOKENS
        if self.nbytes + ticket.nbytes > options.max_queue_bytes:
            return Outcome.REFUSED_QUEUE_BYTES
        return None

    def work_ahead_us(self, ticket: Ticket) -> float:
        """Predicted work of the requests that will go before this one.

        Those of higher priority, and those of its own that were given no more than twice its time.
        """
        own = _deadline_class(ticket.deadline - ticket.arrived)
        higher = sum(sum(level) for level in self._work_us[: ticket.priority])
        return higher + sum(self._work_us[ticket.priority][: own + 1])

    @property
    def work_us(self) -> float:
        return sum(sum(level) for level in self._work_us)

    def add(self, ticket: Ticket) -> None:
        ticket.sequence, ticket.queued = next(self._sequence), True
        self._urgent.push(ticket)
        self._oldest.push(ticket)
        bucket = self._shapes.get(ticket.shape)
        if bucket is None:
            bucket = self._shapes[ticket.shape] = LazyHeap(_urgency, _is_queued)
        bucket.push(ticket)
        self._count(ticket, 1)

    def remove(self, ticket: Ticket) -> None:
        """Take one request out: it was chosen, cancelled, or is too late."""
        ticket.queued = False
        self._urgent.buried()
        self._oldest.buried()
        bucket = self._shapes[ticket.shape]
        bucket.buried()
        if not len(bucket):
            del self._shapes[ticket.shape]
        self._count(ticket, -1)

    def _count(self, ticket: Ticket, sign: int) -> None:
        self.requests += sign
        self.tokens += sign * ticket.tokens
        self.nbytes += sign * ticket.nbytes
        level = self._work_us[ticket.priority]
        own = _deadline_class(ticket.deadline - ticket.arrived)
        level[own] = max(0.0, level[own] + sign * ticket.work_us)

    def first(self) -> Ticket | None:
        """The most urgent request."""
        return self._urgent.first()

    def take(self, now: float, reason: str) -> Batch | None:
        """The next batch, taken out; nothing when no request waits. `reason` is why it is time for one."""
        found = self._head(now)
        if found is None:
            return None
        head, aged = found
        tickets, shape = self._planner.batch(head, self._shapes, self.requests, now)
        for ticket in tickets:
            self.remove(ticket)
        return Batch(tickets, tuple(ticket.request for ticket in tickets), shape, "aged" if aged else reason)

    def _head(self, now: float) -> tuple[Ticket, bool] | None:
        """The most urgent request; in every other batch the oldest, once it has waited long enough."""
        head, oldest = self._urgent.first(), self._oldest.first()
        if head is None or oldest is None:
            return None
        overdue = oldest is not head and now - oldest.arrived >= self._options.max_wait_s
        self._turn_of_age = overdue and not self._turn_of_age
        return (oldest, True) if self._turn_of_age else (head, False)
