"""Query, key and value projected by one product, where they share their input."""

from __future__ import annotations

from mha_deploy.bundle import Bundle
from mha_deploy.lowering import fuse_projections
from mha_deploy.precision import Precision
from mha_deploy.search.candidate import Candidate
from mha_deploy.search.candidates.onnx_runtime import on_the_cpu
from mha_deploy.search.rewritten import rewritten
from mha_deploy.sessions import Placement

RANK = 2
NAME = "fused-projections"

fused = rewritten(NAME, fuse_projections)


def lacks_projections(bundle: Bundle, _placement: Placement) -> str:
    return "" if bundle.spec.kind == "self" else "query, key and value have inputs of their own"


def _lacks(bundle: Bundle, placement: Placement) -> str:
    return on_the_cpu(bundle, placement) or lacks_projections(bundle, placement)


CANDIDATES = (Candidate(NAME, Precision.FP32, fused, _lacks),)
