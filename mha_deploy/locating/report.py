"""Where an artifact goes wrong: plain data, which the command line and the JSON render."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

VALUE = "value out of budget"
CANNOT_RUN = "cannot run"
UNREADABLE = "cannot be read"
OVERFLOW = "beyond the precision's range"
FUSION = "only while no value is exposed"
NOT_FOUND = "not found"


@dataclass(frozen=True, slots=True)
class Place:
    """A node, the value that it gives, and the line of PyTorch that it comes from ("" where unknown)."""

    node: str
    op_type: str
    value: str
    source: str

    def __str__(self) -> str:
        line = f", from {self.source}" if self.source else ""
        return f"{self.node} ({self.op_type}), value {self.value!r}{line}"

    def to_json(self) -> dict[str, str]:
        return {"node": self.node, "op_type": self.op_type, "value": self.value, "source": self.source}


NOWHERE = Place("", "", "", "")


@dataclass(frozen=True, slots=True)
class Located:
    """The first value of an artifact that leaves its budget on a case.

    `place` is it, in the order in which the graph computes; `NOWHERE` where the fault is no node's.
    `error` and `allowed` are absolute, or relative for integer precisions; NaN where nothing was
    compared. `because` says how the node differs from the reference's; `between` are the nodes above
    it whose values have no counterpart in the reference, down from the last value that holds: one of
    them may be the one. Of the `values` compared or to be compared, `unmatched` have no counterpart.
    """

    artifact: str
    case: str
    kind: str
    place: Place = NOWHERE
    error: float = math.nan
    allowed: float = math.nan
    worst: tuple[int, ...] = ()
    because: tuple[str, ...] = ()
    between: tuple[str, ...] = ()
    values: int = 0
    unmatched: tuple[str, ...] = ()
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "artifact": self.artifact,
            "case": self.case,
            "kind": self.kind,
            "place": self.place.to_json(),
            "error": self.error if math.isfinite(self.error) else None,
            "allowed": self.allowed if math.isfinite(self.allowed) else None,
            "worst": list(self.worst),
            "because": list(self.because),
            "between": list(self.between),
            "values": self.values,
            "unmatched": list(self.unmatched),
            "note": self.note,
        }
