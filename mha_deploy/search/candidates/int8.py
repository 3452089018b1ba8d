"""The bundle's int8 artifact, where there is one: it was made under a budget that its user declared."""

from __future__ import annotations

from mha_deploy.bundle import Bundle
from mha_deploy.manifest import Artifact
from mha_deploy.precision import Precision
from mha_deploy.search.candidate import Candidate, Status
from mha_deploy.search.candidates.onnx_runtime import on_the_cpu
from mha_deploy.sessions import Placement

RANK = 4
NAME = "int8"


def _lacks(bundle: Bundle, placement: Placement) -> str:
    if any(artifact.name == NAME for artifact in bundle.artifacts):
        return on_the_cpu(bundle, placement)
    return "there is none yet: make it with optimize --precision int8 --max-relative-error SHARE"


def _make(bundle: Bundle, _status: Status) -> Artifact:
    return bundle.artifact(NAME)


CANDIDATES = (Candidate(NAME, Precision.INT8, _make, _lacks),)
