"""The protocol: what is timed takes turns, round after round, and samples are kept by round.

Warm-up comes first and counts for nothing: every turn runs until its shapes are warm, and the first
run of each shape, which may compile or allocate, is told apart. In a round the turns run in an order
drawn by chance, and then once more in reverse (A B B A), so that a steady drift falls on all alike
and chance alone decides who meets a disturbance: `comparison` stands on that. Before each turn there
is a pause, since the spinning threads of the turn before would slow it, and runs that do not count.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from mha_deploy.errors import BenchError
from mha_deploy.latency import Percentiles, nearest_rank

ROUNDS = 8  # the fewest that give a 99 % interval
COMPARED_ROUNDS = 20
SECONDS = 2.0
# New shapes without an end are no measurement: a first run never counts.
LATE_SHAPES = 100


def _one_shape() -> Hashable:
    return "its shape"


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Turn:
    """Something to time.

    `run` is timed as a whole. `shape` tells the shapes of the next run and `cycle` after how many runs
    they have all come up. `renew`, called before every round, may set it up afresh: where memory lies
    makes two copies of one thing differ, and then that is part of what scatters. `share` is its part of
    the time that a turn gets.
    """

    name: str
    run: Callable[[], object]
    shape: Callable[[], Hashable] = _one_shape
    cycle: int = 1
    renew: Callable[[], None] = _nothing
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Schedule:
    """`seconds` are those recorded of a turn, over all rounds together; a slow one takes longer."""

    seconds: float = SECONDS
    rounds: int = ROUNDS
    pause_s: float = 0.06
    warm_up_runs: int = 5
    unrecorded_runs: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.seconds < math.inf:
            raise BenchError(f"seconds = {self.seconds}; expected a finite number above 0")
        if self.rounds < 1:
            raise BenchError(f"rounds = {self.rounds}; expected 1 or more")

    def to_json(self) -> dict[str, object]:
        return {
            "rounds": self.rounds,
            "seconds": self.seconds,
            "order": "drawn for each round, then reversed",
            "seed": self.seed,
            "pause_s": self.pause_s,
            "unrecorded_runs_a_turn": self.unrecorded_runs,
        }


@dataclass(frozen=True, slots=True)
class Samples:
    """What a turn took, in ms, by round. No warm-up run and no first run of a shape is among them.

    `first_runs_ms` holds the first run of each shape, in the warm-up; `late_first_runs_ms` those of
    shapes that came up only later, which a warm-up should have met.
    """

    name: str
    rounds_ms: tuple[tuple[float, ...], ...]
    warm_up_runs: int = 0
    first_runs_ms: Mapping[str, float] = field(default_factory=dict)
    late_first_runs_ms: Mapping[str, float] = field(default_factory=dict)

    @property
    def merged_ms(self) -> tuple[float, ...]:
        return tuple(sample for samples in self.rounds_ms for sample in samples)

    @property
    def latency(self) -> Percentiles:
        """Percentiles of the merged samples; those of rounds do not average."""
        return Percentiles.of(self.merged_ms)

    @property
    def medians_ms(self) -> tuple[float, ...]:
        return tuple(nearest_rank(samples, 0.5) for samples in self.rounds_ms)

    @property
    def median_ms(self) -> float:
        return nearest_rank(self.merged_ms, 0.5)

    def to_json(self) -> dict[str, object]:
        return {
            "rounds_ms": [list(samples) for samples in self.rounds_ms],
            "warm_up_runs": self.warm_up_runs,
            "first_runs_ms": dict(self.first_runs_ms),
            "late_first_runs_ms": dict(self.late_first_runs_ms),
        }


@dataclass(frozen=True, slots=True)
class Clock:
    """Time in seconds, and how to let it pass."""

    now: Callable[[], float]
    sleep: Callable[[float], None]


WALL = Clock(time.perf_counter, time.sleep)


def measure(
    turns: Sequence[Turn],
    schedule: Schedule,
    *,
    clock: Clock = WALL,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Samples]:
    """Time every turn by the protocol; its samples by its name.

    Raises:
        BenchError: two turns have one name, or one meets new shapes without end.
    """
    names = [turn.name for turn in turns]
    if len(set(names)) < len(names):
        raise BenchError(f"turns are named {', '.join(names)}; expected a name of its own for each")
    draw = random.Random(schedule.seed)
    timers = {turn.name: _Timer(turn, schedule, clock) for turn in turns}
    for turn in turns:
        progress(f"warm-up of {turn.name}")
        timers[turn.name].warm_up()
    for number in range(schedule.rounds):
        order = draw.sample(list(turns), len(turns))
        for turn in order:
            turn.renew()
            timers[turn.name].rounds_ms.append([])
        for turn in (*order, *reversed(order)):
            progress(f"round {number + 1} of {schedule.rounds}: {turn.name}")
            timers[turn.name].take_turn()
    return {name: timer.samples() for name, timer in timers.items()}


class _Timer:
    """One turn's runs and what they took."""

    def __init__(self, turn: Turn, schedule: Schedule, clock: Clock) -> None:
        self._turn, self._schedule, self._clock = turn, schedule, clock
        self._first: dict[Hashable, float] = {}
        self._late: dict[Hashable, float] = {}
        self._warm_up_runs = 0
        self.rounds_ms: list[list[float]] = []

    def warm_up(self) -> None:
        self._warm_up_runs = max(self._schedule.warm_up_runs, self._turn.cycle)
        for _ in range(self._warm_up_runs):
            self._run(self._first)

    def take_turn(self) -> None:
        """One of a round's two turns: half of its time, and a sample at the least."""
        self._clock.sleep(self._schedule.pause_s)
        for _ in range(max(self._schedule.unrecorded_runs, self._turn.cycle)):
            self._run(self._late)
        taken, length = 0, self._schedule.seconds * self._turn.share / self._schedule.rounds / 2
        end = self._clock.now() + length
        while not taken or self._clock.now() < end:
            took_ms, counts = self._run(self._late)
            if counts:
                self.rounds_ms[-1].append(took_ms)
                taken += 1

    def _run(self, first_runs: dict[Hashable, float]) -> tuple[float, bool]:
        """How long a run took, and whether its shape had run before."""
        shape = self._turn.shape()
        start = self._clock.now()
        self._turn.run()
        took_ms = (self._clock.now() - start) * 1e3
        known = shape in self._first or shape in self._late
        if not known:
            first_runs[shape] = took_ms
        if len(self._late) > LATE_SHAPES:
            raise BenchError(
                f"{self._turn.name} met more than {LATE_SHAPES} shapes after its warm-up; expected `cycle` "
                "to be the number of runs after which they have all come up"
            )
        return took_ms, known

    def samples(self) -> Samples:
        return Samples(
            self._turn.name,
            tuple(tuple(samples) for samples in self.rounds_ms),
            self._warm_up_runs,
            {str(shape): took_ms for shape, took_ms in self._first.items()},
            {str(shape): took_ms for shape, took_ms in self._late.items()},
        )
