"""Every ONNX artifact that did not pass: where it goes wrong, and what fp32 would cure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mha_deploy.bundle import Bundle
from mha_deploy.cases import Case
from mha_deploy.errors import BundleError, InputError
from mha_deploy.locating.fp32 import Fp32Nodes, nodes_for_fp32
from mha_deploy.locating.report import CANNOT_RUN, UNREADABLE, Located
from mha_deploy.locating.search import Locator
from mha_deploy.precision import Precision
from mha_deploy.verification import FAILED, PASSED, CaseResult, Judge, VerifyReport


@dataclass(frozen=True, slots=True)
class LocateReport:
    """`faults`: one for each artifact that did not pass. `fp32`: what to keep in fp32, for those below
    it. `not_looked_into`: artifacts that are no ONNX file, or a missing or damaged one, with what to do."""

    faults: tuple[Located, ...]
    fp32: tuple[Fp32Nodes, ...] = ()
    not_looked_into: tuple[str, ...] = ()

    def write_keep_fp32(self, path: Path) -> None:
        """The nodes that have to be in fp32, as `--keep-fp32` reads them; nothing where none would help.

        Raises:
            InputError: several artifacts have such nodes; the file is one artifact's.
        """
        cures = [nodes for nodes in self.fp32 if nodes.cures]
        if len(cures) > 1:
            names = ", ".join(nodes.artifact for nodes in cures)
            raise InputError(
                f"{path} takes one artifact's nodes, not those of {names}; name one with --artifact"
            )
        for nodes in cures:
            nodes.write(path)

    def to_json(self) -> dict[str, Any]:
        return {
            "faults": [fault.to_json() for fault in self.faults],
            "keep_fp32": [nodes.to_json() for nodes in self.fp32],
            "not_looked_into": list(self.not_looked_into),
        }


def locate(
    bundle: Bundle,
    report: VerifyReport,
    cases: Callable[[Precision], Sequence[Case]],
    *,
    max_relative_error: float = 0.0,
    progress: Callable[[str], None] = lambda _: None,
) -> LocateReport:
    """Look into each artifact that did not pass in `report`, on its smallest failed case.

    `cases` gives the cases that `report` is of, by precision, as `Suite.cases` does; those that an
    artifact did not meet are left out. `max_relative_error` is the budget of integer precisions; 0
    takes the one they were accepted with.

    Raises:
        CheckError: the graph made again from the weights does not mean what PyTorch means.
    """
    faults, fp32, others = list[Located](), list[Fp32Nodes](), list[str]()
    for hop in report.hops:
        name, results = hop.artifact, hop.cases
        outcomes = {result.outcome for result in results}
        if FAILED not in outcomes and PASSED in outcomes:
            failed = [held.name for held in hop.properties if held.outcome == FAILED]
            if failed:
                others.append(f"{name} fails {', '.join(failed)} alone, which no one run and no node shows")
            continue
        artifact = bundle.artifact(name)
        if artifact.runtime != "onnxruntime":
            others.append(f"{name} is an engine; look into the ONNX file that it was built from")
            continue
        known = cases(artifact.precision)
        try:
            progress(f"{name}: looking for the fault")
            locator = Locator(bundle, artifact, max_relative_error=max_relative_error)
            fault = locator.on(_smallest(results, known))
            faults.append(fault)
            if artifact.precision is not Precision.FP32 and fault.kind not in (CANNOT_RUN, UNREADABLE):
                progress(f"{name}: looking for the nodes to keep in fp32")
                budget = max_relative_error or float(artifact.details.get("max_relative_error", 0.0))
                judge = Judge(bundle.reference(), max_relative_error=budget)
                fp32.append(nodes_for_fp32(bundle, artifact, _run(known, results), results, judge=judge))
        except BundleError as error:  # a file that is missing or damaged: the others still have their say
            others.append(f"{name} cannot be looked into: {error}")
    return LocateReport(tuple(faults), tuple(fp32), tuple(others))


def _run(cases: Sequence[Case], results: Sequence[CaseResult]) -> list[Case]:
    names = {result.name for result in results}
    return [case for case in cases if case.name in names]


def _smallest(results: Sequence[CaseResult], cases: Sequence[Case]) -> Case:
    """The failed case with the fewest elements, or else the one out of range; of all where none ran."""
    failed = {r.name for r in results if r.outcome == FAILED} or {r.name for r in results}
    known = [case for case in cases if case.name in failed] or list(cases)
    return min(known, key=lambda case: sum(array.size for array in case.feeds.values()))
