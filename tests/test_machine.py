"""What a machine says of itself."""

import json
import math
import os
import platform
from pathlib import Path

import pytest

from mha_deploy import machine


def files(monkeypatch, texts):
    """Let the files of the system hold `texts`; those not named are missing."""

    def read_text(path, **_):
        if str(path) not in texts:
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return texts[str(path)]

    monkeypatch.setattr(Path, "read_text", read_text)


def affinity(monkeypatch, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)


@pytest.mark.parametrize(
    ("quota", "usable"),
    [
        ("max 100000", 8),
        ("400000 100000", 4),
        ("250000 100000", 2),
        ("50000 100000", 1),
        ("1600000 100000", 8),
        ("nonsense", 8),
        ("", 8),
    ],
)
def test_usable_cores_are_those_of_the_affinity_cut_by_the_quota(monkeypatch, quota, usable):
    affinity(monkeypatch, 8)
    files(monkeypatch, {"/sys/fs/cgroup/cpu.max": quota})
    assert machine.usable_cpus() == usable


def test_without_a_quota_the_affinity_counts(monkeypatch):
    affinity(monkeypatch, 3)
    files(monkeypatch, {})
    assert machine.usable_cpus() == 3


def test_without_an_affinity_every_core_counts(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    files(monkeypatch, {})
    assert machine.usable_cpus() == 1


def test_cpu_model_and_features_are_the_kernels(monkeypatch):
    lines = (
        "processor\t: 0",
        "model name\t: A CPU: 2 GHz",
        "flags\t\t: sse avx2 amx_int8 avx512fp16",
        "bugs\t:",
    )
    cpuinfo = "\n".join(lines)
    files(monkeypatch, {"/proc/cpuinfo": cpuinfo})
    assert machine.cpu_model() == "A CPU: 2 GHz"
    assert machine.cpu_features() == ("avx2", "amx_int8")


def test_without_cpuinfo_there_is_a_model_still_and_no_feature(monkeypatch):
    files(monkeypatch, {})
    assert machine.cpu_model() in (platform.processor(), platform.machine())
    assert machine.cpu_features() == ()


def test_a_distribution_that_is_not_installed_has_no_version():
    assert machine.version("no-such-distribution-anywhere") == ""
    assert machine.version("numpy") == __import__("numpy").__version__


def test_versions_hold_only_what_is_installed(monkeypatch):
    monkeypatch.setattr(machine, "version", lambda name: "2.0" if name in ("torch", "tensorrt") else "")
    assert machine.versions() == {"torch": "2.0", "tensorrt": "2.0"}


def test_a_description_is_json_and_names_neither_host_nor_user():
    described = json.loads(json.dumps(machine.describe()))
    assert set(described) == {"system", "cpu", "cpu_features", "usable_cpus", "python", "versions"}
    assert described["usable_cpus"] >= 1
    assert described["system"] == f"{platform.system()} {platform.machine()}"


STAT = """cpu  900 0 0 0 0 0 0 0 0 0
cpu0 100 10 50 800 20 5 15 30 7 0
cpu1 200 0 50 700 0 0 0 0 0 0
cpu2 999 999 999 999 999 999 999 999 0 0
intr 1 2 3
"""


def test_cpu_times_are_those_of_the_usable_cores_in_seconds(monkeypatch):
    affinity(monkeypatch, 2)
    monkeypatch.setattr(os, "sysconf", lambda _: 100)
    files(monkeypatch, {"/proc/stat": STAT})
    found = machine.cpu_times()
    assert (found.busy_s, found.steal_s, found.total_s) == pytest.approx((4.3, 0.3, 19.8))


def test_what_the_system_does_not_tell_is_nan_empty_or_none(monkeypatch):
    affinity(monkeypatch, 2)
    files(monkeypatch, {})
    assert math.isnan(machine.cpu_times().busy_s)
    assert math.isnan(machine.frequency_mhz())
    assert (machine.governor(), machine.thermal_throttles(), machine.quota_throttles()) == ("", 0, 0)
    assert machine.last_level_cache_bytes() == 32 * 2**20
    monkeypatch.delattr(os, "sched_getaffinity")
    assert math.isnan(machine.cpu_times().busy_s)


def test_frequency_governor_throttling_and_cache_are_read(monkeypatch):
    affinity(monkeypatch, 2)
    cpu = "/sys/devices/system/cpu/cpu"
    files(
        monkeypatch,
        {
            f"{cpu}0/cpufreq/scaling_cur_freq": "3000000\n",
            f"{cpu}1/cpufreq/scaling_cur_freq": "2000000\n",
            f"{cpu}0/cpufreq/scaling_governor": "schedutil\n",
            f"{cpu}1/cpufreq/scaling_governor": "schedutil\n",
            f"{cpu}0/thermal_throttle/core_throttle_count": "2\n",
            f"{cpu}1/thermal_throttle/core_throttle_count": "3\n",
            f"{cpu}0/cache/index2/size": "1024K\n",
            f"{cpu}0/cache/index3/size": "65536K\n",
            "/sys/fs/cgroup/cpu.stat": "usage_usec 5\nnr_periods 9\nnr_throttled 4\n",
        },
    )
    assert (machine.frequency_mhz(), machine.governor()) == (2500, "schedutil")
    assert (machine.thermal_throttles(), machine.quota_throttles()) == (5, 4)
    assert machine.last_level_cache_bytes() == 64 * 2**20


def test_the_clocks_of_gpus_are_those_that_nvidia_smi_tells(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, 1980 MHz, 2619 MHz, 31, 75.10 W, 0x0000000000000001'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = machine.gpu_clocks()
    assert (found["gpu 0 clocks.sm"], found["gpu 0 power.draw"]) == ("1980 MHz", "75.10 W")
    assert len(found) == len(machine.GPU_FIELDS)
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert machine.gpu_clocks() == {}
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert machine.gpu_clocks() == {}
