"""mha-deploy: from a PyTorch attention block to a verified, fast, served engine.

The names below load their modules when first used, so that `import mha_deploy` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mha_deploy.attention import MultiHeadAttention as MultiHeadAttention
    from mha_deploy.benchmark import bench as bench
    from mha_deploy.bundle import Bundle as Bundle
    from mha_deploy.engines import build_engine as build_engine
    from mha_deploy.engines import build_engine_from_file as build_engine_from_file
    from mha_deploy.inference import infer as infer
    from mha_deploy.pipeline import export as export
    from mha_deploy.runner import BatchRunner as BatchRunner
    from mha_deploy.runner import RunnerOptions as RunnerOptions
    from mha_deploy.search import optimize as optimize
    from mha_deploy.sessions import Placement as Placement
    from mha_deploy.signature import Dim as Dim
    from mha_deploy.spec import AttentionSpec as AttentionSpec
    from mha_deploy.spec_file import load_spec as load_spec
    from mha_deploy.typed import Variant as Variant
    from mha_deploy.verification import verify as verify

_HOMES = {
    "AttentionSpec": "spec",
    "BatchRunner": "runner",
    "Bundle": "bundle",
    "Dim": "signature",
    "MultiHeadAttention": "attention",
    "Placement": "sessions",
    "RunnerOptions": "runner",
    "Variant": "typed",
    "bench": "benchmark",
    "build_engine": "engines",
    "build_engine_from_file": "engines",
    "export": "pipeline",
    "infer": "inference",
    "load_spec": "spec_file",
    "optimize": "search",
    "verify": "verification",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
