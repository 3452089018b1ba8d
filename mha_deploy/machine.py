"""What this machine is: CPU, the cores that this process may use, versions of what is installed."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

# What matters to attention: widths of the vector units, then int8 and bf16 products.
CPU_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
RECORDED = (
    "torch",
    "onnx",
    "onnxscript",
    "onnxruntime",
    "onnxruntime-gpu",
    "tensorrt",
    "tensorrt-rtx",
    "numpy",
)


def usable_cpus() -> int:
    """Cores that this process may use: its affinity, cut by a cgroup's CPU quota where one is set."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, _cgroup_quota(allowed)))


def _cgroup_quota(unlimited: int) -> int:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return unlimited if quota == "max" else int(quota) // int(period)
    except (OSError, ValueError):
        return unlimited


def cpu_model() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def cpu_features() -> tuple[str, ...]:
    """Those of `CPU_FEATURES` that the kernel reports."""
    flags = set(_cpuinfo("flags").split())
    return tuple(feature for feature in CPU_FEATURES if feature in flags)


def _cpuinfo(field: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(field)), "")


def version(distribution: str) -> str:
    """The installed version of a distribution, or "" where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def versions() -> dict[str, str]:
    """Versions of the packages that results depend on, for those installed."""
    return {name: found for name in RECORDED if (found := version(name))}


def describe() -> dict[str, object]:
    """The conditions that a measurement or an artifact stands on. Names no host and no user."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_model(),
        "cpu_features": list(cpu_features()),
        "usable_cpus": usable_cpus(),
        "python": platform.python_version(),
        "versions": versions(),
    }
