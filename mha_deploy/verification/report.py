"""What a verification found: plain data, which the command line and the JSON render."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mha_deploy.precision import Precision

YARDSTICK_FACTOR = 2.0
RULE = f"allowed = {YARDSTICK_FACTOR:g} x yardstick + eps/2 x max|truth|"
YARDSTICK = "the worst of ten PyTorch runs at this precision"
FEATURE_RULE = (
    f"{YARDSTICK_FACTOR:g} x (1 + 4/sqrt(2 x independent rows)) x its yardstick + eps/2 x its rms truth"
)

PASSED, FAILED, OUT_OF_RANGE = "passed", "failed", "out of range"
NOT_CHECKED, DECLARED, INFORMS = "not checked", "declared", "informs only"


@dataclass(frozen=True, slots=True)
class FeatureError:
    """The second gate: root mean square error of the output feature that is nearest to its limit.

    The largest error of all says little of one feature among hundreds that is a little wrong
    everywhere; against that feature's own yardstick it shows.
    """

    feature: int = 0
    error: float = 0.0
    yardstick: float = 0.0
    allowed: float = 0.0

    @property
    def held(self) -> bool:
        return self.error <= self.allowed

    @property
    def needed(self) -> float:
        return self.error / self.yardstick if self.yardstick else float(self.error > 0)

    def to_json(self) -> dict[str, Any]:
        return {
            "feature": self.feature,
            "error": finite(self.error),
            "yardstick": finite(self.yardstick),
            "allowed": finite(self.allowed),
            "needed": finite(self.needed),
        }


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One artifact on one case.

    `allowed` = 2 x `yardstick` + eps / 2 x max|truth|, where the yardstick is the worst error of ten
    PyTorch runs at the artifact's precision. `needed` is the multiple of the yardstick that would
    have let this error pass. `by_feature` is the second gate. Errors are as in `metrics.Errors`.
    `outcome` is "out of range" where PyTorch itself is not finite at this precision: neither passed
    nor failed.

    An integer precision has no yardstick: there `relative_error` is held to `max_relative_error`, the
    declared budget (0 elsewhere), `allowed` and `yardstick` are NaN, and `needed` is a multiple of
    the budget.
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
    by_feature: FeatureError = FeatureError()
    note: str = ""

    @property
    def passed(self) -> bool:
        return self.outcome == PASSED

    @property
    def needed(self) -> float:
        if self.max_relative_error:
            return self.relative_error / self.max_relative_error
        return self.max_abs_error / self.yardstick if self.yardstick else float(self.max_abs_error > 0)

    @property
    def used(self) -> float:
        """The share of its limit that the error takes, at the gate where it takes most; beyond 1 it fails."""
        if self.max_relative_error:
            return self.needed
        feature = self.by_feature
        shares = [
            error / allowed if allowed else float(error > 0)
            for error, allowed in (
                (self.max_abs_error, self.allowed),
                (feature.error, feature.allowed),
            )
        ]
        return max(shares)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "artifact": self.artifact,
            "precision": self.precision.value,
            "sizes": dict(self.sizes),
            "outcome": self.outcome,
            "passed": self.passed if self.outcome in (PASSED, FAILED) else None,
            "max_abs_error": finite(self.max_abs_error),
            "relative_error": finite(self.relative_error),
            "relative_yardstick": finite(self.relative_yardstick),
            "cosine": self.cosine,
            "sqnr_db": finite(self.sqnr_db),
            "max_relative_error": self.max_relative_error,
            "yardstick": finite(self.yardstick),
            "allowed": finite(self.allowed),
            "needed": finite(self.needed),
            "by_feature": self.by_feature.to_json(),
            "worst": dict(zip(("batch", "position", "feature"), self.worst, strict=True)),
            "note": self.note,
        }


@dataclass(frozen=True, slots=True)
class PropertyResult:
    """One property of one artifact: how far apart answers are that should be the same.

    `deviation` is the largest difference, `relative` its Frobenius norm over the truth's, `exact`
    whether it is 0 to the last bit. `allowed` and `needed` mean what they do in `CaseResult`.
    `outcome` is "not checked" where the block or the artifact leaves nothing to check, and "declared"
    where an artifact that says so depends on its batch mates; `note` says why.
    """

    name: str
    artifact: str
    precision: Precision
    outcome: str
    deviation: float = np.nan
    relative: float = np.nan
    yardstick: float = np.nan
    allowed: float = np.nan
    max_relative_error: float = 0.0
    note: str = ""

    @property
    def exact(self) -> bool:
        return self.deviation == 0

    @property
    def needed(self) -> float:
        if self.max_relative_error:
            return self.relative / self.max_relative_error
        return self.deviation / self.yardstick if self.yardstick else float(self.deviation > 0)

    def to_json(self) -> dict[str, Any]:
        unjudged = self.outcome in (NOT_CHECKED, DECLARED, INFORMS, OUT_OF_RANGE)
        return {
            "name": self.name,
            "artifact": self.artifact,
            "precision": self.precision.value,
            "outcome": self.outcome,
            "passed": None if unjudged else self.outcome == PASSED,
            "deviation": finite(self.deviation),
            "exact": self.exact,
            "relative": finite(self.relative),
            "yardstick": finite(self.yardstick),
            "allowed": finite(self.allowed),
            "max_relative_error": self.max_relative_error,
            "needed": finite(self.needed),
            "note": self.note,
        }


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Every case and property of every artifact. It passes when nothing failed and each artifact
    passed a case (a property, where only properties were asked for).

    `not_run` names artifacts that this machine cannot run, with the reason: they neither pass nor fail.
    `seed` makes the same inputs again. `stopped_at` names the failure at which --fail-fast stopped.
    `against` is what the truth was, `yardstick` what the yardstick was and `rule` how `allowed` follows
    from it. `notes` says what was taken for granted and `not_checked` what could not be seen and why, one
    line each.
    """

    subject: str
    cases: tuple[CaseResult, ...]
    providers: Mapping[str, str]
    not_run: Mapping[str, str] = field(default_factory=dict)
    properties: tuple[PropertyResult, ...] = ()
    seed: int = 0
    stopped_at: str = ""
    against: str = "PyTorch in fp64"
    rule: str = RULE
    yardstick: str = YARDSTICK
    notes: tuple[str, ...] = ()
    not_checked: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        results: tuple[CaseResult | PropertyResult, ...] = (*self.cases, *self.properties)
        judged: tuple[CaseResult | PropertyResult, ...] = self.cases or self.properties
        artifacts = {result.artifact for result in judged}
        each = all(any(r.outcome == PASSED for r in judged if r.artifact == name) for name in artifacts)
        return bool(artifacts) and each and not any(result.outcome == FAILED for result in results)

    def to_json(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "subject": self.subject,
            "seed": self.seed,
            "stopped_at": self.stopped_at,
            "providers": dict(self.providers),
            "not_run": dict(self.not_run),
            "against": self.against,
            "rule": self.rule,
            "yardstick": self.yardstick,
            "notes": list(self.notes),
            "not_checked": list(self.not_checked),
            "feature_rule": FEATURE_RULE,
            "artifacts": [hop.to_json() for hop in self.hops],
            "cases": [case.to_json() for case in self.cases],
            "properties": [held.to_json() for held in self.properties],
        }

    @property
    def hops(self) -> tuple[Hop, ...]:
        """Each artifact on the way in one row."""
        names = dict.fromkeys([c.artifact for c in self.cases] + [p.artifact for p in self.properties])
        return tuple(
            Hop(
                name,
                tuple(case for case in self.cases if case.artifact == name),
                tuple(held for held in self.properties if held.artifact == name),
            )
            for name in names
        )


