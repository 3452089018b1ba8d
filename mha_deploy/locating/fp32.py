"""Which nodes of a 16-bit or integer artifact have to be in fp32 for the whole to be in its budget."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from mha_deploy.onnx_files import save
from mha_deploy.precision import Precision
from mha_deploy.sessions import Session
from mha_deploy.sessions.onnx_runtime import OnnxRuntimeSession
from mha_deploy.sessions.packed import PackedSession, PaddedView
from mha_deploy.signature import Array, TensorSpec
from mha_deploy.staging import staged_file
from mha_deploy.twin import write_twin
from mha_deploy.verification import FAILED, INFORMS, OUT_OF_RANGE, PASSED, CaseResult, Judge
from mha_deploy.verification.beyond_range import judged_beyond_range


@dataclass(frozen=True, slots=True)
class Fp32Nodes:
    """The nodes of `artifact` to keep in fp32; none, with `cures` False, where that does not help.

    `smallest`: no smaller set does. `cases` were to be brought inside the budget; `still_failing` are
    outside of it all the same. `trials`: sets that were built and run.
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
    wanted = sorted(_to_bring_in(cases, results), key=_elements)
    names = tuple(case.name for case in wanted)
    with tempfile.TemporaryDirectory() as folder:
        trial = _Trial(bundle, artifact, judge, Path(folder))
        active = wanted[:1]
        while True:
            found = smallest_set(trial.candidates, functools.partial(trial.holds, cases=tuple(active)))
            if found is None:
                return Fp32Nodes(artifact.name, artifact.precision, (), False, False, trial.built, names)
            failing = trial.failing(found.members, wanted)
            more = [case for case in wanted if case.name in failing and case not in active]
            if not more:
                break
            active.append(more[0])
        others = [case for case in cases if case.name not in names]
        still = [*failing, *trial.failing(found.members, others)]
    return Fp32Nodes(
        artifact=artifact.name,
        precision=artifact.precision,
        nodes=tuple(sorted({*found.members, *trial.kept})),
        cures=not failing,
        smallest=found.proved,
        trials=trial.built,
        cases=names,
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


def _elements(case: Case) -> int:
    return sum(array.size for array in case.feeds.values())


class _Trial:
    """The artifact's own graph with more and more nodes in fp32. `candidates` can be, `kept` are.

    fp16 runs as its fp32 twin: ONNX Runtime drops roundings between fp16 nodes on a CPU, and a value
    that overflows on the device would hold here.
    """

    def __init__(self, bundle: Bundle, artifact: Artifact, judge: Judge, folder: Path) -> None:
        self._artifact, self._judge, self._path = artifact, judge, folder / "trial.onnx"
        self._spec = bundle.spec
        twin_of = artifact.details.get("twin_of", "")
        source = bundle.artifact(twin_of) if twin_of else artifact
        self._model = onnx.load(str(source.path(bundle.folder)))
        self.kept: tuple[str, ...] = tuple(source.details.get("keep_fp32", ()))
        module = bundle.reference()
        self._weights: dict[str, Array] = {n: tensor.numpy() for n, tensor in module.state_dict().items()}
        self._canonical = onnx.load(str(bundle.artifact(CANONICAL).path(bundle.folder)))
        self.built = 0
        self.candidates = (
            quantised_nodes(self._model, self._canonical)
            if artifact.precision.is_integer
            else computed_in_16_bits(self._model)
        )

    def holds(self, nodes: Sequence[str], cases: Sequence[Case]) -> bool:
        """Whether the answers to `cases` are within their budgets with `nodes` in fp32."""
        try:
            with self._opened(nodes) as session:
                return all(self._judged(session, case).outcome in (PASSED, INFORMS) for case in cases)
        except (GraphError, FrozenAxisError):
            return False

    def failing(self, nodes: Sequence[str], cases: Sequence[Case]) -> list[str]:
        """Names of the cases that are outside of their budgets with `nodes` in fp32."""
        with self._opened(nodes) as session:
            return [case.name for case in cases if self._judged(session, case).outcome == FAILED]

    def _judged(self, session: Session, case: Case) -> CaseResult:
        return judged_beyond_range(self._judge, session, self._artifact.name, case)

    def _opened(self, nodes: Sequence[str]) -> Session:
        self.built += 1
        artifact = self._artifact
        signature = artifact.signature
        if artifact.precision.is_integer:
            save(splice_fp32(self._model, self._canonical, nodes), self._path)
        else:
            save(self._model, self._path)
            keep_in_fp32(self._path, nodes, self._weights)
            write_twin(self._path, self._path)
            signature = replace(
                signature,
                inputs=tuple(_fp32(tensor) for tensor in signature.inputs),
                outputs=tuple(_fp32(tensor) for tensor in signature.outputs),
            )
        precision, spec = artifact.precision, self._spec
        session = OnnxRuntimeSession(self._path, signature, name=artifact.name, precision=precision)
        return PaddedView(PackedSession(session, spec)) if artifact.layout == "packed" else session


def _fp32(tensor: TensorSpec) -> TensorSpec:
    return replace(tensor, dtype="float32") if tensor.is_float else tensor
