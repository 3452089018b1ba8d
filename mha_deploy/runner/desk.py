"""What a runner's threads share, behind one lock: the backlog, deadlines, counters, who is busy.

Receivers are told outside the lock, for futures' callbacks are other people's code; `_claim` makes sure
that each is told, and counted, once.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from mha_deploy.errors import DeadlineError, MhaDeployError, RunnerClosedError
from mha_deploy.ragged import Request
from mha_deploy.runner.admission import Admission, Progress
from mha_deploy.runner.backlog import Backlog, Batch
from mha_deploy.runner.cost import CostModel
from mha_deploy.runner.heap import LazyHeap
from mha_deploy.runner.layout import Layout
from mha_deploy.runner.options import RunnerOptions
from mha_deploy.runner.planner import Planner
from mha_deploy.runner.recorder import Recorder
from mha_deploy.runner.ticket import Answer, Outcome, Ticket
from mha_deploy.signature import Array

RELEASED = Request({}, 0, 0)
# The soloist plays while fewer than this share of what came of late found others in progress: who comes
# during its run has to share the cores with it, and both are late then.
COMPANY = 1 / 8
# How much one request more moves that share.
_COMPANY_STEP = 1 / 16


class Desk:
    """Takes requests in, hands batches out and answers back. Every method may be called by any thread."""

    def __init__(
        self,
        planner: Planner,
        model: CostModel,
        layout: Layout,
        options: RunnerOptions,
        solo_from_us: float = math.inf,
    ) -> None:
        self.lock = threading.Lock()
        self._ready = threading.Condition(self.lock)
        self._alarm = threading.Condition(self.lock)
        self._drained = threading.Condition(self.lock)
        self._planner, self._model, self._layout = planner, model, layout
        self.backlog = Backlog(options, planner)
        self._admission = Admission(planner, model, options, self.backlog)
        self._deadlines = LazyHeap(lambda ticket: ticket.deadline, lambda ticket: not ticket.settled)
        self.open: set[Ticket] = set()
        self.recorder = Recorder()
        self.progress: list[Progress] = []
        self._idle = 0
        # The soloist is no worker: nobody waits for it, and its times say nothing of what workers take.
        self.solo = Progress()
        self._solo_from_us, self._solo_idle = solo_from_us, False
        self._solo_ready = threading.Condition(self.lock)
        self._company = 0.0
        self.closing = self._stopped = False

    def refuse(self, arrived: float) -> None:
        """Count a request that does not meet the signature."""
        with self.lock:
            self.recorder.received += 1
            self.recorder.settled(Outcome.REFUSED_REQUEST, (time.monotonic() - arrived) * 1e6)

    def admit(self, tickets: Sequence[Ticket]) -> None:
        """Take requests in, or refuse the first that cannot be and those after it.

        Raises:
            RunnerClosedError, QueueFullError, DeadlineError: see `BatchRunner.submit`.
        """
        with self.lock:
            for ticket in tickets:
                refusal = self._refusal(ticket)
                self.recorder.received += 1
                if refusal:
                    outcome, error = refusal
                    self.recorder.settled(outcome, (time.monotonic() - ticket.arrived) * 1e6)
                    raise error
                self._enter(ticket)

    def _refusal(self, ticket: Ticket) -> tuple[Outcome, MhaDeployError] | None:
        if self.closing:
            return Outcome.REFUSED_CLOSED, RunnerClosedError("the runner is closing; it takes no requests")
        free = self._idle > self.backlog.requests
        return self._admission.refusal(ticket, self.progress, free=free)

    def _enter(self, ticket: Ticket) -> None:
        self._company += (bool(self.open) - self._company) * _COMPANY_STEP
        self.open.add(ticket)
        self.backlog.add(ticket)
        if ticket.deadline < math.inf:
            self._deadlines.push(ticket)
            if self._deadlines.first() is ticket:
                self._alarm.notify()
        if self._solo_idle and self._is_solo(ticket):
            self._solo_ready.notify()
        elif self._idle:
            self._ready.notify()

    def _is_solo(self, ticket: Ticket) -> bool:
        """Whether this request has all cores to itself, is likely to keep them, and is worth them."""
        nobody_else = self.backlog.requests == 1 and not any(each.busy for each in self.progress)
        return (
            nobody_else
            and self._company < COMPANY
            and self._planner.work_us(1, ticket.shape) >= self._solo_from_us
        )

    def take(self, progress: Progress) -> Batch | None:
        """The next batch for an idle worker, waited for; None once the runner has stopped."""
        return self._taken(progress, self._next, self._await_any)

    def take_alone(self, progress: Progress) -> Batch | None:
        """As `take`, for the soloist: a request that has all cores to itself."""
        return self._taken(progress, self._next_alone, self._await_alone)

    def _taken(
        self, progress: Progress, choose: Callable[[float, bool], Batch | None], wait: Callable[[], None]
    ) -> Batch | None:
        waited = False
        while True:
            with self.lock:
                now = time.monotonic()
                late = self._claim_late(now)
                batch = None if self._stopped else choose(now, waited)
                if batch:
                    self._begin(progress, batch, now)
                elif not late and not self._stopped:
                    wait()
                    waited = True
                stopped = self._stopped
            fail_late(late)
            if batch or stopped:
                return batch

    def _next(self, now: float, waited: bool) -> Batch | None:
        return self.backlog.take(now, "idle" if waited else "backlog")

    def _await_any(self) -> None:
        self._idle += 1
        self._ready.wait()
        self._idle -= 1

    def _next_alone(self, now: float, _waited: bool) -> Batch | None:
        first = self.backlog.first()
        return self.backlog.take(now, "solo") if first is not None and self._is_solo(first) else None

    def _await_alone(self) -> None:
        if self.backlog.requests and self._idle:  # what it was woken for has company now
            self._ready.notify()
        self._solo_idle = True
        self._solo_ready.wait()
        self._solo_idle = False

    def take_again(self, progress: Progress, ticket: Ticket) -> Batch | None:
        """One member of a failed batch, to run alone; None when it is settled by now or out of time."""
        with self.lock:
            now = time.monotonic()
            late = self._claim_late(now)
            again = None
            if not ticket.settled and not self._stopped:
                again = Batch((ticket,), (ticket.request,), ticket.shape, "retry")
                self._begin(progress, again, now)
        fail_late(late)
        return again

    def _begin(self, progress: Progress, batch: Batch, now: float) -> None:
        self.recorder.reasons[batch.reason] += 1
        progress.since = now
        tokens = sum(ticket.tokens for ticket in batch.tickets)
        progress.until = now + self._planner.work_us(len(batch.tickets), batch.shape, tokens) / 1e6

    def answered(self, progress: Progress, batch: Batch, ys: Sequence[Array], times: Sequence[float]) -> None:
        """A batch has run well; `times` are when its inputs, its run and its answers were ready."""
        made, computed = times
        with self.lock:
            now, began = time.monotonic(), progress.since
            progress.since = math.inf
            rows, tokens = len(batch.tickets), sum(ticket.tokens for ticket in batch.tickets)
            fill = self._planner.fill(rows, batch.shape, tokens)
            if progress is not self.solo:
                size = self._planner.size(rows, batch.shape)
                self._model.observe(size, (computed - began) * 1e6, fill)
            phases = ((made - began) * 1e6, (computed - made) * 1e6, (now - computed) * 1e6)
            padded = self._layout.padded_tokens(rows, batch.shape, tokens)
            number = self.recorder.ran(rows, tokens, padded, phases)
            settled = [
                (ticket.receiver, Answer(y, (began - ticket.arrived) * 1e6, *phases, rows, number))
                for ticket, y in zip(batch.tickets, ys, strict=True)
                if self._claim(ticket, Outcome.ANSWERED, now)
            ]
            if settled:
                self.recorder.answered([answer.queue_us for _, answer in settled], phases, now)
        for receiver, answer in settled:
            receiver.answer(answer)

    def failed(self, progress: Progress, tickets: Sequence[Ticket], error: BaseException) -> None:
        """The session raised, and these requests are what it raised for."""
        with self.lock:
            progress.since = math.inf
            now = time.monotonic()
            claimed = [ticket for ticket in tickets if self._claim(ticket, Outcome.FAILED, now)]
        for ticket in claimed:
            ticket.receiver.fail(error)

    def rest(self, progress: Progress) -> None:
        """A worker is done with a batch whose members were settled one by one."""
        with self.lock:
            progress.since = math.inf

    def drop(self, ticket: Ticket) -> bool:
        """The caller wants no answer any more: whether that came before there was one."""
        with self.lock:
            return ticket in self.open and self._claim(ticket, Outcome.CANCELLED, time.monotonic())

    def watch(self) -> None:
        """Answer requests whose deadline passes, until the runner has stopped."""
        while True:
            with self.lock:
                if self._stopped:
                    return
                late = self._claim_late(time.monotonic())
                if not late:
                    first = self._deadlines.first()
                    left = math.inf if first is None else max(0.0, first.deadline - time.monotonic())
                    self._alarm.wait(min(left, threading.TIMEOUT_MAX))
            fail_late(late)

    def refuse_new(self) -> None:
        with self.lock:
            self.closing = True

    def close(self, grace_s: float) -> None:
        """Take nothing more in, wait for what there is up to `grace_s`, fail the rest, stop."""
        end = time.monotonic() + grace_s
        with self.lock:
            self.closing = True
            while self.open and (left := end - time.monotonic()) > 0:
                self._drained.wait(min(left, threading.TIMEOUT_MAX))
            now = time.monotonic()
            abandoned = [each for each in list(self.open) if self._claim(each, Outcome.ABANDONED, now)]
            self._stopped = True
            self._ready.notify_all()
            self._solo_ready.notify_all()
            self._alarm.notify_all()
        for ticket in abandoned:
            ticket.receiver.fail(RunnerClosedError("the runner was closed before this request was answered"))

    def _claim_late(self, now: float) -> list[Ticket]:
        late = []
        while (first := self._deadlines.first()) is not None and first.deadline <= now:
            self._claim(first, Outcome.EXPIRED, now)
            late.append(first)
        return late

    def _claim(self, ticket: Ticket, outcome: Outcome, now: float) -> bool:
        """Settle a request for the books: whether the caller is the one to tell its receiver."""
        if ticket.settled:
            return False
        ticket.settled = True
        if ticket.queued:
            self.backlog.remove(ticket)
        if ticket.deadline < math.inf:
            self._deadlines.buried()
        self.open.discard(ticket)
        self.recorder.settled(outcome, (now - ticket.arrived) * 1e6)
        # A heap may keep the ticket for long; its arrays need not stay.
        ticket.request = RELEASED
        if self.closing and not self.open:
            self._drained.notify_all()
        return True


def fail_late(tickets: Iterable[Ticket]) -> None:
    for ticket in tickets:
        allowed_ms = (ticket.deadline - ticket.arrived) * 1e3
        message = f"no answer within the {allowed_ms:.3g} ms that the request allows"
        ticket.receiver.fail(DeadlineError(message, predicted=False))
