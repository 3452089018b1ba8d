"""ONNX Runtime, on the CPU or through its CUDA provider; what was asked for is what runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mha_deploy.errors import GraphError, MissingError
from mha_deploy.machine import usable_cpus
from mha_deploy.precision import Precision
from mha_deploy.sessions.base import Session
from mha_deploy.sessions.placement import Placement
from mha_deploy.signature import Array, Feeds, Signature

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
DEFAULT_PLACEMENT = Placement()


class OnnxRuntimeSession(Session):
    """Runs an ONNX file where `placement` says.

    Strict: where ONNX Runtime would quietly fall back to another provider this raises, unless the
    placement allows it; `provider` shows what runs.

    Raises:
        MissingError: onnxruntime is not installed, or the provider does not run here.
        GraphError: the file cannot be loaded.
    """

    def __init__(
        self,
        path: Path,
        signature: Signature,
        *,
        name: str = "onnx",
        precision: Precision = Precision.FP32,
        placement: Placement = DEFAULT_PLACEMENT,
    ) -> None:
        onnxruntime = import_onnxruntime()
        self._session: Any = _open(onnxruntime, path, placement)
        self._outputs = [tensor.name for tensor in signature.outputs]
        super().__init__(name, signature, precision, self._session.get_providers()[0])

    def _execute(self, feeds: Feeds) -> dict[str, Array]:
        try:
            values = self._session.run(self._outputs, dict(feeds))
        except Exception as error:  # its exceptions share no public base class
            raise GraphError(f"ONNX Runtime failed to run {self.name!r}: {one_line(error)}") from error
        return dict(zip(self._outputs, values, strict=True))

    def _release(self) -> None:
        self._session = None


def import_onnxruntime() -> Any:
    """The module, or MissingError with the command that brings it."""
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingError(
            "onnxruntime is not installed; install it with: pip install 'mha-deploy[cpu]' "
            "(or 'mha-deploy[gpu]' for NVIDIA; not both)"
        ) from error
    return onnxruntime


def _open(onnxruntime: Any, path: Path, placement: Placement) -> Any:
    provider = PROVIDERS[placement.device]
    available = onnxruntime.get_available_providers()
    if provider not in available and not placement.fallback:
        raise MissingError(_not_here(provider, f"this onnxruntime build has {', '.join(available)}"))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = placement.threads or usable_cpus()
    options.log_severity_level = 4  # failures come back as exceptions; its log would repeat them
    wanted = [name for name in (provider, "CPUExecutionProvider") if name in available]
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=list(dict.fromkeys(wanted)))
    except Exception as error:  # its exceptions share no public base class
        raise GraphError(f"ONNX Runtime cannot load {path}: {one_line(error)}") from error
    running = session.get_providers()[0]
    if running != provider and not placement.fallback:
        raise MissingError(_not_here(provider, f"ONNX Runtime fell back to {running}"))
    return session


def _not_here(provider: str, found: str) -> str:
    return (
        f"{provider} was asked for, but {found}; install 'mha-deploy[gpu]' on a machine with an NVIDIA "
        "GPU, or allow the CPU with --fallback cpu"
    )


def one_line(error: BaseException) -> str:
    """The first line of an error's text that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
