"""Engines of a bundle's ONNX model for tests on a GPU, built there or, for RTX, anywhere."""

from __future__ import annotations

import pytest

from mha_deploy.bundle import Bundle
from mha_deploy.sessions.tensorrt import TensorRtSession
from mha_deploy.tensorrt.build import build_plan
from mha_deploy.tensorrt.options import BuildOptions
from mha_deploy.tensorrt.profiles import profiles_for

MODULES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}


def write_plan(bundle: Bundle, backend: str, path, *profiles: str):
    """Build the bundle's fp32 graph, without TF32, into `path`."""
    pytest.importorskip(MODULES[backend])
    artifact = bundle.artifact()
    options = BuildOptions(profiles=profiles_for(artifact.signature, profiles), backend=backend)
    path.write_bytes(build_plan(artifact.path(bundle.folder), options).plan)
    return path


def open_engine(bundle: Bundle, backend: str, folder, *profiles: str, **options) -> TensorRtSession:
    """A session over a new engine of the bundle; skips where the package is not, or not for this GPU."""
    import torch

    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    if backend == "tensorrt-rtx" and capability in ((9, 0), (10, 0), (10, 3)):
        pytest.skip(f"TensorRT for RTX does not run on sm{capability[0]}{capability[1]}")
    path = write_plan(bundle, backend, folder / "model.plan", *profiles)
    return TensorRtSession(path, bundle.artifact().signature, backend=backend, **options)
