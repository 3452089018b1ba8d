"""Sends a plan and records what becomes of it. Open loop never waits for answers."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from mha_deploy.load.alarm import Alarm
from mha_deploy.load.plan import Plan
from mha_deploy.load.records import Outcome, Records
from mha_deploy.load.target import Target

_LEAD_S = 0.02


@dataclass(frozen=True, slots=True)
class Run:
    """`answers` are those of the sample, by index, as they came; `reasons` count what went wrong.

    `generator_cpu` is the share of one core that the sending thread used while the run lasted.
    """

    records: Records
    answers: dict[int, object]
    reasons: Counter[tuple[Outcome, str]]
    wall_s: float
    generator_cpu: float


@dataclass(slots=True)
class _Driver:
    target: Target
    plan: Plan
    sample: Collection[int]
    max_in_flight: int
    records: Records
    finished: asyncio.Event
    origin: float = 0.0
    next: int = 0
    in_flight: int = 0
    settled: int = 0
    over: bool = False
    answers: dict[int, object] = field(default_factory=dict)
    reasons: Counter[tuple[Outcome, str]] = field(default_factory=Counter)

    def send(self, index: int, intended_s: float) -> None:
        records = self.records
        records.intended_s[index] = intended_s
        if self.in_flight >= self.max_in_flight:
            note = f"{self.max_in_flight} requests were on their way already"
            self.settle(index, Outcome.NOT_SENT, intended_s, note)
            return
        self.in_flight += 1
        records.sent_s[index] = time.monotonic() - self.origin
        self.target.send(index, int(records.lengths[index]), self.done)

    def done(self, index: int, outcome: Outcome, ended_s: float, answer: object, note: str) -> None:
        if self.over:
            return
        self.in_flight -= 1
        if outcome is Outcome.ANSWERED and index in self.sample:
            self.answers[index] = answer
        self.settle(index, outcome, ended_s - self.origin, note)
        if self.plan.concurrency and self.next < self.plan.requests:
            self.next += 1
            self.send(self.next - 1, ended_s - self.origin)

    def settle(self, index: int, outcome: Outcome, ended_s: float, note: str) -> None:
        self.records.ended_s[index], self.records.outcomes[index] = ended_s, outcome
        if note:
            self.reasons[outcome, note] += 1
        self.settled += 1
        if self.settled == self.plan.requests:
            self.finished.set()

    async def open_loop(self) -> None:
        """Send each at its time, however many answers are missing; what is late is sent at once."""
        times, sent = self.plan.at_s, asyncio.Event()

        def ring() -> None:
            now = time.monotonic() - self.origin
            while self.next < len(times) and times[self.next] <= now:
                self.next += 1
                self.send(self.next - 1, float(times[self.next - 1]))
            if self.next == len(times):
                sent.set()
            else:
                alarm.set(self.origin + float(times[self.next]))

        alarm = Alarm(asyncio.get_running_loop(), ring)
        try:
            alarm.set(self.origin + float(times[0]))
            await sent.wait()
        finally:
            alarm.close()

    def closed_loop(self) -> None:
        for _ in range(min(self.plan.concurrency, self.plan.requests)):
            self.next += 1
            self.send(self.next - 1, time.monotonic() - self.origin)

    async def drain(self, drain_s: float) -> None:
        """Until everything is settled, or nothing was for so long; an open loop has that once."""
        seen = -1
        while seen < self.settled:
            seen = self.settled
            try:
                async with asyncio.timeout(drain_s):
                    await self.finished.wait()
                return
            except TimeoutError:
                if not self.plan.concurrency:
                    return


async def drive(
    target: Target,
    plan: Plan,
    *,
    sample: Collection[int] = (),
    max_in_flight: int = 1024,
    drain_s: float = 10.0,
) -> Run:
    """Send everything in `plan` to an open target, and wait for answers.

    Requests beyond `max_in_flight` are not sent, and recorded as such. The wait ends `drain_s` after the
    last request of an open loop was sent, or after the last answer of a closed one; what is missing
    then is recorded as unanswered.
    """
    driver = _Driver(target, plan, sample, max_in_flight, Records.empty(plan.lengths), asyncio.Event())
    driver.origin = time.monotonic() + (0.0 if plan.concurrency else _LEAD_S)
    cpu, began = time.thread_time(), time.monotonic()
    if plan.concurrency:
        driver.closed_loop()
    else:
        await driver.open_loop()
    await driver.drain(drain_s)
    cpu, wall = time.thread_time() - cpu, time.monotonic() - began
    driver.over = True
    records = driver.records
    never = np.isnan(records.intended_s)
    records.intended_s[never], records.outcomes[never] = wall, Outcome.NOT_SENT
    return Run(records, driver.answers, driver.reasons, wall, cpu / max(wall, 1e-9))
