"""Latency over a grid of sizes, beside ceilings that are measured in the same rounds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mha_deploy import machine
from mha_deploy.benchmark.bounds import RULE, Bound, bound_of, traffic_bytes
from mha_deploy.benchmark.ceilings import COMPUTE, Ceilings, Yardsticks
from mha_deploy.benchmark.ceilings_cpu import cpu_yardsticks
from mha_deploy.benchmark.ceilings_gpu import gpu_yardsticks
from mha_deploy.benchmark.conditions import Conditions, watch
from mha_deploy.benchmark.rounds import ROUNDS, SECONDS, Samples, Schedule, measure
from mha_deploy.benchmark.turns import Grid, cells_of, default_grid, random_feeds, session_turn
from mha_deploy.bundle import Bundle
from mha_deploy.cases import describe
from mha_deploy.errors import BenchError
from mha_deploy.latency import (
    CONFIDENCE,
    PERCENTILE_RULE,
    Interval,
    Percentiles,
    figure,
    median_interval,
    nearest_rank,
    samples_needed,
)
from mha_deploy.manifest import Artifact
from mha_deploy.sessions import DEFAULT_PLACEMENT, Placement, Session
from mha_deploy.sessions.stages import StagedSession, Stages
from mha_deploy.signature import Feeds, Sizes

FORMAT = 1
STAGED_RUNS = 50


@dataclass(frozen=True, slots=True)
class Cell:
    """One size of the grid. Throughput counts tokens as given, padding none; FLOPs see `spec.flops`.

    `took_ms` is what the ceilings are held against: the median latency, or on a device, where `stages`
    are known, the median of its computing alone.
    """

    sizes: Mapping[str, int]
    tokens: int
    flops: int
    traffic_bytes: int
    samples: Samples
    bound: Bound
    ceiling_gflops: float
    stages: tuple[Stages, ...]
    took_ms: float

    @property
    def latency(self) -> Percentiles:
        return self.samples.latency

    @property
    def p50_interval_ms(self) -> Interval:
        """The median's 99 % interval, over rounds."""
        return median_interval(self.samples.medians_ms)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.samples.median_ms * 1e3

    @property
    def gflops(self) -> float:
        return self.flops / self.took_ms / 1e6

    @property
    def gb_s(self) -> float:
        return self.traffic_bytes / self.took_ms / 1e6

    @property
    def ceiling_share(self) -> float:
        return self.gflops / self.ceiling_gflops

    @property
    def first_run_ms(self) -> float:
        return max(self.samples.first_runs_ms.values())

    def to_json(self) -> dict[str, Any]:
        return {
            "sizes": dict(self.sizes),
            "p50_ms": figure(self.latency.p50_ms),
            "p50_interval_ms": self.p50_interval_ms.to_json(),
            "p90_ms": figure(self.latency.p90_ms),
            "p99_ms": figure(self.latency.p99_ms),
            "samples": self.latency.samples,
            "tokens_per_s": self.tokens_per_s,
            "flops": self.flops,
            "traffic_bytes": self.traffic_bytes,
            "gflops": self.gflops,
            "gb_s": self.gb_s,
            "ceiling_share": self.ceiling_share,
            "bound": self.bound.to_json(),
            "first_run_ms": self.first_run_ms,
            "device_stages": [asdict(stages) for stages in self.stages],
            **self.samples.to_json(),
        }


@dataclass(frozen=True, slots=True)
class BenchReport:
    """What was measured, and what it stands on."""

    subject: str
    artifact: str
    precision: str
    provider: str
    device: str
    threads: int
    cells: tuple[Cell, ...]
    ceilings: Ceilings
    conditions: Conditions
    schedule: Schedule
    machine: Mapping[str, object]

    @property
    def title(self) -> str:
        """What ran where, on one line."""
        threads = f"{self.threads} thread" + ("s" if self.threads > 1 else "")
        return f"{self.subject}: {self.artifact} ({self.precision}, {self.provider}, {threads})"

    def notices(self) -> list[str]:
        """What a reader of the figures should know: of the machine, and of sizes that went wrong."""
        late = [
            f"{describe(cell.sizes)}: the first run of {shape} came after the warm-up ({took_ms:.1f} ms, not "
            "counted)"
            for cell in self.cells
            for shape, took_ms in cell.samples.late_first_runs_ms.items()
        ]
        above = [
            f"{describe(cell.sizes)} ran above its ceiling: believe neither figure, measure for longer"
            for cell in self.cells
            if cell.bound.share > 1
        ]
        return fallback_notices(self.device, self.provider) + self.conditions.notices() + late + above

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "subject": self.subject,
            "artifact": self.artifact,
            "precision": self.precision,
            "provider": self.provider,
            "device_asked_for": self.device,
            "threads": self.threads,
            "ceiling": self.ceilings.to_json(),
            "protocol": {
                **self.schedule.to_json(),
                "warm_up_runs": self.schedule.warm_up_runs,
                "percentile_rule": PERCENTILE_RULE,
                "samples_needed": {f"p{q:g}": samples_needed(q / 100) for q in (50, 90, 99)},
                "interval": f"{CONFIDENCE:.0%}, order statistics of the rounds' medians",
                "bound_rule": RULE,
            },
            "machine": dict(self.machine),
            "conditions": self.conditions.to_json(),
            "notices": self.notices(),
            "cells": [cell.to_json() for cell in self.cells],
        }


