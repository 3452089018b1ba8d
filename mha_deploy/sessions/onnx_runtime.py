"""ONNX Runtime, where a placement says; what was asked for is what runs.

`onnx_runtime_cuda.py` is the session for its CUDA provider, which keeps tensors on the device.
"""

from __future__ import annotations

import contextlib
import copy
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from mha_deploy.errors import GraphError, MissingError
from mha_deploy.machine import cpu_features, usable_cpus
from mha_deploy.precision import Precision
from mha_deploy.sessions.base import Session
from mha_deploy.sessions.placement import DEFAULT_PLACEMENT, Placement
from mha_deploy.signature import Array, Feeds, Signature
from mha_deploy.staging import interrupts_held
from mha_deploy.tensorrt.backend import has_cuda_driver

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
# Full fp32 products, as verification holds fp32 to; ONNX Runtime's own default is TF32.
CUDA_OPTIONS: Mapping[str, str] = {"use_tf32": "0"}

# Processors with these multiply 8-bit integers into 32 bits.
VNNI = {"avx512_vnni", "avx_vnni"}

# Add and LayerNormalization fused into one: measured 2.7x further from fp64 than the two apart
# (post-norm, d_model 768, 2 x 512 tokens, ONNX Runtime 1.32 on a CPU), beyond what PyTorch scatters.
INACCURATE = ["SkipLayerNormFusion"]

# How the CUDA provider's own errors start: the device is at fault, not the file.
_OF_THE_DEVICE = re.compile(r"\b(CUDA|CUBLAS|CUDNN) failure")


class OnnxRuntimeSession(Session):
    """Runs an ONNX file where `placement` says.

    Strict: where ONNX Runtime would quietly fall back to another provider this raises, unless the
    placement allows it; `provider` shows what runs. With `profile_into` ONNX Runtime profiles its nodes,
    and closing writes the trace into that folder.

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
        profile_into: str = "",
        spinning: bool = True,
    ) -> None:
        self._session: Any = open_inference_session(
            path, placement, profile_into=profile_into, spinning=spinning
        )
        self._profiles = bool(profile_into)
        # Threads that ONNX Runtime has of its own would be wanted by all runs at once.
        self._shareable = placement.device == "cpu" and placement.threads == 1 and not profile_into
        self._outputs = [tensor.name for tensor in signature.outputs]
        super().__init__(name, signature, precision, self._session.get_providers()[0])

    def for_another_thread(self) -> Self | None:
        """Of one thread on the CPU: what its products read then lies in memory, and in caches, once."""
        self._check_open()
        if not self._shareable:
            return None
        another = copy.copy(self)
        another._owner, another._closed = 0, False
        return another

    def _execute(self, feeds: Feeds) -> dict[str, Array]:
        try:
            values = self._session.run(self._outputs, dict(feeds))
        except Exception as error:  # its exceptions share no public base class
            raise GraphError(f"ONNX Runtime failed to run {self.name!r}: {one_line(error)}") from error
        return dict(zip(self._outputs, values, strict=True))

    def _release(self) -> None:
        if self._profiles:
            self._session.end_profiling()
        self._session = None


def import_onnxruntime() -> Any:
    """The module, or MissingError with the command that brings it."""
    try:
        with interrupts_held():  # its package turns a KeyboardInterrupt into an ImportError
            import onnxruntime
    except ImportError as error:
        raise MissingError(
            "onnxruntime is not installed; install it with: pip install 'mha-deploy[cpu]' "
            "(or 'mha-deploy[gpu]' for NVIDIA; not both)"
        ) from error
    onnxruntime.disable_telemetry_events()  # it would complain where the user has no home to write to
    return onnxruntime


def open_inference_session(
    path: Path,
    placement: Placement,
    cuda_options: Mapping[str, str] = CUDA_OPTIONS,
    *,
    profile_into: str = "",
    spinning: bool = True,
) -> Any:
    """ONNX Runtime's own session, on the provider that `placement` asks for.

    `cuda_options` are the CUDA provider's, where that is the one. With `spinning` idle threads wait
    for work at full speed, which answers sooner where the cores are free, and disturbs whoever shares them.

    Raises:
        MissingError: onnxruntime is not installed, or the provider does not run here.
        GraphError: the file cannot be loaded.
    """
    onnxruntime = import_onnxruntime()
    provider = PROVIDERS[placement.device]
    lacking = _lacking(onnxruntime, provider)
    if lacking and not placement.fallback:
        raise MissingError(_not_here(provider, lacking))
    wanted: list[Any] = ["CPUExecutionProvider"]
    if placement.device == "cuda" and not lacking:
        wanted.insert(0, (provider, dict(cuda_options)))
        with contextlib.redirect_stdout(sys.stderr):  # where it complains with print
            onnxruntime.preload_dlls()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = placement.threads or usable_cpus()
    if not spinning:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if placement.shares:
        options.add_session_config_entry("session.force_spinning_stop", "1")
    if not VNNI & set(cpu_features()):
        # There, products of uint8 and int8 saturate at 16 bits and come out wrong; another kernel, which
        # is the slower one where there is VNNI, does not.
        options.add_session_config_entry("session.x64quantprecision", "1")
    if profile_into:
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(profile_into) / "trace")
    options.log_severity_level = 4  # failures come back as exceptions; its log would repeat them
    try:
        session = onnxruntime.InferenceSession(
            str(path), options, providers=wanted, disabled_optimizers=INACCURATE, enable_fallback=0
        )
    except Exception as error:  # its exceptions share no public base class
        if not _OF_THE_DEVICE.search(str(error)):
            raise GraphError(f"ONNX Runtime cannot load {path}: {one_line(error)}") from error
        if placement.fallback:
            elsewhere = Placement(placement.fallback, placement.threads)
            return open_inference_session(path, elsewhere, profile_into=profile_into, spinning=spinning)
        raise MissingError(_not_here(provider, one_line(error))) from error
    running = session.get_providers()[0]
    if running != provider and not placement.fallback:
        raise MissingError(_not_here(provider, f"ONNX Runtime fell back to {running}"))
    return session


def cuda_lacks() -> str:
    """Why ONNX Runtime has no GPU here, or ""."""
    return _lacking(import_onnxruntime(), PROVIDERS["cuda"])


def _lacking(onnxruntime: Any, provider: str) -> str:
    """Why `provider` cannot run here, as far as can be told before a session is opened."""
    available = onnxruntime.get_available_providers()
    if provider not in available:
        return f"this onnxruntime build has {', '.join(available)}"
    if provider == PROVIDERS["cuda"] and not has_cuda_driver():
        return "no NVIDIA driver with a GPU answers here"
    return ""


def _not_here(provider: str, found: str) -> str:
    return (
        f"{provider} was asked for, but {found}; install 'mha-deploy[gpu]' on a machine with an NVIDIA "
        "GPU, or allow the CPU with --fallback cpu"
    )


def one_line(error: BaseException) -> str:
    """The first line of an error's text that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
