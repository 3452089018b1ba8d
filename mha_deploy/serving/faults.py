"""What an error means to a client: an HTTP status, a gRPC code, when to come again; and how it counts."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from enum import StrEnum

from mha_deploy.errors import (
    DeadlineError,
    FeedError,
    QueueFullError,
    RequestError,
    RunnerClosedError,
)


class Outcome(StrEnum):
    """What became of an infer request: every one that was received ends in exactly one of these."""

    ANSWERED = "answered"
    REFUSED = "refused"  # the client's fault: malformed, not authorized, too large, too slow
    OVERLOADED = "overloaded"  # no room, or no time before its deadline
    EXPIRED = "expired"  # its deadline passed
    CANCELLED = "cancelled"  # the client left
    CLOSING = "closing"  # the server is draining
    FAILED = "failed"  # the session's fault, or the server's


# gRPC's own numbers (google.rpc.Code), so that this module needs no gRPC.
CANCELLED, INVALID_ARGUMENT, DEADLINE_EXCEEDED, NOT_FOUND, PERMISSION_DENIED = 1, 3, 4, 5, 7
RESOURCE_EXHAUSTED, INTERNAL, UNAVAILABLE, UNAUTHENTICATED = 8, 13, 14, 16
_GRPC = {
    401: UNAUTHENTICATED,
    403: PERMISSION_DENIED,
    404: NOT_FOUND,
    408: DEADLINE_EXCEEDED,
    413: RESOURCE_EXHAUSTED,
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One error as clients and counters see it; `retry_after_s` is 0 where coming again is no use."""

    status: int
    grpc_code: int
    outcome: Outcome
    message: str
    retry_after_s: int = 0


def no_control() -> RequestError:
    """What is said to who would load or unload a model."""
    return RequestError("models cannot be loaded or unloaded: this server serves the one it has", 403)


def fault_of(error: BaseException) -> Fault:
    """The fault that `error` is. What is nobody's known fault is told by its type only, since its text
    could hold a path or a value."""
    text = str(error)
    match error:
        case RequestError(status=503):
            fault = Fault(503, UNAVAILABLE, Outcome.OVERLOADED, text, 1)
        case RequestError(status=status):
            fault = Fault(status, _GRPC.get(status, INVALID_ARGUMENT), Outcome.REFUSED, text)
        case FeedError():
            fault = Fault(400, INVALID_ARGUMENT, Outcome.REFUSED, text)
        case QueueFullError(retry_after_s=retry_s):
            fault = Fault(503, RESOURCE_EXHAUSTED, Outcome.OVERLOADED, text, max(1, math.ceil(retry_s)))
        case DeadlineError(predicted=True):
            fault = Fault(503, RESOURCE_EXHAUSTED, Outcome.OVERLOADED, text, 1)
        case DeadlineError():
            fault = Fault(504, DEADLINE_EXCEEDED, Outcome.EXPIRED, text)
        case RunnerClosedError():
            fault = Fault(503, UNAVAILABLE, Outcome.CLOSING, text, 1)
        case asyncio.CancelledError() | ConnectionError():
            fault = Fault(499, CANCELLED, Outcome.CANCELLED, "the client left")
        case _:
            told = f"the session failed to run this request ({type(error).__name__})"
            fault = Fault(500, INTERNAL, Outcome.FAILED, told)
    return fault
