"""What the bytes of a plan tell, with no GPU and no library.

The layout is undocumented. It was found by looking at plans of TensorRT for RTX 1.7; whatever does
not look like those is reported as unknown, never guessed. The passport is the record of a plan,
this is a cross-check.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

HEADER_SIZE = 64
_MAGIC = b"vtrt"
_LAYOUT = 2
_TARGET_BITS = {0: "sm75", 1: "sm80", 2: "sm86", 3: "sm89", 4: "sm120", 5: "sm121", 6: "later"}

FUSED_KERNEL = "_gemm_mha_v2"
_FUNCTION = re.compile(rb'name=_gemm_mha_v2 [^\0]{0,20000}?layers="([^"]*)"')
_LAYER = re.compile(rb"\[ONNX Layer: ([^\]]*)\]")


@dataclass(frozen=True, slots=True)
class PlanHeader:
    """The first 64 bytes. With `known` False the other fields hold nothing."""

    known: bool
    version: str = ""
    size: int = 0
    truncated: bool = False
    targets: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.known:
            return "unknown plan layout"
        state = ", TRUNCATED" if self.truncated else ""
        return f"TensorRT for RTX {self.version}, {self.size} bytes{state}, {', '.join(self.targets)}"


def read_header(plan: bytes) -> PlanHeader:
    """Version, declared size and targets of an RTX plan; `truncated` when bytes are missing.

    Only the first 64 bytes and the length of `plan` are looked at.
    """
    if len(plan) < HEADER_SIZE or plan[0:4] != _MAGIC or plan[28:32] != _MAGIC:
        return PlanHeader(known=False)
    (layout,) = struct.unpack_from("<I", plan, 8)
    if layout != _LAYOUT:
        return PlanHeader(known=False)
    (size,) = struct.unpack_from("<Q", plan, 16)
    version = ".".join(str(byte) for byte in plan[24:28])
    targets = tuple(name for bit, name in _TARGET_BITS.items() if plan[32] & (1 << bit))
    return PlanHeader(True, version, size, len(plan) < size, targets)


def has_known_text(plan: bytes) -> bool:
    """Whether the plan lists its kernels in the form that the counts below read."""
    return read_header(plan).known and b"function={ name=" in plan


def count_fused(plan: bytes) -> int:
    """Fused attention kernels in the plan: one per attention and profile."""
    return plan.count(b"name=_gemm_mha_v2 ")


def fused_layers(plan: bytes) -> tuple[frozenset[str], ...]:
    """For each fused attention kernel, the names of the ONNX nodes that it computes."""
    return tuple(
        frozenset(name.decode(errors="replace") for name in _LAYER.findall(match[1]))
        for match in _FUNCTION.finditer(plan)
    )
