"""Attention with less around it: no arithmetic on shapes, no transposes, fewer biases, padding looked up."""

from __future__ import annotations

from mha_deploy.lowering import lean_attention
from mha_deploy.precision import Precision
from mha_deploy.search.candidate import Candidate
from mha_deploy.search.candidates.onnx_runtime import on_the_cpu
from mha_deploy.search.rewritten import rewritten

RANK = 1

CANDIDATES = (
    Candidate("lean-attention", Precision.FP32, rewritten("lean-attention", lean_attention), on_the_cpu),
)
