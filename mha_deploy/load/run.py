"""One load run from start to end: warm up, drive, check, report."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from mha_deploy.errors import InputError
from mha_deploy.load.check import BY_SHAPE, Checker
from mha_deploy.load.drive import Run, drive
from mha_deploy.load.plan import Plan
from mha_deploy.load.report import LoadReport
from mha_deploy.load.target import Target
from mha_deploy.machine import describe
from mha_deploy.serving.server import fastest_loop

_WARM_UP_AT_A_TIME = 4
NORMAL, REAL_TIME = "normal", "real-time"


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a plan is driven. `warm_up` requests go first and are in no figure; `sample` answers, drawn by
    `seed`, are checked; see `drive` for the rest.

    Raises:
        InputError: a number below 0, or nothing allowed in flight.
    """

    warm_up: int = 50
    sample: int = 32
    max_in_flight: int = 1024
    drain_s: float = 10.0
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.warm_up, self.sample, self.drain_s, self.seed) < 0 or self.max_in_flight < 1:
            raise InputError(f"{self}; expected numbers of at least 0, and max_in_flight of at least 1")


DEFAULT_OPTIONS = LoadOptions()


def run_load(
    target: Target,
    plan: Plan,
    options: LoadOptions = DEFAULT_OPTIONS,
    checker: Checker = BY_SHAPE,
) -> LoadReport:
    """Drive `plan` against `target`, check a sample of the answers, and report.

    Raises:
        InputError: the target cannot be reached, or takes other inputs than the checker's bundle.
    """
    checker.compare(target.inputs)
    chosen = np.random.default_rng(options.seed).permutation(plan.requests)[: options.sample]
    sample = frozenset(int(index) for index in chosen)
    with _ahead_of_others() as priority, asyncio.Runner(loop_factory=fastest_loop()) as loop:
        run = loop.run(_driven(target, plan, options, sample))
    return LoadReport.of(
        run.records,
        target=target.name,
        plan=plan.says,
        wall_s=run.wall_s,
        generator_cpu=run.generator_cpu,
        check=checker(target, plan.lengths, run.answers),
        reasons=run.reasons,
        machine=describe() | {"generator_priority": priority},
    )


@contextmanager
def _ahead_of_others() -> Iterator[str]:
    """This thread at real-time priority where the system allows it: "real-time", else "normal".

    Where the target keeps every core busy, a sender that waits for its turn is late by far more than it
    needs to send. It needs little; threads that it starts do not inherit the priority (sched(7)).
    """
    thread = threading.get_native_id()
    try:
        before = os.sched_getscheduler(thread), os.sched_getparam(thread)
        os.sched_setscheduler(thread, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except (AttributeError, OSError):
        yield NORMAL
        return
    try:
        yield REAL_TIME
    finally:
        os.sched_setscheduler(thread, *before)


async def _driven(target: Target, plan: Plan, options: LoadOptions, sample: frozenset[int]) -> Run:
    await target.open(plan.lengths)
    try:
        if options.warm_up:
            warm = np.resize(plan.lengths, options.warm_up)
            first = replace(plan, lengths=warm, at_s=plan.at_s[:0], concurrency=_WARM_UP_AT_A_TIME)
            await drive(target, first, drain_s=options.drain_s)
        return await drive(
            target, plan, sample=sample, max_in_flight=options.max_in_flight, drain_s=options.drain_s
        )
    finally:
        await target.close()
