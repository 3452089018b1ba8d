"""The ceilings of a GPU, by torch: large enough that the host's clock does for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mha_deploy.benchmark.ceilings import CACHE, COMPUTE, MEMORY, OVERHEAD, SHARE, STREAMS, Yardsticks
from mha_deploy.benchmark.rounds import Turn
from mha_deploy.precision import Precision

WIDTH = 8192  # of the square MatMul: milliseconds on the fastest GPU, beside the microseconds of a launch
REPEATS = 100  # of what is over in microseconds, between two waits


def gpu_yardsticks(precision: Precision) -> Yardsticks:
    """MatMul in `precision`, copies beyond and within the cache, and one launch, each waited for.

    fp32 products are full ones, as the sessions compute them, not TF32.
    """
    import torch

    device = torch.cuda.current_device()
    facts: Any = torch.cuda.get_device_properties(device)
    dtype = getattr(torch, precision.dtype_name)
    a, b, c = (torch.ones((WIDTH, WIDTH), dtype=dtype, device=device) for _ in range(3))
    memory_bytes, cached_bytes = 8 * facts.L2_cache_size, facts.L2_cache_size // 4
    one = torch.ones(1, device=device)
    work: dict[str, Callable[[], object]] = {
        COMPUTE: lambda: torch.mm(a, b, out=c),
        MEMORY: _copier(torch, memory_bytes, 1),
        CACHE: _copier(torch, cached_bytes, REPEATS),
        OVERHEAD: lambda: one.mul_(1),
    }

    def turn(name: str) -> Turn:
        def run() -> None:
            work[name]()
            torch.cuda.synchronize()

        return Turn(name, run, share=SHARE)

    return Yardsticks(
        tuple(map(turn, work)),
        2 * WIDTH**3,
        STREAMS * memory_bytes,
        STREAMS * cached_bytes * REPEATS,
        facts.L2_cache_size,
        f"{precision.value} MatMul {WIDTH} x {WIDTH} x {WIDTH}, torch on {facts.name}",
    )


def _copier(torch: Any, size: int, repeats: int) -> Callable[[], None]:
    source, target = (torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(2))

    def copy() -> None:
        for _ in range(repeats):
            target.copy_(source)

    return copy
