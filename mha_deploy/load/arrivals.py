"""When requests are meant to be sent: Poisson, evenly, in bursts, or as a trace file says."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mha_deploy.errors import InputError
from mha_deploy.load.lengths import LONGEST
from mha_deploy.signature import Array

# What is due after a year, or is longer than this, is a mistake: the numbers stay far from their types' ends.
LATEST_S = 365 * 86400.0
KINDS = ("poisson", "constant", "burst")


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Gaps between requests, with a mean of 1 / `rate_per_s`.

    "constant": all alike. "poisson": exponential. "burst": gamma of shape `burst_shape` (0..1); its
    coefficient of variation is burst_shape^-0.5, 2 at 0.25, where that of Poisson arrivals is 1.

    Raises:
        InputError: another kind, or a number out of range.
    """

    kind: str
    rate_per_s: float
    burst_shape: float = 0.25

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(f"arrivals {self.kind!r}; expected one of {', '.join(KINDS)}")
        if not 0 < self.rate_per_s < math.inf:
            raise InputError(f"rate {self.rate_per_s}; expected more than 0 requests a second")
        if not 0 < self.burst_shape <= 1:
            raise InputError(f"burst shape {self.burst_shape}; expected more than 0 and at most 1")

    def times_s(self, count: int, random: np.random.Generator) -> Array:
        """`count` intended send times in seconds from the start, ascending."""
        shape = self.burst_shape if self.kind == "burst" else 1.0
        with np.errstate(all="ignore"):  # a rate near 0 has times beyond any number
            if self.kind == "constant":
                return np.arange(count) / self.rate_per_s
            return np.cumsum(random.gamma(shape, 1 / shape / self.rate_per_s, count))

    def __str__(self) -> str:
        shape = f" (shape {self.burst_shape:g})" if self.kind == "burst" else ""
        return f"open loop, {self.kind}{shape}, {self.rate_per_s:g} requests/s"


def read_trace(path: Path) -> tuple[Array, Array]:
    """Send times (seconds) and lengths from JSON lines {"at_s": 0.25, "length": 31}, in time's order.

    Raises:
        InputError: the file cannot be read, or the line that is not as described.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the trace {path}: {error}") from error
    entries = [_entry(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not entries:
        raise InputError(f'the trace {path} is empty; expected lines {{"at_s": 0.25, "length": 31}}')
    entries.sort(key=lambda entry: entry[0])
    return np.array([at for at, _ in entries]), np.array([length for _, length in entries])


def _entry(path: Path, number: int, line: str) -> tuple[float, int]:
    try:
        entry = json.loads(line)
        at_s, length = entry["at_s"], entry["length"]
    except (ValueError, KeyError, TypeError, RecursionError):
        at_s, length = None, None
    fits = isinstance(at_s, int | float) and not isinstance(at_s, bool) and 0 <= at_s <= LATEST_S
    if not fits or type(length) is not int or not 1 <= length <= LONGEST:
        raise InputError(
            f'{path}, line {number}: {line.strip()[:80]!r}; expected {{"at_s": 0.25, "length": 31}}, '
            f"seconds from the start and a whole number from 1 to {LONGEST}"
        )
    return float(at_s), length
