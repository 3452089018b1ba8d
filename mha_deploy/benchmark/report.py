"""Latency over a grid of sizes, beside ceilings that are measured in the same rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mha_deploy import machine
from mha_deploy.benchmark.block import block_of
from mha_deploy.benchmark.bounds import RULE, Bound, bound_of, traffic_bytes
from mha_deploy.benchmark.ceilings import COMPUTE, Ceilings
from mha_deploy.benchmark.conditions import Conditions, watch
from mha_deploy.benchmark.rounds import ROUNDS, SECONDS, Samples, Schedule, measure
from mha_deploy.benchmark.turns import Grid, cells_of, default_grid, random_feeds, session_turn
from mha_deploy.benchmark.where import fallback_notices, route_notices, stages_of, yardsticks_of
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
from mha_deploy.sessions import DEFAULT_PLACEMENT, Placement, placed
from mha_deploy.sessions.stages import Stages
from mha_deploy.signature import Sizes

FORMAT = 2


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
    """What was measured, and what it stands on. `block` is what `block_of` tells of the subject.

    `device` and `threads` are those that hold for the session, `routes` what to know of one that is two.
    """

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
    block: Mapping[str, object]
    routes: tuple[str, ...] = ()

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
        placed_at = [*fallback_notices(self.device, self.provider), *self.routes]
        return placed_at + self.conditions.notices() + late + above

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "subject": self.subject,
            "block": dict(self.block),
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
    own = placed(chosen, placement)
    cells = cells_of(spec, grid or {}, default_grid(spec))
    with (
        bundle.open_padded_session(chosen.name, placement) as session,
        yardsticks_of(session, own) as yardsticks,
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
            device=own.device,
            threads=own.threads or machine.usable_cpus(),
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
            block=block_of(spec),
            routes=tuple(route_notices(session, chosen, placement)),
        )


def check_dims(bundle: Bundle, artifact: Artifact) -> None:
    """Refuse an artifact whose inputs have other dims than the block's: the grid says nothing of them."""
    known, own = ([dim.name for dim in each.dims] for each in (bundle.spec, artifact.signature))
    if own != known:
        raise BenchError(
            f"artifact {artifact.name!r} has dims {', '.join(own)}; the grid is one of {', '.join(known)}: "
            "bench another artifact"
        )


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
