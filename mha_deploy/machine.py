"""What this machine is: CPU, the cores that this process may use, versions of what is installed.

And how it fares: what its cores do for others, and what slows them.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

# What matters to attention: widths of the vector units, then int8 and bf16 products.
CPU_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
CXX_COMPILERS = ("g++", "clang++", "c++")
GPU_FIELDS = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw", "clocks_throttle_reasons.active")
RECORDED = (
    "torch",
    "onnx",
    "onnxscript",
    "onnxruntime",
    "onnxruntime-gpu",
    "tensorrt",
    "tensorrt-rtx",
    "openvino",
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


def most_threads() -> int:
    """More threads than this are a slip: they take memory without end, and nothing runs for starting them."""
    return max(64, 4 * usable_cpus())


def cpu_model() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def cpu_features() -> tuple[str, ...]:
    """Those of `CPU_FEATURES` that the kernel reports."""
    flags = set(_cpuinfo("flags").split())
    return tuple(feature for feature in CPU_FEATURES if feature in flags)


def _cpuinfo(field: str) -> str:
    lines = _text("/proc/cpuinfo").splitlines()
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


def fingerprint() -> str:
    """A short hash of what decides which engine is fastest: CPU, cores, GPUs and versions."""
    gpus = sorted(_text(str(path)) for path in Path("/proc/driver/nvidia/gpus").glob("*/information"))
    found = {key: value for key, value in describe().items() if key != "system"} | {"gpus": gpus}
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Seconds since boot, summed over the cores that this process may use; NaN where not readable.

    `busy_s` is everybody's work, `steal_s` what the hypervisor gave to other machines, and `total_s`
    all of it, idle time included (Linux, `man 5 proc_stat`).
    """

    busy_s: float
    steal_s: float
    total_s: float


def cpu_times() -> CpuTimes:
    nan = float("nan")
    if not hasattr(os, "sched_getaffinity"):
        return CpuTimes(nan, nan, nan)
    names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    fields = [line.split() for line in _text("/proc/stat").splitlines()]
    cores = [[int(ticks) for ticks in rest[:8]] for name, *rest in filter(None, fields) if name in names]
    if not cores:
        return CpuTimes(nan, nan, nan)
    user, nice, system, idle, waiting, irq, softirq, steal = (
        sum(ticks) / os.sysconf("SC_CLK_TCK") for ticks in zip(*cores, strict=True)
    )
    busy = user + nice + system + irq + softirq
    return CpuTimes(busy, steal, busy + steal + idle + waiting)


def governor() -> str:
    """The governors of the cores' frequency, as "performance"; "" where none shows, as in most VMs."""
    return "/".join(sorted({_text(f"{folder}/scaling_governor").strip() for folder in _cpufreq()} - {""}))


def frequency_mhz() -> float:
    """The cores' mean frequency now; NaN where it is not to be read or cannot be seen to change."""
    kilohertz = [_text(f"{folder}/scaling_cur_freq").strip() for folder in _cpufreq()]
    readable = [int(text) for text in kilohertz if text.isdigit()]
    return sum(readable) / len(readable) / 1e3 if readable else float("nan")


def thermal_throttles() -> int:
    """How often the cores were slowed for heat since boot, where the kernel counts that."""
    counts = [_text(f"{path}/thermal_throttle/core_throttle_count").strip() for path in _cpu_folders()]
    return sum(int(count) for count in counts if count.isdigit())


def quota_throttles() -> int:
    """How often a cgroup's CPU quota stopped this process, where there is one."""
    for path in ("/sys/fs/cgroup/cpu.stat", "/sys/fs/cgroup/cpu/cpu.stat"):
        for line in _text(path).splitlines():
            name, _, count = line.partition(" ")
            if name == "nr_throttled" and count.strip().isdigit():
                return int(count)
    return 0


def last_level_cache_bytes() -> int:
    """Bytes of the largest cache that the first core sees; 32 MiB where it is not to be read."""
    sizes = [_text(f"/sys/devices/system/cpu/cpu0/cache/index{level}/size").strip() for level in range(5)]
    kilobytes = [int(size.removesuffix("K")) for size in sizes if size.removesuffix("K").isdigit()]
    return max(kilobytes, default=32 * 2**10) * 2**10


def gpu_clocks() -> dict[str, str]:
    """Clocks, heat, power and throttling of each NVIDIA GPU now, as nvidia-smi says; {} without it."""
    fields = ",".join(GPU_FIELDS)
    try:
        found = subprocess.run(
            ["nvidia-smi", f"--query-gpu=index,{fields}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    rows = [line.split(", ") for line in found.stdout.splitlines()]
    return {
        f"gpu {index} {field}": value
        for index, *values in rows
        for field, value in zip(GPU_FIELDS, values, strict=False)
    }


def _cpufreq() -> list[str]:
    return [f"{folder}/cpufreq" for folder in _cpu_folders()]


def _cpu_folders() -> list[str]:
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return [f"/sys/devices/system/cpu/cpu{core}" for core in cores]


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def lacks_cxx_compiler() -> str:
    """Why torch.compile does not run here, or ""."""
    wanted = (os.environ["CXX"],) if os.environ.get("CXX") else CXX_COMPILERS
    if any(shutil.which(each) for each in wanted):
        return ""
    return f"torch.compile needs a C++ compiler ({', '.join(wanted)}); install one, as with: apt install g++"
