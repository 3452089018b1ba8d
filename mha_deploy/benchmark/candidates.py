"""Two candidates against each other: artifacts, placements or bundles, one size of the grid after another."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from mha_deploy import machine
from mha_deploy.benchmark.block import block_of, differences
from mha_deploy.benchmark.comparison import RULE, Comparison, check_rounds, compare
from mha_deploy.benchmark.conditions import Conditions, drift_of, watch
from mha_deploy.benchmark.report import FORMAT, check_dims
from mha_deploy.benchmark.rounds import COMPARED_ROUNDS, SECONDS, Schedule, measure
from mha_deploy.benchmark.turns import (
    Grid,
    ReopenedSession,
    cells_of,
    optimum,
    random_feeds,
    session_turn,
)
from mha_deploy.benchmark.where import fallback_notices
from mha_deploy.bundle import Bundle
from mha_deploy.errors import BenchError, BundleError
from mha_deploy.sessions import Placement, placed
from mha_deploy.signature import Sizes
from mha_deploy.spec import AttentionSpec

# A session that takes longer to open is opened once, not before every round.
REOPENED_BELOW_S = 0.5
GRAMMAR = "ARTIFACT, DIR or DIR:ARTIFACT, each with @threads=N, @device=cuda or @cuda-graphs after it"


@dataclass(frozen=True, slots=True)
class Candidate:
    """What runs where; `name` is how it was asked for."""

    name: str
    bundle: Bundle
    artifact: str
    placement: Placement

    @property
    def device(self) -> str:
        """The one asked for, by the artifact's own settings where they name one."""
        return placed(self.bundle.artifact(self.artifact), self.placement).device


@dataclass(frozen=True, slots=True)
class ContestReport:
    """One comparison a size; `reopened` tells whether every round had sessions of its own, `blocks` in
    what the blocks differ."""

    devices: tuple[str, str]
    providers: tuple[str, str]
    comparisons: tuple[tuple[Mapping[str, int], Comparison], ...]
    reopened: bool
    conditions: Conditions
    schedule: Schedule
    machine: Mapping[str, object]
    blocks: tuple[str, ...] = ()

    def notices(self) -> list[str]:
        """What a reader of the figures should know."""
        fallbacks = [
            notice
            for pair in zip(self.devices, self.providers, strict=True)
            for notice in fallback_notices(*pair)
        ]
        return [*self.blocks, *fallbacks, *self.conditions.notices()]

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "ratio": "time of b over time of a",
            "rule": RULE,
            "protocol": {**self.schedule.to_json(), "reopened_each_round": self.reopened},
            "devices_asked_for": list(self.devices),
            "providers": list(self.providers),
            "machine": dict(self.machine),
            "conditions": self.conditions.to_json(),
            "notices": self.notices(),
            "comparisons": [
                {"sizes": dict(sizes), **comparison.to_json()} for sizes, comparison in self.comparisons
            ],
        }


def candidate(text: str, home: Bundle | None, placement: Placement) -> Candidate:
    """What `text` names: an artifact of `home`, or of another bundle; see GRAMMAR.

    Raises:
        BundleError: no such bundle or artifact.
        BenchError: the text cannot be read.
    """
    parent, slash, last = text.rpartition("/")  # a folder further up may have an @ of its own
    name, *options = last.split("@")
    for option in options:
        placement = _placed(option, placement, text)
    bundle, artifact = _found(parent + slash + name, home, text)
    return Candidate(text, bundle, bundle.artifact(artifact, placement).name, placement)


def _found(name: str, home: Bundle | None, text: str) -> tuple[Bundle, str]:
    if home and any(artifact.name == name for artifact in home.artifacts):
        return home, name
    folder, colon, artifact = name.rpartition(":")
    if colon and Path(folder).is_dir():
        return Bundle.load(folder), artifact
    if name and Path(name).is_dir():
        return Bundle.load(name), ""
    known = f"an artifact of {home.folder} ({_listed(home)})" if home else "given without a bundle"
    raise BundleError(f"{text!r} is neither {known} nor a bundle's folder; expected {GRAMMAR}")


def _listed(bundle: Bundle) -> str:
    return ", ".join(artifact.name for artifact in bundle.artifacts)


def _placed(option: str, placement: Placement, text: str) -> Placement:
    key, _, value = option.partition("=")
    if key == "threads" and re.fullmatch("[0-9]{1,6}", value):
        return replace(placement, threads=int(value))
    if key == "device":
        return replace(placement, device=value)
    if option == "cuda-graphs":
        return replace(placement, cuda_graphs=True)
    raise BenchError(f"{text!r} has {'@' + option!r}; expected {GRAMMAR}")


def contest(
    a: Candidate,
    b: Candidate,
    *,
    grid: Grid | None = None,
    seconds: float = SECONDS,
    rounds: int = COMPARED_ROUNDS,
    progress: Callable[[str], None] = lambda _: None,
) -> ContestReport:
    """Hold `b` against `a` over `grid` (sizes by dim name; others at the dim's opt).

    `seconds` is the time measured of each candidate at each size. Each size has an interval of its
    own: of a hundred sizes that do not differ, one may be called different. The sizes have their rounds
    one after another, so each is looked at for drift by itself, and the largest is reported.

    Raises:
        FeedError: the grid names an unknown dim or a size out of range for either.
        BenchError: too few rounds, or the candidates' dims differ.
    """
    schedule = Schedule(seconds=seconds, rounds=rounds)
    check_rounds(rounds)
    cells = cells_of(a.bundle.spec, grid or {}, optimum(a.bundle.spec))
    for each in (a, b):
        check_dims(each.bundle, each.bundle.artifact(each.artifact))
        for sizes in cells:
            _check_sizes(each, sizes)
    openers = [partial(each.bundle.open_padded_session, each.artifact, each.placement) for each in (a, b)]
    start = time.perf_counter()
    with openers[0]() as one, openers[1]() as two:
        reopened = (time.perf_counter() - start) / 2 < REOPENED_BELOW_S
        providers = (one.provider, two.provider)
    end, found = watch(), []
    for sizes in cells:
        with contextlib.ExitStack() as stack:
            turns = []
            for side, each, opener in zip("AB", (a, b), openers, strict=True):
                name = f"{side}: {each.name}"
                if reopened:
                    session = ReopenedSession(opener, partial(random_feeds, sizes=sizes))
                    turns.append(stack.enter_context(session).turn(name))
                else:
                    kept = stack.enter_context(opener())
                    turns.append(session_turn(name, kept, [random_feeds(kept.signature, sizes)]))
            taken = measure(turns, schedule, progress=progress)
        found.append((sizes, compare(*taken.values())))
    of_a = [comparison.a.medians_ms for _, comparison in found]
    return ContestReport(
        (a.device, b.device),
        providers,
        tuple(found),
        reopened,
        end(max(of_a, key=lambda medians_ms: abs(drift_of(medians_ms)))),
        schedule,
        machine.describe(),
        tuple(_block_notices(a.bundle.spec, b.bundle.spec)),
    )


def _block_notices(a: AttentionSpec, b: AttentionSpec) -> list[str]:
    """Where not one block is computed twice: a ratio of two tells nothing of how well either runs."""
    of_a, of_b = block_of(a), block_of(b)
    differ = [f"{name} {of_a[name]!r} and {of_b[name]!r}" for name in differences(of_a, of_b)]
    return [f"A and B compute different blocks: {', '.join(differ)}"] if differ else []


def _check_sizes(candidate: Candidate, sizes: Sizes) -> None:
    spec = candidate.bundle.spec
    cells_of(spec, {name: [size] for name, size in sizes.items()}, optimum(spec))
