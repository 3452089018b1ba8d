"""OpenVINO on the CPU: it reads the same ONNX files, and computes in bf16 where the CPU does.

Its own threads take no part in those of other runtimes; `provider` shows the precision that runs.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np

from mha_deploy.errors import GraphError, MissingError
from mha_deploy.machine import usable_cpus, version
from mha_deploy.precision import Precision, numpy_dtype
from mha_deploy.sessions.base import Session
from mha_deploy.sessions.placement import DEFAULT_PLACEMENT, Placement
from mha_deploy.signature import Array, Feeds, Signature
from mha_deploy.staging import interrupts_held

# OpenVINO's names for the precisions that a session may ask for, and what the CPU plug-in must offer.
HINTS = {Precision.FP32: ("f32", "FP32"), Precision.BF16: ("bf16", "BF16")}


class OpenVinoSession(Session):
    """Runs an ONNX file on the CPU, its products in `precision`.

    Strict: OpenVINO takes the precision as a hint, and by default picks bf16 by itself where the CPU
    has it. Here the precision asked for is set, and read back.

    Raises:
        MissingError: openvino is not installed, the CPU lacks the precision, or a GPU is asked for.
        GraphError: the file cannot be loaded.
    """

    def __init__(
        self,
        path: Path,
        signature: Signature,
        *,
        name: str = "openvino",
        precision: Precision = Precision.FP32,
        placement: Placement = DEFAULT_PLACEMENT,
    ) -> None:
        lacking = lacks(precision)
        if not lacking and placement.device != "cpu" and placement.fallback != "cpu":
            lacking = f"OpenVINO runs here on the CPU, and device {placement.device!r} was asked for"
        if lacking:
            raise MissingError(lacking)
        compiled = _compiled(path, precision, placement.threads or usable_cpus())
        self._request: Any = compiled.create_infer_request()
        self._tensor: Any = _openvino().Tensor
        super().__init__(name, signature, precision, f"OpenVINO CPU {precision.value}")

    def _execute(self, feeds: Feeds) -> dict[str, Array]:
        given = {name: np.ascontiguousarray(array) for name, array in feeds.items()}
        sizes = self.signature.check(feeds)
        # Written into new arrays, which a later run does not touch: its own memory would have to be copied.
        found = {
            tensor.name: np.empty(self.signature.shape(tensor, sizes), numpy_dtype(tensor.dtype))
            for tensor in self.signature.outputs
        }
        try:
            for name, array in found.items():
                self._request.set_tensor(name, self._tensor(array, shared_memory=True))
            self._request.infer(given, share_inputs=True, share_outputs=True)
        except RuntimeError as error:
            raise GraphError(f"OpenVINO failed to run {self.name!r}: {_one_line(error)}") from error
        return found

    def _release(self) -> None:
        self._request = None


def lacks(precision: Precision) -> str:
    """Why OpenVINO does not run in `precision` here, or ""."""
    if precision not in HINTS:
        return f"OpenVINO runs the block in {' or '.join(HINTS)} here, and {precision} was asked for"
    if not version("openvino"):
        return "openvino is not installed; install it with: pip install 'mha-deploy[openvino]'"
    offered = _core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    if HINTS[precision][1] not in offered:
        return f"this CPU does not compute in {precision} (bf16 takes AVX512_BF16 or AMX)"
    return ""


def _compiled(path: Path, precision: Precision, threads: int) -> Any:
    hint, _ = HINTS[precision]
    options = {
        "INFERENCE_PRECISION_HINT": hint,
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": "LATENCY",
        # Pinned, the threads of every session in a process go to the same cores, the first ones.
        "ENABLE_CPU_PINNING": False,
    }
    core = _core()
    try:
        compiled = core.compile_model(str(path), "CPU", options)
    except RuntimeError as error:
        raise GraphError(f"OpenVINO cannot load {path}: {_one_line(error)}") from error
    taken = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
    if taken != hint:
        raise MissingError(f"OpenVINO was asked for {precision} and took {taken}; choose another artifact")
    return compiled


def _core() -> Any:
    """OpenVINO's entry point. Raises MissingError as `_openvino` does."""
    return _openvino().Core()


def _openvino() -> Any:
    """The module.

    Raises:
        MissingError: openvino is not installed, or does not load.
    """
    try:
        with interrupts_held():
            return importlib.import_module("openvino")
    except ImportError as error:
        raise MissingError(
            f"openvino does not load ({_one_line(error)}); install it with: "
            "pip install 'mha-deploy[openvino]'"
        ) from error


def _one_line(error: BaseException) -> str:
    """OpenVINO's errors end with what they are about; the lines before name its source files."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
