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


def _lacks(bundle: Bundle, placement: Placement) -> str:
    kept_apart = "" if bundle.spec.kind == "self" else "query, key and value have inputs of their own"
    return on_the_cpu(bundle, placement) or kept_apart


CANDIDATES = (Candidate(NAME, Precision.FP32, rewritten(NAME, fuse_projections), _lacks),)
