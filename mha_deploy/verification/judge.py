"""One session on one case: its error, what PyTorch's own would be, and the verdict."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from mha_deploy.cases import Case
from mha_deploy.errors import FrozenAxisError, InputError
from mha_deploy.precision import Precision, numpy_dtype
from mha_deploy.sessions import Session
from mha_deploy.signature import Array, Feeds, Signature
from mha_deploy.verification.metrics import Errors
from mha_deploy.verification.report import (
    FAILED,
    OUT_OF_RANGE,
    PASSED,
    YARDSTICK_FACTOR,
    CaseResult,
)

if TYPE_CHECKING:
    from mha_deploy.attention import MultiHeadAttention

PERTURBED_RUNS = 8


class Reference(Protocol):
    """What is right, at a precision, by one of several paths to the same numbers: "fused", "spelled-out"
    and, where no input is floating point, "moved-0" and on, with weights moved by up to one eps instead."""

    def open(self, path: str, precision: Precision) -> Session:
        """A session that takes fp32 inputs and answers `y` [batch, rows, features] in fp64."""


class Judge:
    """Judges sessions against one reference, which is converted once for all cases.

    `max_relative_error` is the budget of integer precisions, as a share: 0.025 is 2.5 %.
    """

    def __init__(self, reference: MultiHeadAttention | Reference, *, max_relative_error: float = 0.0) -> None:
        self._reference = as_reference(reference)
        self._max_relative_error = max_relative_error
        self._references: dict[tuple[str, Precision], Session] = {}

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
        return _judged(pooled, truth_is_finite=truth_is_finite)

    def _judge_one(self, session: Session, artifact: str, case: Case) -> tuple[CaseResult, bool]:
        """Errors of one input, not judged yet, and whether the truth is finite."""
        truth = self._run("fused", Precision.FP64, case.reference_feeds)
        rows = case.compared
        answer = session.run(as_inputs(case.feeds, session.signature))["y"].astype(np.float64)
        if answer.shape != truth.shape:
            raise FrozenAxisError(
                f"session {session.name!r} answered with shape {list(answer.shape)} where the reference has "
                f"{list(truth.shape)}"
            )
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
        if all(array.dtype.kind != "f" for array in feeds.values()):
            yield from (self._run(f"moved-{n}", precision, feeds) for n in range(PERTURBED_RUNS))
            return
        random = np.random.default_rng(0)
        for _ in range(PERTURBED_RUNS):
            moved = {
                name: array if array.dtype.kind != "f" else _moved(array, precision.eps, random)
                for name, array in feeds.items()
            }
            yield self._run("fused", precision, moved)

    def _run(self, path: str, precision: Precision, feeds: Feeds) -> Array:
        key = (path, precision)
        if key not in self._references:
            self._references[key] = self._reference.open(path, precision)
        return self._references[key].run(feeds)["y"]


def as_reference(reference: MultiHeadAttention | Reference) -> Reference:
    from mha_deploy.attention import MultiHeadAttention

    return _Block(reference) if isinstance(reference, MultiHeadAttention) else reference


class _Block:
    """The reference of our own attention blocks."""

    def __init__(self, module: MultiHeadAttention) -> None:
        self._module = module

    def open(self, path: str, precision: Precision) -> Session:
        from mha_deploy.sessions.reference import ReferenceSession

        self._module.path = path
        return ReferenceSession(self._module, precision)


def _moved(array: Array, eps: float, random: np.random.Generator) -> Array:
    """Every number moved by up to one eps of itself, but for one that would not be finite then."""
    moved = (array * (1 + eps * random.uniform(-1, 1, array.shape))).astype(array.dtype)
    return np.where(np.isfinite(moved), moved, array)


def as_inputs(feeds: Feeds, signature: Signature) -> dict[str, Array]:
    """`feeds` in the dtypes of `signature`'s inputs."""
    return {
        tensor.name: feeds[tensor.name].astype(numpy_dtype(tensor.dtype), copy=False)
        for tensor in signature.inputs
    }


def _judged(result: CaseResult, *, truth_is_finite: bool) -> CaseResult:
    if not truth_is_finite:
        return replace(result, note="the reference itself is not finite here: the inputs hold NaN or inf")
    if not result.precision.is_integer and not np.isfinite(result.yardstick):
        note = f"PyTorch at {result.precision.value} is not finite here"
        return replace(result, outcome=OUT_OF_RANGE, note=note)
    if not np.isfinite(result.max_abs_error):
        return replace(result, note="NaN or inf in a compared row")
    held = result.relative_error <= result.max_relative_error
    if not result.precision.is_integer:
        held = result.max_abs_error <= result.allowed
    return replace(result, outcome=PASSED if held else FAILED)
