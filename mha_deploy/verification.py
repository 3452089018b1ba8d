"""Does an artifact compute what PyTorch computes? Truth, yardstick and verdict.

Truth is the reference in fp64. The yardstick is PyTorch at the artifact's own precision: what it
scatters there is what that precision costs, and an artifact is held to that, not to a guessed
tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mha_deploy.bundle import Bundle
from mha_deploy.cases import Case, standard_cases
from mha_deploy.errors import FrozenAxisError, GraphError, MissingError
from mha_deploy.precision import Precision, numpy_dtype
from mha_deploy.sessions import DEFAULT_PLACEMENT, Placement, Session
from mha_deploy.signature import Array, Feeds, Signature

if TYPE_CHECKING:
    from mha_deploy.attention import MultiHeadAttention

PERTURBED_RUNS = 8
YARDSTICK_FACTOR = 2.0
RULE = f"allowed = {YARDSTICK_FACTOR:g} x yardstick + eps/2 x max|truth|"

PASSED, FAILED, OUT_OF_RANGE = "passed", "failed", "out of range"


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One artifact on one case.

    `allowed` = 2 x `yardstick` + eps / 2 x max|truth|, where the yardstick is the worst error of ten
    PyTorch runs at the artifact's precision. `needed` is the multiple of the yardstick that would
    have let this error pass. Errors are absolute, in the output's own unit. `outcome` is "out of
    range" where PyTorch itself is not finite at this precision: neither passed nor failed.
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
    note: str = ""

    @property
    def passed(self) -> bool:
        return self.outcome == PASSED

    @property
    def needed(self) -> float:
        return self.max_abs_error / self.yardstick if self.yardstick else float(self.max_abs_error > 0)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "artifact": self.artifact,
            "precision": self.precision.value,
            "sizes": dict(self.sizes),
            "outcome": self.outcome,
            "passed": None if self.outcome == OUT_OF_RANGE else self.passed,
            "max_abs_error": _finite(self.max_abs_error),
            "relative_error": _finite(self.relative_error),
            "relative_yardstick": _finite(self.relative_yardstick),
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


def verify(
    bundle: Bundle,
    artifacts: Sequence[str] = (),
    *,
    cases: Sequence[Case] = (),
    placement: Placement = DEFAULT_PLACEMENT,
    progress: Callable[[str], None] = lambda _: None,
) -> VerifyReport:
    """Hold artifacts (all, or those named) against the reference on `cases` (the standard ones).

    What this machine cannot run is listed in the report, unless it was named or nothing runs.

    Raises:
        BundleError: a file of the bundle is not the one recorded.
        MissingError: this machine lacks a runtime or a provider.
    """
    chosen = [bundle.artifact(name) for name in artifacts] or list(bundle.artifacts)
    cases = cases or standard_cases(bundle.spec, bundle.real_inputs())
    results, providers, not_run = [], dict[str, str](), dict[str, str]()
    judge = Judge(bundle.reference())
    for artifact in chosen:
        try:
            session = bundle.open_padded_session(artifact.name, replace(placement, poison=True))
        except MissingError as error:
            if artifacts or (artifact is chosen[-1] and not providers):
                raise
            not_run[artifact.name] = str(error)
            continue
        with session:
            providers[artifact.name] = session.provider
            for case in cases:
                progress(f"{artifact.name}: {case.name}")
                results.append(_judged_or_failed(judge, session, artifact.name, case))
    return VerifyReport(bundle.spec.name, tuple(results), providers, not_run)


def _judged_or_failed(judge: Judge, session: Session, artifact: str, case: Case) -> CaseResult:
    """A case that the artifact cannot run at all has failed; the others still have their say."""
    try:
        return judge(session, artifact, case)
    except (GraphError, FrozenAxisError) as error:
        nothing = float("nan")
        return CaseResult(
            name=case.name,
            artifact=artifact,
            precision=session.precision,
            sizes=case.sizes,
            outcome=FAILED,
            max_abs_error=nothing,
            relative_error=nothing,
            yardstick=nothing,
            allowed=nothing,
            worst=(0, 0, 0),
            note=str(error),
        )


class Judge:
    """Judges sessions against one reference module, which is converted once for all cases."""

    def __init__(self, module: MultiHeadAttention) -> None:
        self._module = module
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
        )
        return _judged(pooled, truth_is_finite=truth_is_finite)

    def _judge_one(self, session: Session, artifact: str, case: Case) -> tuple[CaseResult, bool]:
        """Errors of one input, not judged yet, and whether the truth is finite."""
        truth = self._run("fused", Precision.FP64, case.reference_feeds)
        rows = case.compared
        runs = [
            (_worst(answer - truth, rows), _relative(answer[rows], truth[rows]))
            for answer in self._yardstick_runs(session.precision, case)
        ]
        yardstick = max(error for error, _ in runs)
        answer = session.run(as_inputs(case.feeds, session.signature))["y"].astype(np.float64)
        largest = float(np.abs(truth[rows]).max(initial=0.0))
        error = np.where(rows[:, :, None], np.abs(answer - truth), 0.0)
        worst = np.unravel_index(int(np.argmax(np.where(np.isfinite(error), error, np.inf))), error.shape)
        result = CaseResult(
            name=case.name,
            artifact=artifact,
            precision=session.precision,
            sizes=case.sizes,
            outcome=FAILED,
            max_abs_error=_worst(answer - truth, rows),
            relative_error=_relative(answer[rows], truth[rows]),
            yardstick=yardstick,
            allowed=YARDSTICK_FACTOR * yardstick + session.precision.eps / 2 * largest,
            worst=(int(worst[0]), int(worst[1]), int(worst[2])),
            relative_yardstick=max(relative for _, relative in runs),
        )
        return result, bool(np.isfinite(truth[rows]).all())

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


def _judged(result: CaseResult, *, truth_is_finite: bool) -> CaseResult:
    if not truth_is_finite:
        return replace(result, note="the reference itself is not finite here: the inputs hold NaN or inf")
    if not np.isfinite(result.yardstick):
        note = f"PyTorch at {result.precision.value} is not finite here"
        return replace(result, outcome=OUT_OF_RANGE, note=note)
    if not np.isfinite(result.max_abs_error):
        return replace(result, note="NaN or inf in a compared row")
    return replace(result, outcome=PASSED if result.max_abs_error <= result.allowed else FAILED)


def _worst(difference: Array, rows: Array) -> float:
    """Largest absolute value over the compared rows; inf where one is not finite."""
    compared = np.abs(difference[rows])
    if not np.isfinite(compared).all():
        return float("inf")
    return float(compared.max(initial=0.0))


def _relative(answer: Array, truth: Array) -> float:
    """Frobenius norm of the error over that of the truth."""
    norm = float(np.linalg.norm(truth))
    error = float(np.linalg.norm(answer - truth))
    return error / norm if norm else error


def _finite(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if np.isfinite(value) else None
