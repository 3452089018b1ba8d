"""ONNX Runtime's own attention operator, the projections of query, key and value in it."""

from __future__ import annotations

from mha_deploy.lowering import whole_attention
from mha_deploy.precision import Precision
from mha_deploy.search.candidate import Candidate
from mha_deploy.search.candidates.onnx_runtime import on_the_cpu
from mha_deploy.search.rewritten import rewritten

RANK = 2

CANDIDATES = (
    Candidate("whole-attention", Precision.FP32, rewritten("whole-attention", whole_attention), on_the_cpu),
)
