"""What a run will send, decided before it starts: when, and of which length."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mha_deploy.errors import InputError
from mha_deploy.load.arrivals import LATEST_S, Arrivals, read_trace
from mha_deploy.load.lengths import Lengths
from mha_deploy.signature import Array

# Every request's times are kept in memory.
MOST = 10**8


@dataclass(frozen=True, slots=True)
class Plan:
    """One request a length. Open loop: `at_s` has each one's intended time in seconds from the start.

    Closed loop: `concurrency` requests are on their way at any moment, the next one being meant for the
    moment that an answer comes; `at_s` is empty. `says` describes the plan to people.
    """

    says: str
    lengths: Array
    at_s: Array
    concurrency: int = 0

    @property
    def requests(self) -> int:
        return len(self.lengths)


_NO_TIMES: Array = np.zeros(0)


def open_plan(arrivals: Arrivals, lengths: Lengths, requests: int, seed: int = 0) -> Plan:
    """`requests` of them at times that do not depend on answers; the same seed gives the same plan.

    Raises:
        InputError: fewer than one request, more than `MOST`, or one that would be due after a year.
    """
    _check(requests, "requests")
    times, sizes = np.random.default_rng(seed).spawn(2)
    drawn, at_s = lengths.draw(requests, sizes), arrivals.times_s(requests, times)
    if not at_s[-1] <= LATEST_S:
        raise InputError(f"{arrivals}: the last request is due after {at_s[-1]:.3g} s; at most a year may be")
    return Plan(f"{arrivals}; lengths {lengths.name}", drawn, at_s)


def closed_plan(concurrency: int, lengths: Lengths, requests: int, seed: int = 0) -> Plan:
    """`requests` of them, `concurrency` at a time.

    Raises:
        InputError: fewer than one request, more than `MOST`, or none at a time.
    """
    _check(requests, "requests")
    _check(concurrency, "requests at a time")
    _, sizes = np.random.default_rng(seed).spawn(2)
    says = f"closed loop, {concurrency} at a time; lengths {lengths.name}"
    return Plan(says, lengths.draw(requests, sizes), _NO_TIMES, concurrency)


def trace_plan(path: Path) -> Plan:
    """What a trace file recorded (see `read_trace`).

    Raises:
        InputError: as `read_trace`.
    """
    at_s, lengths = read_trace(path)
    return Plan(f"open loop, trace {path.name}", lengths, at_s)


def _check(count: int, what: str) -> None:
    if not 1 <= count <= MOST:
        raise InputError(
            f"{count} {what}; expected at least 1" + (f" and at most {MOST}" if count > 1 else "")
        )
