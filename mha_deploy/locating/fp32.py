"""Which nodes of a 16-bit or integer artifact have to be in fp32 for the whole to be in its budget."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from mha_deploy.bundle import CANONICAL, Bundle
from mha_deploy.cases import Case
from mha_deploy.errors import FrozenAxisError, GraphError
from mha_deploy.islands import computed_in_16_bits, keep_in_fp32
from mha_deploy.locating.smallest import smallest_set
from mha_deploy.locating.spliced import quantised_nodes, splice_fp32
from mha_deploy.manifest import Artifact
from mha_deploy.precision import Precision
from mha_deploy.sessions.onnx_runtime import OnnxRuntimeSession
from mha_deploy.signature import Array
from mha_deploy.staging import staged_file
from mha_deploy.twin import write_twin
from mha_deploy.variants import save
from mha_deploy.verification import FAILED, OUT_OF_RANGE, PASSED, CaseResult, Judge
from mha_deploy.verification.beyond_range import judged_beyond_range


@dataclass(frozen=True, slots=True)
class Fp32Nodes:
    """The nodes of `artifact` to keep in fp32; none, with `cures` False, where that does not help.

    `smallest`: no smaller set does. `cases` were brought inside the budget; `still_failing` were not
    asked for and are outside of it. `trials`: sets that were built and run.
    """

    artifact: str
    precision: Precision
    nodes: tuple[str, ...]
    cures: bool
    smallest: bool
    trials: int
    cases: tuple[str, ...]
    still_failing: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "artifact": self.artifact,
            "precision": self.precision.value,
            "keep_fp32": list(self.nodes),
            "cures": self.cures,
            "smallest": self.smallest,
            "trials": self.trials,
            "cases": list(self.cases),
            "still_failing": list(self.still_failing),
        }

    def write(self, path: Path) -> None:
        """The list as `optimize --keep-fp32` and `build-engine --keep-fp32` read it."""
        with staged_file(path) as staging:
            staging.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")


def nodes_for_fp32(
    bundle: Bundle,
    artifact: Artifact,
    cases: Sequence[Case],
    results: Sequence[CaseResult],
    *,
    judge: Judge,
) -> Fp32Nodes:
    """The smallest set of nodes of `artifact` that, in fp32, brings its failed cases into the budget.

    `results` are those of `cases`. Where no case passed and PyTorch is out of range, the cases with
    ordinary inputs are the ones to bring in: rms at most twice the smallest. They are held to fp32's
    budget times the ratio of the two eps.

    Raises:
        BundleError: a file of the bundle is not the one recorded.
    """
    wanted = _to_bring_in(cases, results)
    with tempfile.TemporaryDirectory() as folder:
        trial = _Trial(bundle, artifact, judge, Path(folder))

        def holds(nodes: Sequence[str]) -> bool:
            return not trial.failing(nodes, wanted, stop=True)

        found = smallest_set(trial.candidates, holds)
        if found is None:
            names = tuple(case.name for case in wanted)
            return Fp32Nodes(
                artifact.name, artifact.precision, (), cures=False, smallest=False, trials=1, cases=names
            )
        still = trial.failing(found.members, [case for case in cases if case not in wanted], stop=False)
    return Fp32Nodes(
        artifact=artifact.name,
        precision=artifact.precision,
        nodes=tuple(sorted({*found.members, *trial.kept})),
        cures=True,
        smallest=found.proved,
        trials=found.trials,
        cases=tuple(case.name for case in wanted),
        still_failing=tuple(still),
    )


def _to_bring_in(cases: Sequence[Case], results: Sequence[CaseResult]) -> list[Case]:
    outcome = {result.name: result.outcome for result in results}
    failed = [case for case in cases if outcome.get(case.name) == FAILED]
    if PASSED in outcome.values():
        return failed
    beyond = [case for case in cases if outcome.get(case.name) == OUT_OF_RANGE]
    sizes = {case.name: _rms(case) for case in beyond}
    ordinary = 2 * min(sizes.values(), default=0.0)
    return failed + [case for case in beyond if sizes[case.name] <= ordinary]


def _rms(case: Case) -> float:
    floats = [array for array in case.reference_feeds.values() if array.dtype != bool]
    return max(float(np.sqrt(np.mean(np.square(array, dtype=np.float64)))) for array in floats)


class _Trial:
    """The artifact's own graph with more and more nodes in fp32. `candidates` can be, `kept` are."""

    def __init__(self, bundle: Bundle, artifact: Artifact, judge: Judge, folder: Path) -> None:
        self._artifact, self._judge, self._path = artifact, judge, folder / "trial.onnx"
        twin_of = artifact.details.get("twin_of", "")
        source = bundle.artifact(twin_of) if twin_of else artifact
        self._is_twin = bool(twin_of)
        self._model = onnx.load(str(source.path(bundle.folder)))
        self.kept: tuple[str, ...] = tuple(source.details.get("keep_fp32", ()))
        state = bundle.reference().state_dict()
        self._weights: dict[str, Array] = {name: tensor.numpy() for name, tensor in state.items()}
        self._canonical = onnx.load(str(bundle.artifact(CANONICAL).path(bundle.folder)))
        self.candidates = (
            quantised_nodes(self._model, self._canonical)
            if artifact.precision.is_integer
            else computed_in_16_bits(self._model)
        )

    def failing(self, nodes: Sequence[str], cases: Sequence[Case], *, stop: bool) -> list[str]:
        """Names of the cases that are outside of the budget with `nodes` in fp32; all where it does
        not run. With `stop` the first one only."""
        precision, failing = self._artifact.precision, []
        try:
            self._write(nodes)
            session = OnnxRuntimeSession(self._path, self._artifact.signature, precision=precision)
        except GraphError:
            return [case.name for case in cases]
        with session:
            for case in sorted(cases, key=lambda case: sum(a.size for a in case.feeds.values())):
                if not self._holds(session, case):
                    failing.append(case.name)
                    if stop:
                        break
        return failing

    def _holds(self, session: OnnxRuntimeSession, case: Case) -> bool:
        try:
            result = judged_beyond_range(self._judge, session, self._artifact.name, case)
        except (GraphError, FrozenAxisError):
            return False
        return result.outcome == PASSED

    def _write(self, nodes: Sequence[str]) -> None:
        if self._artifact.precision.is_integer:
            save(splice_fp32(self._model, self._canonical, nodes), self._path)
            return
        save(self._model, self._path)
        keep_in_fp32(self._path, nodes, self._weights)
        if self._is_twin:
            write_twin(self._path, self._path)
