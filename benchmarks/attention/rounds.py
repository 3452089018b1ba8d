"""The protocol of `mha_deploy.benchmark.rounds`, over processes that take turns.

Each process times its own runs, so that the pipe is in no sample. In a round the peers run in an order
drawn by chance and then in reverse, after a pause each, and samples are kept by round. A peer that
fails leaves the rounds, and what it had is dropped.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.attention.connection import Connection, PeerError
from mha_deploy.benchmark import Samples, Schedule

# Unrecorded runs wake threads and fill caches. After so long they have: a long run needs no second.
WARM_S = 0.02


@dataclass(slots=True)
class Taken:
    """Samples by the peer's name, why others have none, and the CPU time that all turns took."""

    samples: dict[str, Samples] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    cpu_s: float = 0.0


def take_rounds(
    case: str,
    connections: Sequence[Connection],
    schedule: Schedule,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> Taken:
    """Time `case`, which every connection has loaded."""
    draw = random.Random(schedule.seed)
    taken = Taken()
    seconds = schedule.seconds / schedule.rounds / 2
    rounds_ms: dict[str, list[list[float]]] = {each.name: [] for each in connections}

    def turn(connection: Connection, unrecorded: int, length_s: float) -> list[float]:
        if connection.name in taken.failed:
            return []
        message = {
            "do": "turn",
            "case": case,
            "seconds": length_s,
            "unrecorded": unrecorded,
            "warm_s": WARM_S,
        }
        try:
            reply = connection.ask(message)
        except PeerError as error:
            taken.failed[connection.name] = str(error)
            return []
        taken.cpu_s += reply["cpu_s"]
        samples: list[float] = reply["ms"]
        return samples

    for connection in connections:
        turn(connection, schedule.warm_up_runs, 0.0)
    for _ in range(schedule.rounds):
        order = draw.sample(list(connections), len(connections))
        for connection in order:
            rounds_ms[connection.name].append([])
        for connection in (*order, *reversed(order)):
            sleep(schedule.pause_s)
            rounds_ms[connection.name][-1] += turn(connection, schedule.unrecorded_runs, seconds)
    taken.samples = {
        name: Samples(name, tuple(map(tuple, rounds)), schedule.warm_up_runs)
        for name, rounds in rounds_ms.items()
        if name not in taken.failed
    }
    return taken
