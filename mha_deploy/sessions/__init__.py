"""Sessions: one file a runtime, one contract for all (`base.Session`).

base.py               the contract
placement.py          where to run, as a caller asks for it
settings.py           where to run, as the artifact asks for it
reference.py          PyTorch
onnx_runtime.py       ONNX Runtime
onnx_runtime_cuda.py  ONNX Runtime's CUDA provider, tensors kept on the device
openvino.py           OpenVINO, in fp32 or bf16
torch_module.py       PyTorch as a user would otherwise keep it, eager or compiled
routed.py             two sessions as one, by length
tensorrt.py           TensorRT plans
engine.py             a plan, opened: profiles and execution contexts
packed.py             packed graphs behind tokens and lengths
memory.py             device memory and a stream, over torch
stages.py             copies and computing of a run on a device, timed apart
fake.py               a Python function, for tests
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mha_deploy.errors import MissingError, SessionError
from mha_deploy.manifest import Artifact
from mha_deploy.precision import Precision
from mha_deploy.sessions.base import Session
from mha_deploy.sessions.placement import DEFAULT_PLACEMENT, DEVICES, Placement
from mha_deploy.sessions.routed import RoutedSession, length_of
from mha_deploy.sessions.settings import ArtifactSettings, placed, placements

__all__ = [
    "DEFAULT_PLACEMENT",
    "DEVICES",
    "ArtifactSettings",
    "Placement",
    "RoutedSession",
    "Session",
    "length_of",
    "open_onnx_runtime",
    "open_session",
    "placed",
    "placements",
]


def open_session(folder: Path, artifact: Artifact, placement: Placement) -> Session:
    """A session over `artifact` of the bundle in `folder`, after its files were checked.

    A TensorRT engine runs on an NVIDIA GPU whatever `placement` says: it has no other place. What an
    artifact's own settings say goes before `placement`: what then holds is `placed`.

    Raises:
        BundleError: a file of the artifact is not the one recorded.
        MissingError: this machine lacks the runtime, the provider or the GPU.
    """
    placement = ArtifactSettings.of(artifact).placed(placement)
    if artifact.runtime == "routed":
        return _routed(folder, artifact, placement)
    if artifact.runtime == "openvino":
        from mha_deploy.sessions.openvino import OpenVinoSession

        return OpenVinoSession(
            artifact.path(folder),
            artifact.signature,
            name=artifact.name,
            precision=artifact.precision,
            placement=placement,
        )
    if artifact.runtime == "onnxruntime":
        return open_onnx_runtime(folder, artifact, placement)
    if artifact.runtime in ("tensorrt", "tensorrt-rtx"):
        from mha_deploy.sessions.tensorrt import TensorRtSession

        return TensorRtSession(
            artifact.path(folder),
            artifact.signature,
            backend=artifact.runtime,
            name=artifact.name,
            precision=artifact.precision,
            cuda_graphs=placement.cuda_graphs,
            poison=placement.poison,
            rebuild=artifact.details["passport"]["command"].replace("BUNDLE", f"'{folder}'"),
        )
    raise SessionError(
        f"artifact {artifact.name!r} needs runtime {artifact.runtime!r}, unknown to this version"
    )


def _routed(folder: Path, artifact: Artifact, placement: Placement) -> Session:
    first, second = artifact.routes
    short = open_session(folder, first, placement)
    try:
        long = open_session(folder, second, placement)
    except BaseException:
        short.close()
        raise
    up_to_length = artifact.details["routes"]["up_to_length"]
    return RoutedSession(short, long, up_to_length=up_to_length, name=artifact.name)


def open_onnx_runtime(
    folder: Path, artifact: Artifact, placement: Placement, *, profile_into: str = ""
) -> Session:
    """`open_session` for an artifact of ONNX Runtime, which with `profile_into` profiles its nodes.

    Closing then writes the trace into that folder.

    Raises:
        BundleError, MissingError: as `open_session`.
        GraphError: the file cannot be loaded.
    """
    from mha_deploy.sessions.onnx_runtime import OnnxRuntimeSession
    from mha_deploy.sessions.onnx_runtime_cuda import OnnxRuntimeCudaSession

    settings = ArtifactSettings.of(artifact)
    placement = settings.placed(placement)
    name, precision = artifact.name, artifact.precision
    if precision is Precision.BF16 and "twin_of" not in artifact.details and placement.device == "cpu":
        raise MissingError(
            f"artifact {name!r} is bf16, which ONNX Runtime does not compute on a CPU; its fp32 twin "
            f"{name + '-twin'!r} stands for it there"
        )
    path, signature = artifact.path(folder), artifact.signature
    if placement.device == "cuda":
        try:
            return OnnxRuntimeCudaSession(
                path,
                signature,
                name=name,
                precision=precision,
                placement=replace(placement, fallback=""),
                cuda_graphs=placement.cuda_graphs,
                profile_into=profile_into,
            )
        except MissingError:
            if not placement.fallback:
                raise
            placement = replace(placement, device=placement.fallback)
    return OnnxRuntimeSession(
        path,
        signature,
        name=name,
        precision=precision,
        placement=placement,
        profile_into=profile_into,
        spinning=settings.spinning,
    )
