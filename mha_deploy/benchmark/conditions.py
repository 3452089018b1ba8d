"""What else went on while something was measured: neighbours, stolen time, throttling, drift."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mha_deploy import machine
from mha_deploy.latency import CONFIDENCE, figure, nearest_rank

# Shares from which a reader should know: less moves a median by less than it scatters.
NEIGHBOURS_NOTICED = 0.05
STEAL_NOTICED = 0.02
DRIFT_NOTICED = 0.05
FREQUENCY_NOTICED = 0.05


@dataclass(frozen=True, slots=True)
class Conditions:
    """Shares are of the time of all usable cores; NaN, or "" for the governor, where not readable.

    `drift` is the change of a yardstick's time from the first round to the last (Theil and Sen's
    slope), where it is a trend (Mann and Kendall's test at 99 %), else 0. `gpus` are the clocks, heat and
    power of NVIDIA GPUs before and after, in nvidia-smi's words.
    """

    seconds: float
    neighbours_share: float
    steal_share: float
    governor: str
    frequency_mhz: tuple[float, float]
    thermal_throttles: int
    quota_throttles: int
    drift: float
    gpus: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {})

    def notices(self) -> list[str]:
        """What a reader of the figures should know, a sentence each."""
        before, after = self.frequency_mhz
        found = {
            f"busy neighbours: other processes took {self.neighbours_share:.0%} of the cores' time": (
                self.neighbours_share >= NEIGHBOURS_NOTICED
            ),
            f"stolen time: the hypervisor gave {self.steal_share:.0%} of the cores' time to others": (
                self.steal_share >= STEAL_NOTICED
            ),
            f"drift: the machine ended {abs(self.drift):.0%} {'slower' if self.drift > 0 else 'faster'} than "
            "it began": abs(self.drift) >= DRIFT_NOTICED,
            f"frequency: {before:.0f} MHz before, {after:.0f} MHz after": (
                abs(after / before - 1) >= FREQUENCY_NOTICED
            ),
            f"heat: the cores were throttled {self.thermal_throttles} times": self.thermal_throttles > 0,
            f"quota: the cgroup stopped this process {self.quota_throttles} times": self.quota_throttles > 0,
            f"governor: {self.governor}, which changes the frequency with the load": (
                self.governor not in ("", "performance")
            ),
        }
        return [text for text, noticed in found.items() if noticed]

    def to_json(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "neighbours_share": figure(self.neighbours_share),
            "steal_share": figure(self.steal_share),
            "governor": self.governor,
            "frequency_mhz": [figure(mhz) for mhz in self.frequency_mhz],
            "thermal_throttles": self.thermal_throttles,
            "quota_throttles": self.quota_throttles,
            "drift": self.drift,
            "gpus": [dict(each) for each in self.gpus],
        }


def watch() -> Callable[[Sequence[float]], Conditions]:
    """Start to watch; what comes back, called with a yardstick's time in each round, ends it."""
    started, own = time.perf_counter(), time.process_time()
    cpu, mhz = machine.cpu_times(), machine.frequency_mhz()
    gpus = machine.gpu_clocks()
    heat, quota = machine.thermal_throttles(), machine.quota_throttles()

    def end(yardstick_ms: Sequence[float]) -> Conditions:
        now = machine.cpu_times()
        total = now.total_s - cpu.total_s or math.nan
        ours = time.process_time() - own
        return Conditions(
            seconds=time.perf_counter() - started,
            neighbours_share=max(0.0, now.busy_s - cpu.busy_s - ours) / total,
            steal_share=(now.steal_s - cpu.steal_s) / total,
            governor=machine.governor(),
            frequency_mhz=(mhz, machine.frequency_mhz()),
            thermal_throttles=machine.thermal_throttles() - heat,
            quota_throttles=machine.quota_throttles() - quota,
            drift=drift_of(yardstick_ms),
            gpus=(gpus, machine.gpu_clocks()),
        )

    return end


def drift_of(values: Sequence[float]) -> float:
    """The change from first to last as a share of the median, where there is a trend; else 0."""
    n = len(values)
    pairs = [(i, j) for i in range(n) for j in range(i + 1, n)]
    falls = sum(values[j] < values[i] for i, j in pairs)
    rises = sum(values[j] > values[i] for i, j in pairs)
    if not pairs or _chance(n, min(falls, rises)) > (1 - CONFIDENCE) / 2:
        return 0.0
    slopes = [(values[j] - values[i]) / (j - i) for i, j in pairs]
    return nearest_rank(slopes, 0.5) * (n - 1) / nearest_rank(values, 0.5)


def _chance(n: int, inversions: int) -> float:
    """How likely an order of n things drawn by chance has that few inversions (Kendall's statistic)."""
    counts = [1]
    for size in range(2, n + 1):
        counts = [sum(counts[max(0, k - size + 1) : k + 1]) for k in range(len(counts) + size - 1)]
    return sum(counts[: inversions + 1]) / math.factorial(n)
