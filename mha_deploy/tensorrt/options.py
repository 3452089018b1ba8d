"""What to build, checked against what the TensorRT at hand can do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mha_deploy.errors import InputError
from mha_deploy.tensorrt.backend import Backend
from mha_deploy.tensorrt.profiles import Profile
from mha_deploy.tensorrt.targets import resolve_targets

ATTENTION_MODES = ("auto", "fused", "decompose")
_LEVELS = range(6)


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """Everything that a plan depends on besides the ONNX file and the TensorRT version.

    Precision is not among it: it is a property of the ONNX file, every build is strongly typed.
    `attention`: "fused" wants a fused kernel for every attention, "decompose" lets TensorRT take
    every attention operator apart, "auto" lets it where there is no fused kernel.
    `workspace_bytes` 0 and `optimization_level` -1 leave the choice to TensorRT. The last four
    exist in full TensorRT only; `timing_cache` is a file to read, "" for none.

    Raises:
        InputError: a value that no TensorRT takes.
    """

    profiles: tuple[Profile, ...] = ()
    backend: str = "auto"
    targets: tuple[str, ...] = ()
    attention: str = "auto"
    tf32: bool = False
    workspace_bytes: int = 0
    optimization_level: int = -1
    refit: bool = False
    version_compatible: bool = False
    hardware_compatible: bool = False
    timing_cache: str = ""

    def __post_init__(self) -> None:
        if self.attention not in ATTENTION_MODES:
            raise InputError(f"--attention {self.attention}: expected one of {', '.join(ATTENTION_MODES)}")
        if self.workspace_bytes < 0:
            raise InputError(f"--workspace {self.workspace_bytes}: expected bytes, 0 for no limit")
        if self.optimization_level != -1 and self.optimization_level not in _LEVELS:
            raise InputError(f"optimization level {self.optimization_level}: expected 0 to {_LEVELS[-1]}")

    def check(self, backend: Backend) -> None:
        """Refuse what `backend` has not.

        Raises:
            InputError: an option that this TensorRT would ignore or cannot meet.
        """
        resolve_targets(backend, self.targets)
        asked = (
            (self.refit, backend.has_refit, "refittable plans"),
            (self.version_compatible, backend.has_version_compatibility, "version-compatible plans"),
            (self.hardware_compatible, backend.has_hardware_compatibility, "hardware compatibility levels"),
            (bool(self.timing_cache), backend.has_timing_cache, "timing cache"),
            (self.optimization_level != -1, backend.has_optimization_level, "optimization levels"),
        )
        for wanted, has, what in asked:
            if wanted and not has:
                instead = "; name the GPUs with --target-sm instead" if what.startswith("hardware") else ""
                raise InputError(
                    f"{backend} has no {what}{instead}. Leave the option out, or build with full "
                    f"TensorRT on a "
                    "machine with an NVIDIA GPU: --backend tensorrt."
                )
        if self.timing_cache and Path(self.timing_cache).is_dir():
            raise InputError(f"timing cache {self.timing_cache} is a folder; expected a file")

    def to_json(self) -> dict[str, Any]:
        """Plain data for a passport or a cache key; equal options give equal data."""
        plain = {
            name: getattr(self, name) for name in self.__slots__ if name not in ("profiles", "timing_cache")
        }
        plain["targets"] = list(self.targets)
        return {**plain, "profiles": [profile.to_json() for profile in self.profiles]}
