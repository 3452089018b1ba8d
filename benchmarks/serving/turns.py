"""A round: every system started anew, then trials in turns, so that what neighbours do hits all alike."""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import results
from staircase import Staircase
from systems import Started, System, started

from mha_deploy.bundle import Bundle
from mha_deploy.errors import InputError
from mha_deploy.latency import figure
from mha_deploy.load import (
    Arrivals,
    Lengths,
    LoadOptions,
    ReferenceChecker,
    Trial,
    closed_plan,
    open_plan,
    run_load,
)

LEAST = 460  # a p99 takes 459 samples
# Below this share of what one client alone gets through, no rate is tried.
LOWEST = 1 / 16
# More trials than the round's that a system may take on its way to its rate, and that may not count.
_LONGEST = 16


@dataclass(frozen=True, slots=True)
class Conditions:
    """The same for all: requests of these lengths, trials of so long, `trials` of each system in a round."""

    lengths: Lengths
    seconds: float
    trials: int
    p99_ms: float


class Served(NamedTuple):
    """What a system serves, and what holds its answers to that."""

    bundle: Bundle
    checker: ReferenceChecker


class _Tried(NamedTuple):
    """A trial, the CPU time of a request in it, and whether the walk had come to its rate before."""

    trial: Trial
    cpu_ms: float
    settled: bool

    @property
    def tells(self) -> bool:
        return self.settled and self.trial.counts

    def to_json(self) -> dict[str, Any]:
        trial = self.trial
        return {
            "rate_per_s": trial.rate_per_s,
            "held": trial.held,
            "why_not": trial.why_not,
            "tells": self.tells,
            "cpu_ms": figure(self.cpu_ms),
            "report": trial.report.to_json(),
        }


class _Player:
    """A system in a round, warm, and stopped but for its turns. One client has asked, alone, before that."""

    def __init__(
        self, system: System, it: Started, checker: ReferenceChecker, conditions: Conditions
    ) -> None:
        self.system = system
        self._it, self._checker, self._conditions = it, checker, conditions
        plan = closed_plan(1, conditions.lengths, LEAST)
        self._alone = run_load(it.target, plan, LoadOptions(warm_up=200, sample=8), checker)
        self._tried: list[_Tried] = []
        it.pause()

        # Then no rate is tried in this round, unless an earlier one has shown that some hold.
        late = self._alone.latency.percentiles_ms["p99"] > conditions.p99_ms
        self._late = late or not self._alone.outcomes["answered"]

    def first_steps(self) -> Staircase:
        """From half of what one client got."""
        alone_per_s = self._alone.answered_per_s
        return Staircase(alone_per_s / 2, alone_per_s * LOWEST)

    def goes_on(self, stairs: Staircase) -> bool:
        trials = self._conditions.trials
        enough = sum(each.tells for each in self._tried) >= trials or len(self._tried) >= trials + _LONGEST
        return not (enough or stairs.lost or (self._late and not stairs.settled))

    def step(self, stairs: Staircase, seed: int) -> None:
        """Take the next trial. One that does not count, for the generator's sake, is no step."""
        rate, settled = stairs.rate, stairs.settled
        count = max(LEAST, round(rate * self._conditions.seconds))
        plan = open_plan(Arrivals("poisson", rate), self._conditions.lengths, count, seed)
        driving = LoadOptions(warm_up=100, sample=8, seed=seed)
        self._it.resume()
        before_s = self._it.cpu_s()
        report = run_load(self._it.target, plan, driving, self._checker)
        cpu_s = self._it.cpu_s() - before_s
        self._it.pause()
        trial = Trial.judged(rate, report, self._conditions.p99_ms)
        self._tried.append(_Tried(trial, cpu_s * 1e3 / (count + driving.warm_up), settled))
        if trial.counts:
            stairs.went(trial.held)

    def held(self, stairs: Staircase) -> dict[str, Any]:
        """The geometric mean of the rates that it walked about, and all its trials."""
        rates = [each.trial.rate_per_s for each in self._tried if each.tells]
        rate = 0.0 if stairs.lost or not rates else statistics.geometric_mean(rates)
        not_counted = sum(not each.trial.counts for each in self._tried)
        return {
            "rate_per_s": rate,
            "limited_by_generator": 2 * not_counted > len(self._tried),
            "alone": self._alone.to_json(),
            "trials": [each.to_json() for each in self._tried],
        }


def play(
    systems: Sequence[System],
    served: Callable[[System], Served],
    conditions: Conditions,
    stairs: dict[System, Staircase],
    seed: int,
) -> dict[str, Any]:
    """What each system held in a round, by its name. `stairs` are where earlier rounds left them."""
    order = random.Random(seed)
    found: dict[System, dict[str, Any]] = {}
    players: list[_Player] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        for system in order.sample(systems, len(systems)):
            bundle, checker = served(system)
            try:
                log = Path(folder) / str(system)
                it = stack.enter_context(started(system, bundle.folder, bundle.signature, log))
                player = _Player(system, it, checker, conditions)
            except InputError as error:
                found[system] = _none(system, error)
                continue
            stairs.setdefault(system, player.first_steps())
            players.append(player)
        turn = 0
        while wanting := [
            each for each in players if each.system not in found and each.goes_on(stairs[each.system])
        ]:
            turn += 1
            for player in order.sample(wanting, len(wanting)):
                try:
                    player.step(stairs[player.system], seed * 1000 + turn)
                except InputError as error:
                    found[player.system] = _none(player.system, error)
        for player in players:
            found.setdefault(player.system, player.held(stairs[player.system]))
    for system in systems:
        print(f"{system}: {found[system]['rate_per_s']:.1f}/s", file=sys.stderr, flush=True)
    return {str(system): found[system] for system in systems}


def _none(system: System, error: InputError) -> dict[str, Any]:
    """A system that did not start or broke off held nothing, for that reason."""
    reason = results.without_paths(str(error))
    print(f"{system}: {reason}", file=sys.stderr, flush=True)
    return results.failure(reason)