def bench(
    bundle: Bundle,
    artifact: str = "",
    *,
    grid: Grid | None = None,
    seconds: float = SECONDS,
    rounds: int = ROUNDS,
    placement: Placement = DEFAULT_PLACEMENT,
    progress: Callable[[str], None] = lambda _: None,
) -> BenchReport:
    """Measure one artifact over `grid` (sizes by dim name; others at a default).

    `seconds` is the time measured in each cell, over all `rounds` together.

    Raises:
        FeedError: the grid names an unknown dim or a size out of range.
        BenchError: `seconds` or `rounds` is too small, or the artifact has other dims than the block.
    """
    spec, chosen, schedule = (
        bundle.spec,
        bundle.artifact(artifact, placement),
        Schedule(seconds=seconds, rounds=rounds),
    )
    check_dims(bundle, chosen)
    cells = cells_of(spec, grid or {}, default_grid(spec))
    with (
        bundle.open_padded_session(chosen.name, placement) as session,
        _yardsticks(session, placement) as yardsticks,
    ):
        feeds = {describe(sizes): random_feeds(session.signature, sizes) for sizes in cells}
        turns = [session_turn(name, session, [each]) for name, each in feeds.items()]
        end = watch()
        taken = measure([*turns, *yardsticks.turns], schedule, progress=progress)
        ceilings = yardsticks.read(taken)
        conditions = end(taken[COMPUTE].medians_ms)
        stages = {name: stages_of(session, each) for name, each in feeds.items()}
        return BenchReport(
            subject=spec.name,
            artifact=chosen.name,
            precision=chosen.precision.value,
            provider=session.provider,
            device=placement.device,
            threads=placement.threads or machine.usable_cpus(),
            cells=tuple(
                cell_of(
                    ceilings,
                    sizes,
                    tokens=sizes[spec.dims[0].name] * sizes[spec.query_axis],
                    flops=spec.flops(sizes),
                    traffic=traffic_bytes(bundle, chosen, sizes),
                    samples=taken[describe(sizes)],
                    stages=stages[describe(sizes)],
                )
                for sizes in cells
            ),
            ceilings=ceilings,
            conditions=conditions,
            schedule=schedule,
            machine=machine.describe(),
        )


def fallback_notices(device: str, provider: str) -> list[str]:
    """Where another device was asked for than the one that ran."""
    fell_back = device == "cuda" and provider.startswith("CPU")
    return [f"asked for {device}, which is not to be had here: ran on {provider}"] if fell_back else []


def check_dims(bundle: Bundle, artifact: Artifact) -> None:
    """Refuse an artifact whose inputs have other dims than the block's: the grid says nothing of them."""
    known, own = ([dim.name for dim in each.dims] for each in (bundle.spec, artifact.signature))
    if own != known:
        raise BenchError(
            f"artifact {artifact.name!r} has dims {', '.join(own)}; the grid is one of {', '.join(known)}: "
            "bench another artifact"
        )


@contextlib.contextmanager
def _yardsticks(session: Session, placement: Placement) -> Iterator[Yardsticks]:
    """Those of what `session` runs on."""
    if isinstance(session, StagedSession):
        yield gpu_yardsticks(session.precision)
        return
    with cpu_yardsticks(placement) as found:
        yield found


def stages_of(session: Session, feeds: Feeds) -> tuple[Stages, ...]:
    """Runs on a device with an emptied cache, copies apart from computing; none for a session on the host."""
    if not isinstance(session, StagedSession):
        return ()
    return tuple(session.run_in_stages(feeds, cold=True) for _ in range(STAGED_RUNS))


def cell_of(
    ceilings: Ceilings,
    sizes: Sizes,
    *,
    tokens: int,
    flops: int,
    traffic: int,
    samples: Samples,
    stages: tuple[Stages, ...],
) -> Cell:
    """A size held against the ceilings: its latency, or on a device the time of its computing alone.

    The ceilings are the device's then, and copies go over another road.
    """
    took_ms = nearest_rank([each.compute_ms for each in stages], 0.5) if stages else samples.median_ms
    return Cell(
        sizes=sizes,
        tokens=tokens,
        flops=flops,
        traffic_bytes=traffic,
        samples=samples,
        bound=bound_of(flops, traffic, ceilings, took_ms),
        ceiling_gflops=ceilings.gflops,
        stages=stages,
        took_ms=took_ms,
    )
