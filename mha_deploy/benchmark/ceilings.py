"""What the part of the machine that runs can do: the best of each of four yardsticks, in all rounds.

compute    a plain MatMul
memory     one stream in and one out of memory, as in STREAM's "copy" and "scale" (McCalpin, 1995)
cache      the same on arrays that stay in the cache
overhead   the least that can be run: what a run costs that computes nothing

The best, as STREAM takes it: a ceiling that a neighbour lowers is none. Drift is seen in the medians.
`ceilings_cpu.py` and `ceilings_gpu.py` have the yardsticks of a CPU and of a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mha_deploy.benchmark.rounds import Samples, Turn

# Arrays read and written, as STREAM counts them: not what a write first fetches.
STREAMS = 2
# Of the time that a size of the grid gets: a ceiling needs less.
SHARE = 0.25
COMPUTE, MEMORY, CACHE, OVERHEAD = "compute ceiling", "memory ceiling", "cache ceiling", "overhead"


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What was measured beside the block; `cache_bytes` tell which of the two bandwidths counts."""

    gflops: float
    memory_gb_s: float
    cache_gb_s: float
    overhead_ms: float
    cache_bytes: int
    what: str
    samples: Mapping[str, Samples]

    def bandwidth_gb_s(self, working_set_bytes: int) -> float:
        """That of the cache for what fits into it, else that of memory."""
        return self.cache_gb_s if working_set_bytes <= self.cache_bytes else self.memory_gb_s

    def to_json(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "gflops": self.gflops,
            "memory_gb_s": self.memory_gb_s,
            "cache_gb_s": self.cache_gb_s,
            "overhead_ms": self.overhead_ms,
            "cache_bytes": self.cache_bytes,
            "samples": {name: samples.to_json() for name, samples in self.samples.items()},
        }


@dataclass(frozen=True, slots=True)
class Yardsticks:
    """The four turns, and what each computes or moves: `turns` to measure, then `read` what they took."""

    turns: tuple[Turn, ...]
    flops: int
    memory_bytes: int
    cached_bytes: int
    cache_bytes: int
    what: str

    def read(self, taken: Mapping[str, Samples]) -> Ceilings:
        own = {turn.name: taken[turn.name] for turn in self.turns}
        best_ms = {name: min(samples.merged_ms) for name, samples in own.items()}
        return Ceilings(
            gflops=self.flops / best_ms[COMPUTE] / 1e6,
            memory_gb_s=self.memory_bytes / best_ms[MEMORY] / 1e6,
            cache_gb_s=self.cached_bytes / best_ms[CACHE] / 1e6,
            overhead_ms=best_ms[OVERHEAD],
            cache_bytes=self.cache_bytes,
            what=self.what,
            samples=own,
        )
