"""Latency over a grid of sizes, beside a MatMul ceiling measured in the same run.

Protocol: all cells and the ceiling take turns, round after round; before each turn a pause (a
runtime's spinning threads would slow the next one) and two runs that do not count. Percentiles come
from the raw samples of all rounds, throughput from the median.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mha_deploy import ceiling, machine
from mha_deploy.bundle import Bundle
from mha_deploy.cases import describe
from mha_deploy.errors import FeedError
from mha_deploy.latency import PERCENTILE_RULE, Percentiles, nearest_rank, samples_needed
from mha_deploy.precision import numpy_dtype
from mha_deploy.sessions import DEFAULT_PLACEMENT, Placement, Session
from mha_deploy.signature import Array, Feeds, Signature, Sizes
from mha_deploy.spec import AttentionSpec

PAUSE_SECONDS = 0.06
UNRECORDED_RUNS = 2
ROUNDS = 6
SAMPLES_A_TURN = 2  # at the least: enough, over all rounds, for a median
DEFAULT_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Cell:
    """One size of the grid. Throughput counts tokens as given, padding none; FLOPs see `flops`."""

    sizes: Mapping[str, int]
    latency: Percentiles
    tokens_per_s: float
    gflops: float
    ceiling_share: float
    first_run_ms: float
    samples_ms: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "sizes": dict(self.sizes),
            "p50_ms": _figure(self.latency.p50_ms),
            "p90_ms": _figure(self.latency.p90_ms),
            "p99_ms": _figure(self.latency.p99_ms),
            "samples": self.latency.samples,
            "tokens_per_s": self.tokens_per_s,
            "gflops": self.gflops,
            "ceiling_share": self.ceiling_share,
            "first_run_ms": self.first_run_ms,
            "samples_ms": list(self.samples_ms),
        }


@dataclass(frozen=True, slots=True)
class BenchReport:
    """What was measured, and what it stands on."""

    subject: str
    artifact: str
    precision: str
    provider: str
    threads: int
    cells: tuple[Cell, ...]
    ceiling_gflops: float
    ceiling: str
    machine: Mapping[str, object]

    def to_json(self) -> dict[str, Any]:
        return {
            "subject": self.subject,
            "artifact": self.artifact,
            "precision": self.precision,
            "provider": self.provider,
            "threads": self.threads,
            "ceiling": {"what": self.ceiling, "gflops": self.ceiling_gflops},
            "protocol": {
                "rounds": ROUNDS,
                "pause_s": PAUSE_SECONDS,
                "unrecorded_runs_a_turn": UNRECORDED_RUNS,
                "percentile_rule": PERCENTILE_RULE,
                "samples_needed": {f"p{q:g}": samples_needed(q / 100) for q in (50, 90, 99)},
            },
            "machine": dict(self.machine),
            "cells": [cell.to_json() for cell in self.cells],
        }


def bench(
    bundle: Bundle,
    artifact: str = "",
    *,
    grid: Mapping[str, Sequence[int]] | None = None,
    seconds: float = DEFAULT_SECONDS,
    placement: Placement = DEFAULT_PLACEMENT,
    progress: Callable[[str], None] = lambda _: None,
) -> BenchReport:
    """Measure one artifact over `grid` (sizes by dim name; others at a default).

    `seconds` is the time measured in each cell, over all rounds together.

    Raises:
        FeedError: the grid names an unknown dim or a size out of range.
    """
    if not seconds > 0:
        raise FeedError(f"seconds = {seconds}; expected a number above 0")
    spec, chosen = bundle.spec, bundle.artifact(artifact)
    cells = _cells(_grid(spec, grid or {}))
    threads = placement.threads or machine.usable_cpus()
    with bundle.open_session(chosen.name, placement) as session, ceiling.ceiling_session(placement) as peak:
        feeds = [random_feeds(session.signature, sizes) for sizes in cells]
        first = [_timed_ms(session, each) for each in feeds]
        turns = [(session, each) for each in feeds] + [(peak, random_feeds(peak.signature, ceiling.SIZES))]
        *taken, peak_ms = alternate(turns, seconds, progress)
        ceiling_gflops = ceiling.FLOPS / nearest_rank(peak_ms, 0.5) / 1e6
        return BenchReport(
            subject=spec.name,
            artifact=chosen.name,
            precision=chosen.precision.value,
            provider=session.provider,
            threads=threads,
            cells=tuple(
                _cell(spec, sizes, first_ms, samples, ceiling_gflops)
                for sizes, first_ms, samples in zip(cells, first, taken, strict=True)
            ),
            ceiling_gflops=ceiling_gflops,
            ceiling=f"fp32 MatMul {describe(ceiling.SIZES)}, {peak.provider}, {threads} threads",
            machine=machine.describe(),
        )


def alternate(
    turns: Sequence[tuple[Session, Feeds]], seconds: float, progress: Callable[[str], None]
) -> list[list[float]]:
    """Latencies in ms of each turn's runs, over rounds in which every turn has its share of time."""
    samples: list[list[float]] = [[] for _ in turns]
    for round_number in range(ROUNDS):
        for turn, (session, feeds) in enumerate(turns):
            progress(f"round {round_number + 1} of {ROUNDS}, {turn + 1} of {len(turns)}")
            time.sleep(PAUSE_SECONDS)
            for _ in range(UNRECORDED_RUNS):
                session.run(feeds)
            end = time.perf_counter() + seconds / ROUNDS
            wanted = (round_number + 1) * SAMPLES_A_TURN
            while len(samples[turn]) < wanted or time.perf_counter() < end:
                samples[turn].append(_timed_ms(session, feeds))
    return samples


