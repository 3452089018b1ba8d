"""One session on one case or property: its error, what PyTorch's own would be, and the verdict."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from mha_deploy.cases import Case
from mha_deploy.errors import FeedError, FrozenAxisError, InputError
from mha_deploy.precision import Precision, numpy_dtype
from mha_deploy.sessions import Session
from mha_deploy.signature import Array, Feeds, Signature
from mha_deploy.verification.metrics import Errors
from mha_deploy.verification.properties import LINEAR, Property
from mha_deploy.verification.report import (
    DECLARED,
    FAILED,
    INFORMS,
    NOT_CHECKED,
    OUT_OF_RANGE,
    PASSED,
    YARDSTICK_FACTOR,
    CaseResult,
    FeatureError,
    PropertyResult,
)
from mha_deploy.verification.yardstick import Reference, References, Truth, Yardstick

if TYPE_CHECKING:
    from mha_deploy.attention import MultiHeadAttention


class Judge:
    """Judges sessions against one reference, whose answers are computed once for each case.

    `max_relative_error` is the budget of integer precisions, as a share: 0.025 is 2.5 %.
    """

    def __init__(self, reference: MultiHeadAttention | Reference, *, max_relative_error: float = 0.0) -> None:
        self.references = References(reference)
        self._max_relative_error = max_relative_error

    def with_budget(self, max_relative_error: float) -> Judge:
        """A judge with another budget and the same references."""
        judge = copy.copy(self)
        judge._max_relative_error = max_relative_error
        return judge

    def __call__(self, session: Session, artifact: str, case: Case) -> CaseResult:
        """Run `case` and compare its `compared` rows with the truth. NaN or inf there fails."""
        with np.errstate(invalid="ignore", over="ignore"):  # inf - inf is judged below, not warned of
            return self._judge(session, artifact, case)

    def _judge(self, session: Session, artifact: str, case: Case) -> CaseResult:
        truth = self.references.truth(case)
        answers = np.concatenate([_answer(session, feeds) for feeds, _ in case.draws])
        right = np.concatenate([case.spread(each) for each in np.split(truth.y, len(case.draws))])
        if answers.shape != right.shape:
            raise FrozenAxisError(
                f"session {session.name!r} answered with shape {list(answers.shape)} where the reference has "
                f"{list(right.shape)}"
            )
        errors = Errors.of(answers, right, np.concatenate([case.compared] * len(case.draws)))
        batch, position, feature = errors.worst
        result = CaseResult(
            name=case.name,
            artifact=artifact,
            precision=session.precision,
            sizes=case.sizes,
            outcome=FAILED,
            max_abs_error=errors.max_abs,
            relative_error=errors.relative,
            yardstick=np.nan,
            allowed=np.nan,
            worst=(batch % len(case.compared), position, feature),
            relative_yardstick=np.nan,
            cosine=errors.cosine,
            sqnr_db=errors.sqnr_db,
            max_relative_error=self._budget(session.precision),
        )
        if not session.precision.is_integer:
            yardstick = self.references.yardstick(case, session.precision)
            result = replace(
                result,
                yardstick=yardstick.max_abs,
                allowed=_allowed(yardstick, truth, session.precision),
                relative_yardstick=yardstick.relative,
                by_feature=_by_feature(errors, yardstick, truth, session.precision),
            )
        return _judged(result, truth_is_finite=truth.finite, decides=decides(session.precision, case))

    def hold(
        self, session: Session, artifact: str, held: Property, *, batch_dependent: bool = False
    ) -> PropertyResult:
        """Run what `held` wants to be the same, and measure how far it is not.

        `batch_dependent` is what the artifact declares of itself: such a deviation is shown, and
        neither passes nor fails.
        """
        result = PropertyResult(
            held.name,
            artifact,
            session.precision,
            NOT_CHECKED,
            max_relative_error=self._budget(session.precision),
            note=held.why_not,
        )
        if held.why_not:
            return result
        with np.errstate(invalid="ignore", over="ignore"):
            if held.refused:
                return _refused(session, result, held.refused)
            answers = [_answer(session, feeds) for feeds in held.feeds]
            deviation, truth = held.deviation(answers), self.references.truth(held.base)
            norm = float(np.linalg.norm(truth.y[truth.rows])) or 1.0
            result = replace(
                result,
                deviation=float(np.abs(deviation).max(initial=0.0)),
                relative=float(np.linalg.norm(deviation)) / norm,
                max_relative_error=result.max_relative_error * held.weight,
            )
            if not session.precision.is_integer:
                yardstick = self.references.yardstick(held.base, session.precision)
                result = replace(
                    result,
                    yardstick=yardstick.max_abs,
                    allowed=held.weight * _allowed(yardstick, truth, session.precision),
                )
        if session.precision.is_integer and held.name in LINEAR and np.isfinite(result.deviation):
            return replace(result, outcome=INFORMS)  # two errors on random values, which decide nothing
        return _property_judged(result, declared=batch_dependent and held.of_batch)

    def _budget(self, precision: Precision) -> float:
        if not precision.is_integer:
            return 0.0
        if not self._max_relative_error:
            raise InputError(
                f"{precision.value} has no PyTorch run to be held to; declare its budget: "
                "--max-relative-error 2.5%"
            )
        return self._max_relative_error


def as_inputs(feeds: Feeds, signature: Signature) -> dict[str, Array]:
    """`feeds` in the dtypes of `signature`'s inputs."""
    return {
        tensor.name: feeds[tensor.name].astype(numpy_dtype(tensor.dtype), copy=False)
        for tensor in signature.inputs
    }


