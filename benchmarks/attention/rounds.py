"""The protocol of `mha_deploy.benchmark.rounds`, over processes that take turns.

Each process times its own runs, so that the pipe is in no sample. A round goes through all cases, so that
a neighbour's busy minute falls on a few rounds of each rather than on every round of one. In a case the
peers run in an order drawn by chance and then in reverse, after a pause each, and samples are kept by
round. A peer that fails leaves the rounds of that case, and what it had there is dropped; one whose process
ends leaves all.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.attention.connection import Connection, PeerError
from mha_deploy.benchmark import Samples, Schedule

# Unrecorded runs wake threads and fill caches. After so long they have: a long run needs no second.
WARM_S = 0.02


@dataclass(slots=True)
class Taken:
    """Of one case: samples by the peer's name, and why others have none."""

    samples: dict[str, Samples] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def take_rounds(
    cases: Mapping[str, Sequence[Connection]],
    schedule: Schedule,
    *,
    sleep: Callable[[float], None] = time.sleep,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Taken]:
    """Time each case with the connections that it has, all of which have loaded it."""
    draw = random.Random(schedule.seed)
    taken = {case: Taken() for case in cases}
    rounds_ms: dict[str, dict[str, list[list[float]]]] = {
        case: {each.name: [] for each in connections} for case, connections in cases.items()
    }
    seconds = schedule.seconds / schedule.rounds / 2
    for case, connections in cases.items():
        for connection in connections:
            _turn(connection, case, taken[case], schedule.warm_up_runs, 0.0)
    for number in range(schedule.rounds):
        progress(f"round {number + 1} of {schedule.rounds}")
        for case, connections in cases.items():
            order = draw.sample(list(connections), len(connections))
            for connection in order:
                rounds_ms[case][connection.name].append([])
            for connection in (*order, *reversed(order)):
                sleep(schedule.pause_s)
                samples = _turn(connection, case, taken[case], schedule.unrecorded_runs, seconds)
                rounds_ms[case][connection.name][-1] += samples
    for case, its in taken.items():
        its.samples = {
            name: Samples(name, tuple(map(tuple, rounds)), schedule.warm_up_runs)
            for name, rounds in rounds_ms[case].items()
            if name not in its.failed
        }
    return taken


def _turn(connection: Connection, case: str, taken: Taken, unrecorded: int, length_s: float) -> list[float]:
    """The times of one turn, in ms; none of a peer that has failed in this case, now or before."""
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
    samples: list[float] = reply["ms"]
    return samples
