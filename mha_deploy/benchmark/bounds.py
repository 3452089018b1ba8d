"""Where the time goes: what holds a run back, by ceilings measured in the same rounds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

from mha_deploy.bundle import Bundle
from mha_deploy.manifest import Artifact
from mha_deploy.precision import numpy_dtype
from mha_deploy.signature import Sizes

COMPUTE, MEMORY, OVERHEAD = "compute", "memory", "overhead"
RULE = (
    "Of ceiling: the largest of compute (FLOPs at the MatMul ceiling), memory (inputs, outputs and weights, "
    "each moved once, at the bandwidth of memory, or of the cache where they fit into it) and overhead (a "
    "graph of one node), over the median."
)


class Roofs(Protocol):
    """What `bound_of` asks of ceilings."""

    @property
    def gflops(self) -> float: ...
    @property
    def overhead_ms(self) -> float: ...
    def bandwidth_gb_s(self, working_set_bytes: int) -> float: ...


@dataclass(frozen=True, slots=True)
class Bound:
    """The least that each of three limits lets a run take, in ms, and the share of the largest.

    (A roofline: Williams, Waterman & Patterson, CACM 52(4), 2009; with a floor for what a run costs
    that computes nothing.)
    """

    compute_ms: float
    memory_ms: float
    overhead_ms: float
    share: float

    @property
    def by(self) -> str:
        """ "compute", "memory" or "overhead"."""
        limits = {COMPUTE: self.compute_ms, MEMORY: self.memory_ms, OVERHEAD: self.overhead_ms}
        return max(limits, key=limits.__getitem__)

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": f"{self.by}-bound",
            "share": self.share,
            "compute_ms": self.compute_ms,
            "memory_ms": self.memory_ms,
            "overhead_ms": self.overhead_ms,
        }


def bound_of(flops: int, traffic: int, roofs: Roofs, took_ms: float) -> Bound:
    """The bound of a run of `flops` that moves `traffic` bytes and took `took_ms`."""
    compute_ms = flops / roofs.gflops / 1e6
    memory_ms = traffic / roofs.bandwidth_gb_s(traffic) / 1e6
    least = max(compute_ms, memory_ms, roofs.overhead_ms)
    return Bound(compute_ms, memory_ms, roofs.overhead_ms, least / took_ms)


def traffic_bytes(bundle: Bundle, artifact: Artifact, sizes: Sizes) -> int:
    """The least that a run moves: its inputs, its outputs and the weights at the artifact's precision."""
    signature = artifact.signature
    tensors = sum(
        math.prod(signature.shape(tensor, sizes)) * numpy_dtype(tensor.dtype).itemsize
        for tensor in (*signature.inputs, *signature.outputs)
    )
    weights = bundle.manifest.weights.bytes // numpy_dtype("float32").itemsize
    return tensors + weights * numpy_dtype(artifact.precision.dtype_name).itemsize