def _answer(session: Session, feeds: Feeds) -> Array:
    return session.run(as_inputs(feeds, session.signature))["y"].astype(np.float64)


def _allowed(yardstick: Yardstick, truth: Truth, precision: Precision) -> float:
    return YARDSTICK_FACTOR * yardstick.max_abs + precision.eps / 2 * truth.largest


def _by_feature(errors: Errors, yardstick: Yardstick, truth: Truth, precision: Precision) -> FeatureError:
    """Each feature against its own yardstick; the one that is nearest to its limit.

    The root mean square of n independent normal errors scatters by 1 / sqrt(2 n) of itself; four
    times that is allowed on top, since few rows tell little.
    """
    few = 1 + 4 / np.sqrt(2 * yardstick.independent_rows)
    allowed = YARDSTICK_FACTOR * few * yardstick.features + precision.eps / 2 * truth.features
    share = np.where(allowed > 0, errors.features / np.where(allowed > 0, allowed, 1.0), errors.features)
    worst = int(np.argmax(np.where(np.isnan(share), np.inf, share)))
    return FeatureError(
        worst, float(errors.features[worst]), float(yardstick.features[worst]), float(allowed[worst])
    )


def decides(precision: Precision, case: Case) -> bool:
    """Whether the error on `case` decides; where it does not, only NaN and inf fail.

    Integer precisions are judged on real inputs. Random ones have none of the outliers that break
    them, so that passing says little; and a scale that was calibrated on real values clips others, so
    that failing says little either.
    """
    return case.real or not precision.is_integer


def _judged(result: CaseResult, *, truth_is_finite: bool, decides: bool) -> CaseResult:
    if not truth_is_finite:
        return replace(result, note="the reference itself is not finite here: the inputs hold NaN or inf")
    if not result.precision.is_integer and not np.isfinite(result.yardstick):
        note = f"PyTorch at {result.precision.value} is not finite here"
        return replace(result, outcome=OUT_OF_RANGE, note=note)
    if not np.isfinite(result.max_abs_error):
        return replace(result, note="NaN or inf in a compared row")
    if not decides:
        return replace(result, outcome=INFORMS)
    within = result.max_abs_error <= result.allowed
    if result.precision.is_integer:
        within = result.relative_error <= result.max_relative_error
    if within and not result.by_feature.held:
        return replace(result, note=f"feature {result.by_feature.feature} is off over many rows")
    return replace(result, outcome=PASSED if within else FAILED)


def _property_judged(result: PropertyResult, *, declared: bool) -> PropertyResult:
    if declared and result.deviation:
        return replace(result, outcome=DECLARED, note="declared: its answers depend on the batch")
    if not result.precision.is_integer and not np.isfinite(result.yardstick):
        note = f"PyTorch at {result.precision.value} is not finite here"
        return replace(result, outcome=OUT_OF_RANGE, note=note)
    if not np.isfinite(result.deviation):
        return replace(result, outcome=FAILED, note="NaN or inf in a compared row")
    within = result.deviation <= result.allowed
    if result.precision.is_integer:
        within = result.relative <= result.max_relative_error
    return replace(result, outcome=PASSED if within else FAILED)


def _refused(session: Session, result: PropertyResult, outside: tuple[Feeds, ...]) -> PropertyResult:
    """Sizes outside the range must not be answered."""
    for feeds in outside:
        try:
            _answer(session, feeds)
        except FeedError:
            continue
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in feeds.items())
        return replace(result, outcome=FAILED, note=f"answered outside its range: {shapes}")
    return replace(result, outcome=PASSED, note=f"{len(outside)} sizes just outside refused")
