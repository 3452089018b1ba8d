"""One session on one case: its error, what PyTorch's own would be, and the verdict."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from mha_deploy.cases import Case
from mha_deploy.errors import InputError
from mha_deploy.precision import Precision, numpy_dtype
from mha_deploy.sessions import Session
from mha_deploy.signature import Array, Feeds, Signature
from mha_deploy.verification.metrics import Errors
from mha_deploy.verification.report import (
    FAILED,
    INFORMS,
    OUT_OF_RANGE,
    PASSED,
    YARDSTICK_FACTOR,
    CaseResult,
)

if TYPE_CHECKING:
    from mha_deploy.attention import MultiHeadAttention

PERTURBED_RUNS = 8


class Judge:
    """Judges sessions against one reference module, which is converted once for all cases.

    `max_relative_error` is the budget of integer precisions, as a share: 0.025 is 2.5 %.
    """

    def __init__(self, module: MultiHeadAttention, *, max_relative_error: float = 0.0) -> None:
        self._module = module
        self._max_relative_error = max_relative_error
        self._references: dict[tuple[str, Precision], Session] = {}

    def within(self, max_relative_error: float) -> Judge:
        """This judge with another budget; what it has converted is shared."""
        other = copy(self)
        other._max_relative_error = max_relative_error
        return other

    def __call__(self, session: Session, artifact: str, case: Case) -> CaseResult:
        """Run `case` and compare its `compared` rows with the truth. NaN or inf there fails."""
        with np.errstate(invalid="ignore", over="ignore"):  # inf - inf is judged below, not warned of
            return self._judge(session, artifact, case)

    def _judge(self, session: Session, artifact: str, case: Case) -> CaseResult:
        """The worst of the case's inputs: its error against the worst yardstick of them all."""
        each = [
            self._judge_one(session, artifact, replace(case, feeds=feeds, others=()))
            for feeds in (case.feeds, *case.others)
        ]
        truth_is_finite = all(finite for _, finite in each)
        worst = max((result for result, _ in each), key=lambda result: result.max_abs_error)
        pooled = replace(
            worst,
            yardstick=max(result.yardstick for result, _ in each),
            allowed=max(result.allowed for result, _ in each),
            relative_yardstick=max(result.relative_yardstick for result, _ in each),
            relative_error=max(result.relative_error for result, _ in each),
            cosine=min(result.cosine for result, _ in each),
            sqnr_db=min(result.sqnr_db for result, _ in each),
        )
        return _judged(pooled, truth_is_finite=truth_is_finite, decides=decides(session.precision, case))

    def _judge_one(self, session: Session, artifact: str, case: Case) -> tuple[CaseResult, bool]:
        """Errors of one input, not judged yet, and whether the truth is finite."""
        truth = self._run("fused", Precision.FP64, case.reference_feeds)
        rows = case.compared
        answer = session.run(as_inputs(case.feeds, session.signature))["y"].astype(np.float64)
        errors = Errors.of(answer, truth, rows)
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
            worst=errors.worst,
            relative_yardstick=np.nan,
            cosine=errors.cosine,
            sqnr_db=errors.sqnr_db,
            max_relative_error=self._budget(session.precision),
        )
        finite = bool(np.isfinite(truth[rows]).all())
        if session.precision.is_integer:
            return result, finite
        runs = [Errors.of(each, truth, rows) for each in self._yardstick_runs(session.precision, case)]
        yardstick = max(each.max_abs for each in runs)
        largest = float(np.abs(truth[rows]).max(initial=0.0))
        return replace(
            result,
            yardstick=yardstick,
            allowed=YARDSTICK_FACTOR * yardstick + session.precision.eps / 2 * largest,
            relative_yardstick=max(each.relative for each in runs),
        ), finite

    def _budget(self, precision: Precision) -> float:
        if not precision.is_integer:
            return 0.0
        if not self._max_relative_error:
            raise InputError(
                f"{precision.value} has no PyTorch run to be held to; declare its budget: "
                "--max-relative-error 2.5%"
            )
        return self._max_relative_error

    def _yardstick_runs(self, precision: Precision, case: Case) -> Iterator[Array]:
        """Fused, spelled out, and eight runs with inputs moved by up to one eps, as a runtime's
        other order of operations would. One run alone is chaotic once the softmax saturates."""
        feeds = case.reference_feeds
        yield self._run("fused", precision, feeds)
        yield self._run("spelled-out", precision, feeds)
        random = np.random.default_rng(0)
        for _ in range(PERTURBED_RUNS):
            moved = {
                name: array
                if array.dtype == bool
                else (array * (1 + precision.eps * random.uniform(-1, 1, array.shape))).astype(array.dtype)
                for name, array in feeds.items()
            }
            yield self._run("fused", precision, moved)

    def _run(self, path: str, precision: Precision, feeds: Feeds) -> Array:
        from mha_deploy.sessions.reference import ReferenceSession

        key = (path, precision)
        if key not in self._references:
            self._module.path = path
            self._references[key] = ReferenceSession(self._module, precision)
        return self._references[key].run(feeds)["y"]


def as_inputs(feeds: Feeds, signature: Signature) -> dict[str, Array]:
    """`feeds` in the dtypes of `signature`'s inputs."""
    return {
        tensor.name: feeds[tensor.name].astype(numpy_dtype(tensor.dtype), copy=False)
        for tensor in signature.inputs
    }


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
        return replace(result, outcome=INFORMS, note="random inputs")
    held = result.relative_error <= result.max_relative_error
    if not result.precision.is_integer:
        held = result.max_abs_error <= result.allowed
    return replace(result, outcome=PASSED if held else FAILED)
