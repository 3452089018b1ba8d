"""A request on its way through a runner, and what its caller holds of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Protocol

from mha_deploy.ragged import Request
from mha_deploy.signature import Array

log = logging.getLogger("mha_deploy.runner")

Shape = tuple[int, int]  # query and key lengths at which a request runs


class Outcome(StrEnum):
    """What became of a request: every one that was received ends in exactly one of these."""

    __hash__ = str.__hash__  # Enum's own is a Python function, and these are keys of hot counters

    ANSWERED = "answered"
    FAILED = "failed"  # the session raised for it
    EXPIRED = "expired"  # its deadline passed
    CANCELLED = "cancelled"
    ABANDONED = "abandoned"  # the runner was closed before its answer
    REFUSED_REQUEST = "refused_request"  # it does not meet the signature
    REFUSED_DEADLINE = "refused_deadline"  # the predicted finish lies beyond it
    REFUSED_QUEUE_REQUESTS = "refused_queue_requests"
    REFUSED_QUEUE_TOKENS = "refused_queue_tokens"
    REFUSED_QUEUE_BYTES = "refused_queue_bytes"
    REFUSED_CLOSED = "refused_closed"


@dataclass(frozen=True, slots=True)
class Answer:
    """`y` [q_len, d_model], the time each phase took, and the batch: its number and its requests.

    Queue: from `submit` until a worker took it. Batch: putting the inputs together. Compute: the
    session's run. Scatter: taking the outputs apart, until the answer was handed over.
    """

    y: Array
    queue_us: float
    batch_us: float
    compute_us: float
    scatter_us: float
    batch_size: int
    batch: int


class Receiver(Protocol):
    """Who is told how a request ended; by whichever thread ends it, once, and under no lock."""

    def answer(self, answer: Answer) -> None: ...

    def fail(self, error: BaseException) -> None: ...


class AnswerFuture(Future[Answer]):
    """A future that stays pending until it is settled, so that it can be cancelled until then.

    Whatever its callbacks raise is logged, also what is no Exception: the thread that settles it goes on.
    """

    def __init__(self) -> None:
        super().__init__()
        self._drop = _settled

    def drops(self, drop: Callable[[], bool]) -> None:
        """What `cancel` calls, and learns from whether the request was still to be answered."""
        self._drop = drop

    def cancel(self) -> bool:
        drop, self._drop = self._drop, _settled
        if not drop():
            return self.cancelled()
        if super().cancel():
            self.set_running_or_notify_cancel()  # or futures.wait and as_completed would not hear of it
        else:  # its holder has said that it runs; nobody else will settle it now
            self.fail(CancelledError())
        return self.cancelled()

    def add_done_callback(self, fn: Callable[[Future[Answer]], object]) -> None:
        super().add_done_callback(fn if self.done() else partial(_call, fn))

    def answer(self, answer: Answer) -> None:
        self._drop = _settled  # or who holds this would hold the request
        with contextlib.suppress(InvalidStateError):  # its holder may have set it
            self.set_result(answer)

    def fail(self, error: BaseException) -> None:
        self._drop = _settled
        with contextlib.suppress(InvalidStateError):
            self.set_exception(error)


def _settled() -> bool:
    return False


def _call(callback: Callable[[Future[Answer]], object], future: Future[Answer]) -> None:
    try:
        callback(future)
    except BaseException:  # SystemExit, say, would end a worker, and keep other callbacks from being called
        log.exception("a callback of a request's future raised")


class Awaited:
    """A future of the running event loop, `waiter`, which may be cancelled; other threads settle it.

    The loop is woken once (`asyncio.wrap_future` takes more, and a future of threads beside this one). After
    `wait_s` seconds the future ends with a TimeoutError, by a timer of the loop: `asyncio.timeout`, which
    cancels the task that waits and catches that again, takes four times as long.
    """

    __slots__ = ("_loop", "_timer", "waiter")

    def __init__(self, wait_s: float = math.inf) -> None:
        self._loop = asyncio.get_running_loop()
        self.waiter: asyncio.Future[Answer] = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None
        if wait_s < math.inf:
            self._timer = self._loop.call_later(wait_s, self._too_late)

    def ended(self) -> None:
        """Nobody waits any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _too_late(self) -> None:
        _unless_done(self.waiter, asyncio.Future.set_exception, TimeoutError())

    def answer(self, answer: Answer) -> None:
        self._hand_over(asyncio.Future.set_result, answer)

    def fail(self, error: BaseException) -> None:
        self._hand_over(asyncio.Future.set_exception, error)

    def _hand_over(self, settle: Callable[..., None], value: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(_unless_done, self.waiter, settle, value)


def _unless_done(waiter: asyncio.Future[Answer], settle: Callable[..., None], value: object) -> None:
    if not waiter.done():  # its task was cancelled
        settle(waiter, value)


@dataclass(eq=False, slots=True)
class Ticket:
    """One admitted request. Times are the runner's clock, in seconds; `work_us` is its predicted cost."""

    request: Request
    receiver: Receiver
    shape: Shape
    tokens: int
    nbytes: int
    priority: int
    arrived: float
    deadline: float
    sequence: int = 0
    work_us: float = 0.0
    queued: bool = False
    settled: bool = False