def _timed_ms(session: Session, feeds: Feeds) -> float:
    start = time.perf_counter()
    session.run(feeds)
    return (time.perf_counter() - start) * 1e3


def _cell(
    spec: AttentionSpec, sizes: Sizes, first_ms: float, samples: list[float], ceiling_gflops: float
) -> Cell:
    median_ms = nearest_rank(samples, 0.5)
    gflops = spec.flops(sizes) / median_ms / 1e6
    return Cell(
        sizes=sizes,
        latency=Percentiles.of(samples),
        tokens_per_s=sizes[spec.dims[0].name] * sizes[spec.query_axis] / median_ms * 1e3,
        gflops=gflops,
        ceiling_share=gflops / ceiling_gflops,
        first_run_ms=first_ms,
        samples_ms=tuple(samples),
    )


def random_feeds(signature: Signature, sizes: Sizes) -> dict[str, Array]:
    """Standard normal inputs, nothing masked: the cost of a padded graph does not depend on its mask."""
    random = np.random.default_rng(0)
    return {
        tensor.name: random.standard_normal(signature.shape(tensor, sizes)).astype(numpy_dtype(tensor.dtype))
        if tensor.is_float
        else np.ones(signature.shape(tensor, sizes), bool)
        for tensor in signature.inputs
    }


def _cells(grid: Mapping[str, Sequence[int]]) -> list[dict[str, int]]:
    return [dict(zip(grid, sizes, strict=True)) for sizes in itertools.product(*grid.values())]


def _grid(spec: AttentionSpec, asked: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    grid = {}
    for dim in spec.dims:
        lengths = dim is not spec.dims[0]
        default = [16, dim.opt, dim.max] if lengths else [1, dim.opt]
        sizes = sorted({min(max(size, dim.min), dim.max) for size in default})
        grid[dim.name] = list(asked.get(dim.name, sizes))
        for size in grid[dim.name]:
            if not dim.min <= size <= dim.max:
                raise FeedError(
                    f"grid has {dim.name} = {size}; this block takes {dim.name} {dim.min}..{dim.max}"
                )
    unknown = [name for name in asked if name not in grid]
    if unknown:
        raise FeedError(f"grid names {', '.join(unknown)}; the dims are {', '.join(grid)}")
    return grid


def _figure(value: float) -> float | None:
    return None if math.isnan(value) else value
