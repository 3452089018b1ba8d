"""What this machine has, and what each missing piece would bring."""

from __future__ import annotations

import importlib.util
import math
import platform
from dataclasses import dataclass

from mha_deploy import machine


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of `doctor`. `state` is "ok", "missing" or "problem"."""

    what: str
    state: str
    detail: str

    def to_json(self) -> dict[str, str]:
        return {"what": self.what, "state": self.state, "detail": self.detail}


def examine() -> list[Finding]:
    """Versions, devices, providers and CPU features; problems first seen here rather than in a run."""
    findings = [
        Finding("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        Finding("cpu", "ok", f"{machine.cpu_model()}, {machine.usable_cpus()} cores for this process"),
        _cpu_features(),
        _timing(),
    ]
    findings += [_package(name, brings) for name, brings in _BASE.items()]
    findings += [_onnxruntime(), _providers(), _cuda()]
    findings += [_package(name, brings) for name, brings in _OPTIONAL.items()]
    return findings


_BASE = {
    "torch": "the reference and the exporter",
    "onnx": "graphs",
    "onnxscript": "the exporter's operators",
}
_OPTIONAL = {
    "tensorrt": "pip install 'mha-deploy[gpu]' would bring TensorRT engines, on a machine with an NVIDIA GPU",
    "tensorrt-rtx": "pip install 'mha-deploy[rtx]' would bring TensorRT for RTX engines, built without a GPU",
    "openvino": "OpenVINO would bring bf16 on CPUs that have it",
}


def _cpu_features() -> Finding:
    has = machine.cpu_features()
    lacking = [feature for feature in machine.CPU_FEATURES if feature not in has]
    detail = ", ".join(has) or "none of those that matter here"
    return Finding("cpu features", "ok", detail + (f" (not: {', '.join(lacking)})" if lacking else ""))


def _timing() -> Finding:
    """What timings will stand on here."""
    governor, times = machine.governor(), machine.cpu_times()
    advice = "" if governor == "performance" else " (changes with the load; performance would not)"
    frequency = (
        f"{machine.frequency_mhz():.0f} MHz, governor {governor}{advice}" if governor else "not readable"
    )
    stolen = (
        "not readable" if math.isnan(times.total_s) else f"{times.steal_s / times.total_s:.1%} since boot"
    )
    return Finding("timing", "ok", f"frequency: {frequency}; stolen by other machines: {stolen}")


def _package(name: str, brings: str) -> Finding:
    found = machine.version(name)
    return Finding(name, "ok", found) if found else Finding(name, "missing", brings)


def _onnxruntime() -> Finding:
    cpu, gpu = machine.version("onnxruntime"), machine.version("onnxruntime-gpu")
    if cpu and gpu:
        return Finding(
            "onnxruntime",
            "problem",
            f"onnxruntime {cpu} and onnxruntime-gpu {gpu} are both installed and overwrite each other's "
            "files; uninstall both, then install one: pip install 'mha-deploy[cpu]' or 'mha-deploy[gpu]'",
        )
    if not cpu and not gpu:
        return Finding(
            "onnxruntime", "missing", "pip install 'mha-deploy[cpu]' would bring verify, infer, bench"
        )
    return Finding("onnxruntime", "ok", f"onnxruntime {cpu}" if cpu else f"onnxruntime-gpu {gpu}")


def _providers() -> Finding:
    if importlib.util.find_spec("onnxruntime") is None:
        return Finding("execution providers", "missing", "they come with onnxruntime")
    try:
        import onnxruntime

        listed = ", ".join(onnxruntime.get_available_providers())
    except (ImportError, OSError, AttributeError) as error:
        return Finding("execution providers", "problem", _broken("onnxruntime", error))
    return Finding("execution providers", "ok", f"{listed} (compiled in; a session shows which one runs)")


def _broken(package: str, error: Exception) -> str:
    return f"{package} is installed but does not load: {error}; uninstall it and install it again"


def _cuda() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("NVIDIA GPU", "missing", "torch is needed to look for one")
    try:
        import torch
    except (ImportError, OSError) as error:
        return Finding("NVIDIA GPU", "problem", _broken("torch", error))
    if not torch.cuda.is_available():
        return Finding(
            "NVIDIA GPU", "missing", "none visible; one would bring engines that run and --device cuda"
        )
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Finding("NVIDIA GPU", "ok", ", ".join(names))
