"""What a verification found: plain data, which the command line and the JSON render."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mha_deploy.precision import Precision

YARDSTICK_FACTOR = 2.0
RULE = f"allowed = {YARDSTICK_FACTOR:g} x yardstick + eps/2 x max|truth|"

PASSED, FAILED, OUT_OF_RANGE, INFORMS = "passed", "failed", "out of range", "informs only"


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One artifact on one case.

    `allowed` = 2 x `yardstick` + eps / 2 x max|truth|, where the yardstick is the worst error of ten
    PyTorch runs at the artifact's precision. `needed` is the multiple of the yardstick that would
    have let this error pass. Errors are as in `metrics.Errors`. `outcome` is "out of range" where
    PyTorch itself is not finite at this precision: neither passed nor failed.

    An integer precision has no yardstick: there `relative_error` is held to `max_relative_error`, the
    declared budget (0 elsewhere), `allowed` and `yardstick` are NaN, and `needed` is a multiple of
    the budget. On random inputs its error "informs only": neither passed nor failed (`judge.decides`).
    """

    name: str
    artifact: str
    precision: Precision
    sizes: Mapping[str, int]
    outcome: str
    max_abs_error: float
    relative_error: float
    yardstick: float
    allowed: float
    worst: tuple[int, int, int]
    relative_yardstick: float = 0.0
    cosine: float = 1.0
    sqnr_db: float = np.inf
    max_relative_error: float = 0.0
    note: str = ""

    @property
    def passed(self) -> bool:
        return self.outcome == PASSED

    @property
    def needed(self) -> float:
        if self.max_relative_error:
            return self.relative_error / self.max_relative_error
        return self.max_abs_error / self.yardstick if self.yardstick else float(self.max_abs_error > 0)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "artifact": self.artifact,
            "precision": self.precision.value,
            "sizes": dict(self.sizes),
            "outcome": self.outcome,
            "passed": self.passed if self.outcome in (PASSED, FAILED) else None,
            "max_abs_error": _finite(self.max_abs_error),
            "relative_error": _finite(self.relative_error),
            "relative_yardstick": _finite(self.relative_yardstick),
            "cosine": self.cosine,
            "sqnr_db": _finite(self.sqnr_db),
            "max_relative_error": self.max_relative_error,
            "yardstick": _finite(self.yardstick),
            "allowed": _finite(self.allowed),
            "needed": _finite(self.needed),
            "worst": dict(zip(("batch", "position", "feature"), self.worst, strict=True)),
            "note": self.note,
        }


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Every case of every artifact. It passes when no case failed and each artifact passed one.

    `not_run` names artifacts that this machine cannot run, with the reason: they neither pass nor fail.
    """

    subject: str
    cases: tuple[CaseResult, ...]
    providers: Mapping[str, str]
    not_run: Mapping[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        artifacts = {case.artifact for case in self.cases}
        each = all(any(c.passed for c in self.cases if c.artifact == name) for name in artifacts)
        return bool(artifacts) and each and not any(case.outcome == FAILED for case in self.cases)

    def to_json(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "subject": self.subject,
            "providers": dict(self.providers),
            "not_run": dict(self.not_run),
            "rule": RULE,
            "cases": [case.to_json() for case in self.cases],
        }


def _finite(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if np.isfinite(value) else None