@dataclass(frozen=True, slots=True)
class Hop:
    """One artifact on the way from the reference to an engine, its cases and properties summed up."""

    artifact: str
    cases: tuple[CaseResult, ...]
    properties: tuple[PropertyResult, ...]

    @property
    def precision(self) -> Precision:
        return self.cases[0].precision if self.cases else self.properties[0].precision

    @property
    def judged(self) -> tuple[CaseResult, ...]:
        """Cases that passed or failed with a number."""
        undecided = (OUT_OF_RANGE, INFORMS)
        return tuple(c for c in self.cases if c.outcome not in undecided and np.isfinite(c.used))

    @property
    def nearest(self) -> CaseResult:
        """The case that is nearest to its limit or furthest beyond it."""
        return max(self.judged or self.cases, key=lambda case: case.used)

    @property
    def outcome(self) -> str:
        outcomes = [case.outcome for case in self.cases] + [held.outcome for held in self.properties]
        return FAILED if FAILED in outcomes else PASSED

    def to_json(self) -> dict[str, Any]:
        found = {
            "artifact": self.artifact,
            "precision": self.precision.value,
            "outcome": self.outcome,
            "cases": len(self.cases),
            "cases_passed": sum(case.passed for case in self.cases),
            "properties_held": sum(held.outcome == PASSED for held in self.properties),
            "properties_exact": sum(held.exact for held in self.properties),
        }
        if not self.cases:
            return found
        return found | {
            "nearest_case": self.nearest.name,
            "needed": finite(self.nearest.needed),
            "max_relative_error": self.nearest.max_relative_error,
            "relative_error": finite(max((case.relative_error for case in self.judged), default=np.nan)),
            "cosine": min((case.cosine for case in self.judged), default=-1.0),
            "sqnr_db": finite(min((case.sqnr_db for case in self.judged), default=np.nan)),
        }


def finite(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if np.isfinite(value) else None
