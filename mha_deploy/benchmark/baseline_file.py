"""The report of `bench` that a gate holds a run against, read whole before anything is measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mha_deploy import machine
from mha_deploy.benchmark import ceilings
from mha_deploy.benchmark.block import block_of, differences
from mha_deploy.benchmark.report import FORMAT
from mha_deploy.benchmark.rounds import ROUNDS
from mha_deploy.bundle import Bundle
from mha_deploy.cases import describe
from mha_deploy.errors import BenchError
from mha_deploy.json_part import JsonPart, clipped
from mha_deploy.latency import CONFIDENCE, nearest_rank
from mha_deploy.sessions import Placement, placed
from mha_deploy.signature import Sizes

SAME_MACHINE = ("system", "cpu", "cpu_features", "usable_cpus")
# No clock resolves less, and nobody waits for longer; the ratio of any two is a number.
TIMES_MS = (1e-9, 1e12)


@dataclass(frozen=True, slots=True)
class SizeBefore:
    """One size of a baseline: what it took, a median a round."""

    sizes: Mapping[str, int]
    flops: int
    medians_ms: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Baseline:
    """A report of `bench`, as its file holds it; `ceiling_ms` are the MatMul's medians, one a round."""

    path: Path
    machine: Mapping[str, object]
    subject: str
    block: Mapping[str, object]
    artifact: str
    precision: str
    provider: str
    threads: int
    cells: tuple[SizeBefore, ...]
    ceiling_ms: tuple[float, ...]

    @classmethod
    def read(cls, path: Path) -> Baseline:
        """Raises BenchError where the file is no such report."""
        try:
            return cls._of(path, JsonPart("", json.loads(path.read_text(encoding="utf-8"))))
        except OSError as error:
            raise BenchError(f"cannot read baseline {path}: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise BenchError(
                f"baseline {path} is no report of this version: {clipped(str(error))}; write one with: "
                f"mha-deploy bench BUNDLE -o {path}"
            ) from error

    @classmethod
    def _of(cls, path: Path, report: JsonPart) -> Baseline:
        """Raises ValueError where a part is missing or of another kind."""
        if report["format"].whole(least=1) != FORMAT:
            raise report["format"].wrong(str(FORMAT))
        baseline = cls(
            path=path,
            machine=report["machine"].members(),
            subject=report["subject"].text(),
            block=report["block"].members(),
            artifact=report["artifact"].text(),
            precision=report["precision"].text(),
            provider=report["provider"].text(),
            threads=report["threads"].whole(least=1),
            cells=tuple(
                SizeBefore(
                    {name: cell["sizes"][name].whole(least=1) for name in cell["sizes"].members()},
                    cell["flops"].whole(least=1),
                    _medians_ms(cell),
                )
                for cell in report["cells"].parts(least=1)
            ),
            ceiling_ms=_medians_ms(report["ceiling"]["samples"][ceilings.COMPUTE]),
        )
        rounds = len(baseline.ceiling_ms)
        for number, cell in enumerate(baseline.cells):
            if len(cell.medians_ms) != rounds:
                raise ValueError(f"cells[{number}] has {len(cell.medians_ms)} rounds, the ceiling {rounds}")
        if rounds < ROUNDS:
            raise ValueError(f"it has {rounds} rounds, a {CONFIDENCE:.0%} interval takes {ROUNDS} or more")
        return baseline

    def admit(self, bundle: Bundle, artifact: str, placement: Placement, cells: Sequence[Sizes]) -> None:
        """Raise BenchError where it was taken of something else, or elsewhere; what differs is named."""
        here = machine.describe()
        for key in SAME_MACHINE:
            self._same(f"another machine: its {key.replace('_', ' ')}", self.machine.get(key), here[key])
        chosen = bundle.artifact(artifact, placement)
        threads = placed(chosen, placement).threads or machine.usable_cpus()
        for what, theirs, ours in (
            ("another block: its name", self.subject, bundle.spec.name),
            ("another artifact: its name", self.artifact, chosen.name),
            ("another artifact: its precision", self.precision, chosen.precision.value),
            ("another placement: its threads", self.threads, threads),
        ):
            self._same(what, theirs, ours)
        block = block_of(bundle.spec)
        for name in differences(self.block, block):
            self._same(f"another block: its {name}", self.block.get(name), block.get(name))
        for sizes in cells:
            found = self._cell(sizes)
            if found is None:
                known = clipped("; ".join(describe(cell.sizes) for cell in self.cells))
                raise BenchError(f"baseline {self.path} has no shape {describe(sizes)}; it has {known}")
            self._same(
                f"another block: its FLOPs at {describe(sizes)}", found.flops, bundle.spec.flops(sizes)
            )

    def admit_provider(self, provider: str) -> None:
        self._same("another placement: its provider", self.provider, provider)

    def medians_ms(self, sizes: Sizes) -> tuple[float, ...]:
        """Those of a size that was admitted."""
        found = self._cell(sizes)
        if found is None:
            raise KeyError(describe(sizes))
        return found.medians_ms

    def _cell(self, sizes: Sizes) -> SizeBefore | None:
        return next((cell for cell in self.cells if cell.sizes == dict(sizes)), None)

    def _same(self, what: str, theirs: object, ours: object) -> None:
        if theirs != ours:
            raise BenchError(
                f"baseline {self.path} is of {what} is {clipped(repr(theirs))}, here it is {ours!r}; take "
                "one here with: mha-deploy bench BUNDLE -o FILE"
            )


def _medians_ms(samples: JsonPart) -> tuple[float, ...]:
    """One for each round."""
    rounds = samples["rounds_ms"].parts(least=1)
    return tuple(nearest_rank([_time_ms(each) for each in taken.parts(least=1)], 0.5) for taken in rounds)


def _time_ms(part: JsonPart) -> float:
    low, high = TIMES_MS
    return part.number(least=low, most=high, expected=f"a time in ms, {low:g} to {high:g}")
