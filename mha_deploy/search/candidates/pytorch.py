"""PyTorch, eager and compiled: the baselines that a user would otherwise keep."""

from __future__ import annotations

from mha_deploy import machine
from mha_deploy.bundle import CANONICAL, Bundle
from mha_deploy.manifest import Artifact
from mha_deploy.precision import Precision
from mha_deploy.search.candidate import Candidate, Status, variant_of
from mha_deploy.search.candidates.onnx_runtime import on_the_cpu
from mha_deploy.sessions import Placement, Session

RANK = 9


def _candidate(name: str, *, compiled: bool) -> Candidate:
    def make(bundle: Bundle, _status: Status) -> Artifact:
        weights = (bundle.manifest.weights,)
        return variant_of(bundle.artifact(CANONICAL), name, runtime=name, files=weights)

    def open_(bundle: Bundle, _artifact: Artifact, placement: Placement) -> Session:
        from mha_deploy.sessions.torch_module import TorchSession

        return TorchSession(bundle.reference(), compiled=compiled, placement=placement)

    def lacks(bundle: Bundle, placement: Placement) -> str:
        return on_the_cpu(bundle, placement) or (machine.lacks_cxx_compiler() if compiled else "")

    return Candidate(name, Precision.FP32, make, lacks, open_, baseline=True)


CANDIDATES = (_candidate("torch-eager", compiled=False), _candidate("torch-compile", compiled=True))
