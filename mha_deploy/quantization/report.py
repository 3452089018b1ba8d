"""What the search found: plain data, which the command line and the JSON render."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mha_deploy.benchmark import Estimate
from mha_deploy.latency import NO_INTERVAL
from mha_deploy.quantization.candidate import Candidate
from mha_deploy.verification.metrics import Errors

# An answer may move by a step of the rounding where a value lies between two of them, in some elements;
# a scale that a mate has changed moves all of them.
DRIFT_LIMIT = 1e-3

UNMEASURED = Estimate(np.nan, NO_INTERVAL)
KEPT, TOO_FAR_OFF, UNSOUND = "kept", "too far off", "unsound"


@dataclass(frozen=True, slots=True)
class Tried:
    """One candidate. `errors` are on the held-out real requests, `random_errors` on random inputs.

    `batch_drift` is how far a request's answer moved, over its norm, when one ten times as loud joined
    its batch. `alphas` by activation; `kept_fp32` names the products that stay in fp32. `time` is its
    time over that of the fp32 artifact, with a 99 % interval, NaN where it was not measured. `note` says
    what else was wrong.
    """

    candidate: Candidate
    errors: Errors
    calibration_errors: Errors
    random_errors: Errors
    batch_drift: float
    bytes: int
    kept_fp32: tuple[str, ...]
    alphas: Mapping[str, float]
    verdict: str
    time: Estimate = UNMEASURED
    note: str = ""

    @property
    def speed(self) -> float:
        """Time of fp32 over this one's; above 1 it is faster."""
        return 1 / self.time.ratio

    @property
    def batch_dependent(self) -> bool:
        return self.batch_drift > DRIFT_LIMIT

    def to_json(self) -> dict[str, Any]:
        return {
            "candidate": str(self.candidate),
            "scheme": self.candidate.scheme,
            "smoothing_alphas": dict(self.alphas),
            "kept_fp32": list(self.kept_fp32),
            "held_out": _errors_json(self.errors),
            "calibration": _errors_json(self.calibration_errors),
            "random": _errors_json(self.random_errors),
            "batch_dependent": self.batch_dependent,
            "batch_drift": _finite(self.batch_drift),
            "bytes": self.bytes,
            "speed_against_fp32": _finite(self.speed),
            "time_over_fp32": self.time.to_json() if np.isfinite(self.speed) else None,
            "verdict": self.verdict,
            "note": self.note,
        }


@dataclass(frozen=True, slots=True)
class QuantizationReport:
    """Candidates in the order they were tried; the search ends at the first that passes.

    `max_relative_error` is the declared budget, as a share. `speed_conditions` is what the speeds stand
    on, empty where none was measured. `not_tried` are the candidates that would have come after.
    """

    subject: str
    max_relative_error: float
    calibration_requests: int
    held_out_requests: int
    inputs: str
    tried: tuple[Tried, ...]
    not_tried: tuple[Candidate, ...]
    fp32_bytes: int
    speed_conditions: Mapping[str, Any]
    artifact: str = ""

    @property
    def passed(self) -> bool:
        return self.tried[-1].verdict == KEPT

    @property
    def nearest(self) -> Tried:
        """The candidate with the smallest error on held-out requests, of those that are sound."""
        sound = [each for each in self.tried if each.verdict != UNSOUND] or list(self.tried)
        return min(sound, key=lambda each: each.errors.relative)

    @property
    def conclusion(self) -> str:
        """One line: what was kept, or what comes nearest and what it would cost."""
        budget, best = f"{self.max_relative_error:.2%}", self.nearest
        if self.passed:
            best = self.tried[-1]
            return f"{best.candidate}: {best.errors.relative:.2%} off, allowed {budget}{_speed(best)}"
        measured = [each for each in self.tried if np.isfinite(each.speed)]
        fastest = max(measured, key=lambda each: each.speed, default=best)
        against = ""
        if fastest is not best:
            against = f" (fastest: {fastest.candidate}, {fastest.errors.relative:.2%} off{_speed(fastest)})"
        return (
            f"none of {len(self.tried)} candidates is within {budget}; {best.candidate} passes at "
            f"{_up(best.errors.relative)}{_speed(best)}{against}"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "artifact": self.artifact,
            "conclusion": self.conclusion,
            "subject": self.subject,
            "max_relative_error": self.max_relative_error,
            "inputs": {
                "from": self.inputs,
                "calibration_requests": self.calibration_requests,
                "held_out_requests": self.held_out_requests,
            },
            "fp32_bytes": self.fp32_bytes,
            "nearest": str(self.nearest.candidate),
            "candidates": [each.to_json() for each in self.tried],
            "not_tried": [str(candidate) for candidate in self.not_tried],
            "speed_conditions": dict(self.speed_conditions),
        }


def _up(share: float) -> str:
    """A percentage that the share is within, rounded up."""
    return f"{np.ceil(share * 1000) / 10:.1f}%"


def _speed(tried: Tried) -> str:
    """With the interval of the ratio of times turned over."""
    if not np.isfinite(tried.speed):
        return ""
    interval = tried.time.interval
    return f", {tried.speed:.2f} ({1 / interval.high:.2f} to {1 / interval.low:.2f}) x the speed of fp32"


def _errors_json(errors: Errors) -> dict[str, Any]:
    return {
        "relative_error": _finite(errors.relative),
        "max_abs_error": _finite(errors.max_abs),
        "cosine": errors.cosine,
        "sqnr_db": _finite(errors.sqnr_db),
    }


def _finite(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return float(value) if np.isfinite(value) else None
