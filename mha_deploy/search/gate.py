"""Does a candidate compute what PyTorch computes? Asked before it is timed; the first no ends it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mha_deploy.cases import Case
from mha_deploy.errors import FrozenAxisError, GraphError
from mha_deploy.sessions import Session
from mha_deploy.verification import FAILED, PASSED, CaseResult, Judge


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the gate found.

    `error_ratio` is the largest error over what was allowed, of the cases judged: up to 1 passes. `case`
    is where that was, and `note` what went wrong.
    """

    passed: bool
    error_ratio: float
    case: str
    cases: int
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "error_ratio": self.error_ratio if math.isfinite(self.error_ratio) else None,
            "case": self.case,
            "cases": self.cases,
            "note": self.note,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Verdict:
        ratio = data["error_ratio"]
        return cls(**{**data, "error_ratio": math.inf if ratio is None else ratio})


def gate(
    judge: Judge,
    session: Session,
    name: str,
    cases: Sequence[Case],
    progress: Callable[[str], None] = lambda _: None,
) -> Verdict:
    """Judge `session` on `cases`, as `verify` does, up to the first that fails."""
    worst, where, judged = 0.0, "", 0
    for number, case in enumerate(cases, 1):
        progress(f"checking {name} {number}/{len(cases)}: {case.name}")
        try:
            result = judge(session, name, case)
        except (GraphError, FrozenAxisError) as error:
            return Verdict(False, math.inf, case.name, number, str(error))
        ratio = _ratio(result)
        if result.outcome == FAILED:
            return Verdict(False, ratio, case.name, number, result.note or f"{ratio:.2f} of what is allowed")
        if result.outcome == PASSED:
            judged += 1
            if ratio >= worst:
                worst, where = ratio, case.name
    return Verdict(judged > 0, worst, where, judged, "" if judged else "no case could be judged")


def _ratio(result: CaseResult) -> float:
    if result.max_relative_error:
        return result.relative_error / result.max_relative_error
    return result.max_abs_error / result.allowed if result.allowed else float(result.max_abs_error > 0)
