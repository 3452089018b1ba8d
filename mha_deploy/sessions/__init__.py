"""Sessions: one file a runtime, one contract for all (`base.Session`)."""

from __future__ import annotations

from pathlib import Path

from mha_deploy.errors import MissingError, SessionError
from mha_deploy.manifest import Artifact
from mha_deploy.precision import Precision
from mha_deploy.sessions.base import Session
from mha_deploy.sessions.placement import DEVICES, Placement

__all__ = ["DEVICES", "Placement", "Session", "open_session"]


def open_session(folder: Path, artifact: Artifact, placement: Placement) -> Session:
    """A session over `artifact` of the bundle in `folder`, after its files were checked.

    Raises:
        BundleError: a file of the artifact is not the one recorded.
        MissingError: this machine lacks the runtime, the provider or the GPU.
    """
    if (
        artifact.precision is Precision.BF16
        and placement.device == "cpu"
        and "twin_of" not in artifact.details
    ):
        raise MissingError(
            f"artifact {artifact.name!r} is bf16, which no runtime here computes on a CPU; its fp32 twin "
            f"{artifact.name + '-twin'!r} stands for it there, a GPU runs it itself"
        )
    if artifact.runtime == "onnxruntime":
        from mha_deploy.sessions.onnx_runtime import OnnxRuntimeSession

        return OnnxRuntimeSession(
            artifact.path(folder),
            artifact.signature,
            name=artifact.name,
            precision=artifact.precision,
            placement=placement,
        )
    raise SessionError(
        f"artifact {artifact.name!r} needs runtime {artifact.runtime!r}, unknown to this version"
    )
