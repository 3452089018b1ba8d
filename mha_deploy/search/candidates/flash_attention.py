"""Attention by blocks of keys, its scores never stored: of use where sequences are long."""

from __future__ import annotations

from mha_deploy.lowering import flash_attention
from mha_deploy.precision import Precision
from mha_deploy.search.candidate import Candidate
from mha_deploy.search.candidates.onnx_runtime import on_the_cpu
from mha_deploy.search.rewritten import rewritten

RANK = 2

CANDIDATES = (
    Candidate("flash-attention", Precision.FP32, rewritten("flash-attention", flash_attention), on_the_cpu),
)
