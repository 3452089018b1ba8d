"""A gate for CI: what is measured now against a report of `bench` from before."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mha_deploy import machine
from mha_deploy.benchmark import ceilings
from mha_deploy.benchmark.comparison import Estimate, compare_apart
from mha_deploy.benchmark.report import FORMAT, BenchReport, Cell, bench
from mha_deploy.benchmark.rounds import ROUNDS, SECONDS
from mha_deploy.benchmark.turns import Grid, cells_of
from mha_deploy.bundle import Bundle
from mha_deploy.cases import describe
from mha_deploy.errors import BenchError
from mha_deploy.latency import nearest_rank
from mha_deploy.sessions import DEFAULT_PLACEMENT, Placement, placed
from mha_deploy.signature import Sizes

PASSED, REGRESSION, INCONCLUSIVE = "passed", "regression", "inconclusive"
RULE = (
    "regression = the 99 % interval of time now over time before lies above the limit, both as timed and in "
    "units of the MatMul timed in the same rounds; passed = one lies below it and none above; else "
    "inconclusive"
)
SAME_MACHINE = ("system", "cpu", "cpu_features", "usable_cpus")


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
    """`passed` unless a size has become slower than allowed; an inconclusive one does not fail it."""

    report: BenchReport
    baseline: str
    max_regression: float
    judgements: tuple[Judgement, ...]

    @property
    def passed(self) -> bool:
        return all(judgement.outcome != REGRESSION for judgement in self.judgements)

    def to_json(self) -> dict[str, Any]:
        return {
            **self.report.to_json(),
            "gate": {
                "baseline": self.baseline,
                "max_regression": self.max_regression,
                "rule": RULE,
                "passed": self.passed,
                "sizes": [judgement.to_json() for judgement in self.judgements],
            },
        }


@dataclass(frozen=True, slots=True)
class Baseline:
    """A report of `bench`, as its file holds it."""

    path: Path
    data: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> Baseline:
        """Raises BenchError where the file is no such report."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["format"] != FORMAT or not data["cells"]:
                raise ValueError(f"format {data['format']!r}, expected {FORMAT}")
            baseline = cls(path, data)
            baseline.check_samples()
        except OSError as error:
            raise BenchError(f"cannot read baseline {path}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            raise BenchError(
                f"baseline {path} is no report of this version ({error!r}); write one with: mha-deploy bench "
                f"BUNDLE -o {path}"
            ) from error
        return baseline

    def admit(self, bundle: Bundle, artifact: str, placement: Placement, cells: Sequence[Sizes]) -> None:
        """Raise BenchError where it was taken of something else, or elsewhere; what differs is named."""
        here, there = machine.describe(), self.data["machine"]
        for key in SAME_MACHINE:
            self._same(f"another machine: its {key.replace('_', ' ')}", there.get(key), here[key])
        chosen = bundle.artifact(artifact, placement)
        threads = placed(chosen, placement).threads or machine.usable_cpus()
        for what, key, ours in (
            ("another block: its name", "subject", bundle.spec.name),
            ("another artifact: its name", "artifact", chosen.name),
            ("another artifact: its precision", "precision", chosen.precision.value),
            ("another placement: its threads", "threads", threads),
        ):
            self._same(what, self.data.get(key), ours)
        for sizes in cells:
            found = self._cell(sizes)
            if not found:
                known = "; ".join(describe(cell["sizes"]) for cell in self.data["cells"])
                raise BenchError(f"baseline {self.path} has no shape {describe(sizes)}; it has {known}")
            self._same(
                f"another block: its FLOPs at {describe(sizes)}", found["flops"], bundle.spec.flops(sizes)
            )

    def admit_provider(self, provider: str) -> None:
        self._same("another placement: its provider", self.data.get("provider"), provider)

    def _same(self, what: str, theirs: object, ours: object) -> None:
        if theirs != ours:
            raise BenchError(
                f"baseline {self.path} is of {what} is {theirs!r}, here it is {ours!r}; take one here with: "
                "mha-deploy bench BUNDLE -o FILE"
            )

    def check_samples(self) -> None:
        """Raise, of whatever kind, unless every size has a time above 0 in each of the ceiling's rounds."""
        ceiling_ms = self.ceiling_ms()
        for sizes in self.sizes():
            for took_ms, ceiling in zip(self.medians_ms(sizes), ceiling_ms, strict=True):
                if not (took_ms > 0 and ceiling > 0):
                    raise ValueError(f"{took_ms} ms and {ceiling} ms; expected times above 0")

    def sizes(self) -> list[dict[str, int]]:
        return [dict(cell["sizes"]) for cell in self.data["cells"]]

    def medians_ms(self, sizes: Sizes) -> list[float]:
        return [nearest_rank(samples, 0.5) for samples in self._cell(sizes)["rounds_ms"]]

    def ceiling_ms(self) -> list[float]:
        rounds = self.data["ceiling"]["samples"][ceilings.COMPUTE]["rounds_ms"]
        return [nearest_rank(samples, 0.5) for samples in rounds]

    def _cell(self, sizes: Sizes) -> Mapping[str, Any]:
        return next((cell for cell in self.data["cells"] if cell["sizes"] == dict(sizes)), {})


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
            or has not these sizes.
        FeedError: the grid names an unknown dim or a size out of range.
    """
    before = Baseline.read(baseline)
    default: dict[str, list[int]] = {
        dim.name: sorted({sizes.get(dim.name, dim.opt) for sizes in before.sizes()})
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
        [took / ceiling for took, ceiling in zip(then, before.ceiling_ms(), strict=True)],
        [took / ceiling for took, ceiling in zip(now, ceiling_now, strict=True)],
    )
    intervals = (timed.interval, by_ceiling.interval)
    above = sum(interval.low > limit for interval in intervals)
    below = sum(interval.high <= limit for interval in intervals)
    outcome = REGRESSION if above == len(intervals) else PASSED if below and not above else INCONCLUSIVE
    return Judgement(cell.sizes, nearest_rank(then, 0.5), cell.samples.median_ms, timed, by_ceiling, outcome)
