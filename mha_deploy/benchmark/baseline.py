"""A gate for CI: what is measured now against a report of `bench` from before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mha_deploy.benchmark import ceilings
from mha_deploy.benchmark.baseline_file import Baseline
from mha_deploy.benchmark.comparison import Estimate, check_rounds, compare_apart
from mha_deploy.benchmark.report import BenchReport, Cell, bench
from mha_deploy.benchmark.rounds import ROUNDS, SECONDS
from mha_deploy.benchmark.turns import Grid, cells_of
from mha_deploy.bundle import Bundle
from mha_deploy.latency import nearest_rank
from mha_deploy.sessions import DEFAULT_PLACEMENT, Placement

PASSED, REGRESSION, INCONCLUSIVE = "passed", "regression", "inconclusive"
RULE = (
    "regression = the 99 % interval of time now over time before lies above the limit, both as timed and in "
    "units of the MatMul timed in the same rounds; passed = one lies below it and none above; else "
    "inconclusive"
)


@dataclass(frozen=True, slots=True)
class Judgement:
    """One size: time now over time before, as timed and in units of the ceiling of its own run."""

    sizes: Mapping[str, int]
    before_ms: float
    now_ms: float
    timed: Estimate
    by_ceiling: Estimate
    outcome: str

    def to_json(self) -> dict[str, Any]:
        return {
            "sizes": dict(self.sizes),
            "before_p50_ms": self.before_ms,
            "p50_ms": self.now_ms,
            "timed": self.timed.to_json(),
            "by_ceiling": self.by_ceiling.to_json(),
            "outcome": self.outcome,
        }


@dataclass(frozen=True, slots=True)
class GateReport:
    """`passed` unless a size has become slower than allowed; an inconclusive one does not fail it.

    `inconclusive` tells that none but such sizes are there: then nothing was shown either way.
    """

    report: BenchReport
    baseline: str
    max_regression: float
    judgements: tuple[Judgement, ...]

    @property
    def passed(self) -> bool:
        return self.count(REGRESSION) == 0

    @property
    def inconclusive(self) -> bool:
        return self.count(INCONCLUSIVE) == len(self.judgements)

    def count(self, outcome: str) -> int:
        """How many sizes came to it."""
        return sum(judgement.outcome == outcome for judgement in self.judgements)

    def to_json(self) -> dict[str, Any]:
        return {
            **self.report.to_json(),
            "gate": {
                "baseline": self.baseline,
                "max_regression": self.max_regression,
                "rule": RULE,
                "passed": self.passed,
                "inconclusive": self.inconclusive,
                "sizes": [judgement.to_json() for judgement in self.judgements],
            },
        }


def gate(
    bundle: Bundle,
    baseline: Path,
    max_regression: float,
    artifact: str = "",
    *,
    grid: Grid | None = None,
    seconds: float = SECONDS,
    rounds: int = ROUNDS,
    placement: Placement = DEFAULT_PLACEMENT,
    progress: Callable[[str], None] = lambda _: None,
) -> GateReport:
    """Measure as `bench` does and hold it against the report in `baseline`.

    Without a grid the baseline's sizes are measured. `max_regression` is a share: 0.05 lets a size
    become 5 % slower.

    Raises:
        BenchError: the baseline cannot be read, or is of another machine, block, artifact or placement,
            or has not these sizes; or too few rounds for an interval, which would let everything pass.
        FeedError: the grid names an unknown dim or a size out of range.
    """
    check_rounds(rounds)
    before = Baseline.read(baseline)
    default: dict[str, list[int]] = {
        dim.name: sorted({cell.sizes.get(dim.name, dim.opt) for cell in before.cells})
        for dim in bundle.spec.dims
    }
    before.admit(bundle, artifact, placement, cells_of(bundle.spec, grid or {}, default))
    report = bench(
        bundle,
        artifact,
        grid={**default, **(grid or {})},
        seconds=seconds,
        rounds=rounds,
        placement=placement,
        progress=progress,
    )
    before.admit_provider(report.provider)
    limit = 1 + max_regression
    judgements = tuple(judge(before, cell, report, limit) for cell in report.cells)
    return GateReport(report, str(baseline), max_regression, judgements)


def judge(before: Baseline, cell: Cell, report: BenchReport, limit: float) -> Judgement:
    """One size by RULE: a machine that has become slower as a whole is no regression."""
    then, now = before.medians_ms(cell.sizes), cell.samples.medians_ms
    ceiling_now = report.ceilings.samples[ceilings.COMPUTE].medians_ms
    timed = compare_apart(then, now)
    by_ceiling = compare_apart(
        [took / ceiling for took, ceiling in zip(then, before.ceiling_ms, strict=True)],
        [took / ceiling for took, ceiling in zip(now, ceiling_now, strict=True)],
    )
    intervals = (timed.interval, by_ceiling.interval)
    above = sum(interval.low > limit for interval in intervals)
    below = sum(interval.high <= limit for interval in intervals)
    outcome = REGRESSION if above == len(intervals) else PASSED if below and not above else INCONCLUSIVE
    return Judgement(cell.sizes, nearest_rank(then, 0.5), cell.samples.median_ms, timed, by_ceiling, outcome)
