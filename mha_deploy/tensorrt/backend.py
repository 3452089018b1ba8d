"""The TensorRT module that builds, told apart by what it can do and never by its version."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import warnings
from dataclasses import dataclass
from functools import cache
from types import ModuleType

from mha_deploy.errors import InputError, MissingError
from mha_deploy.tensorrt.log import Handle, make_logger

NAMES = ("auto", "tensorrt", "tensorrt-rtx")
_MODULES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
_BRING = {
    "tensorrt": "pip install 'mha-deploy[gpu]', on a machine with an NVIDIA GPU",
    "tensorrt-rtx": "pip install 'mha-deploy[rtx]', which needs no GPU to build",
}


@dataclass(frozen=True, slots=True)
class Backend:
    """A TensorRT module. `version` is for the record; nothing is decided by it."""

    name: str
    version: str
    module: ModuleType

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    @property
    def logger(self) -> Handle:
        return _logger(self.module)

    @property
    def has_targets(self) -> bool:
        """Compiles ahead of time for listed GPU architectures, as TensorRT for RTX does."""
        return hasattr(self.module.IBuilderConfig, "set_compute_capability")

    @property
    def has_timing_cache(self) -> bool:
        # A build that measures nothing has no timings to keep: there the calls exist and do nothing.
        return not self.has_targets and hasattr(self.module.IBuilderConfig, "create_timing_cache")

    @property
    def has_hardware_compatibility(self) -> bool:
        # The attribute exists in ahead-of-time builds too, where it is ignored with a warning.
        return not self.has_targets and hasattr(self.module, "HardwareCompatibilityLevel")

    @property
    def has_version_compatibility(self) -> bool:
        # An ahead-of-time package comes without the lean runtime that such a plan carries.
        return not self.has_targets and hasattr(self.module.BuilderFlag, "VERSION_COMPATIBLE")

    @property
    def has_refit(self) -> bool:
        return hasattr(self.module.BuilderFlag, "REFIT")

    @property
    def has_optimization_level(self) -> bool:
        return hasattr(self.module.IBuilderConfig, "builder_optimization_level")

    def network_flags(self) -> int:
        """Strongly typed: the default where it can no longer be chosen, a flag everywhere else."""
        flags = self.module.NetworkDefinitionCreationFlag
        return 1 << int(flags.STRONGLY_TYPED) if hasattr(flags, "STRONGLY_TYPED") else 0

    def supports_model(self, parser: Handle, model: bytes, path: str) -> bool:
        """Ask the parser for every node that it refuses; its errors hold the answer."""
        ask = getattr(parser, "supports_model_v2", None)
        answer = ask(model, path) if ask else parser.supports_model(model, path)[0]
        return bool(answer)


def load_backend(name: str = "auto") -> Backend:
    """The named module; `auto` is full TensorRT where a GPU is, else TensorRT for RTX.

    Raises:
        InputError: no such backend.
        MissingError: the package, or the GPU that full TensorRT builds on, is not here.
    """
    if name not in NAMES:
        raise InputError(f"--backend {name}: expected one of {', '.join(NAMES)}")
    if name == "auto":
        return _auto()
    if name == "tensorrt" and not has_cuda_driver():
        raise MissingError(
            "full TensorRT tunes on the GPU that it builds for, and this machine has no usable NVIDIA "
            f"driver. Build there, or build without a GPU with --backend tensorrt-rtx "
            f"({_BRING['tensorrt-rtx']})."
        )
    return _load(name)


def _auto() -> Backend:
    if has_cuda_driver() and importlib.util.find_spec("tensorrt") is not None:
        return _load("tensorrt")
    if importlib.util.find_spec("tensorrt_rtx") is not None:
        return _load("tensorrt-rtx")
    raise MissingError(
        "no TensorRT to build with. TensorRT for RTX: "
        + _BRING["tensorrt-rtx"]
        + ". Full TensorRT: "
        + _BRING["tensorrt"]
        + "."
    )


@cache
def _load(name: str) -> Backend:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of the bindings, at import
            module = importlib.import_module(_MODULES[name])
    except (ImportError, OSError) as error:
        raise MissingError(
            f"the package {_MODULES[name]} cannot be imported ({error}). To bring it: {_BRING[name]}."
        ) from error
    return as_backend(name, module)


def as_backend(name: str, module: ModuleType) -> Backend:
    """`module` as a backend.

    Raises:
        MissingError: it is too old to know attention as one operation.
    """
    version = str(getattr(module, "__version__", "unknown"))
    if not hasattr(module, "IAttention"):
        raise MissingError(
            f"{name} {version} does not know attention as one operation; 10.14 or newer does: {_BRING[name]}."
        )
    return Backend(name, version, module)


@cache
def _logger(module: ModuleType) -> Handle:
    return make_logger(module)


@cache
def has_cuda_driver() -> bool:
    """Whether an NVIDIA driver answers with at least one GPU."""
    for library in ("libcuda.so.1", "nvcuda.dll"):
        with contextlib.suppress(OSError, AttributeError):
            driver, count = ctypes.CDLL(library), ctypes.c_int(0)
            return bool(
                driver.cuInit(0) == 0
                and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
                and count.value > 0
            )
    return False
