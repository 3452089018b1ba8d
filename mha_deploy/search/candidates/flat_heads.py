"""Attention that splits and merges the heads itself: less arithmetic on shapes, no transposes beside it."""

from __future__ import annotations

from mha_deploy.lowering import flatten_heads
from mha_deploy.precision import Precision
from mha_deploy.search.candidate import Candidate
from mha_deploy.search.candidates.onnx_runtime import on_the_cpu
from mha_deploy.search.rewritten import rewritten

RANK = 1

CANDIDATES = (Candidate("flat-heads", Precision.FP32, rewritten("flat-heads", flatten_heads), on_the_cpu),)
