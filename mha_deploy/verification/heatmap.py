"""The error of one artifact on one case over position and head.

Heads mix in the output projection, so the error of a head is that of the attention context before it
[query, heads x value_dim], where an artifact holds that value. Where it does not (an engine, a file
that computes it elsewhere), columns are groups of output features, and the map says so.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from mha_deploy.cases import Case
from mha_deploy.errors import InputError
from mha_deploy.precision import Precision
from mha_deploy.sessions import Session
from mha_deploy.signature import Array, Feeds, Signature
from mha_deploy.spec import AttentionSpec
from mha_deploy.verification.judge import Judge
from mha_deploy.verification.report import FAILED, CaseResult
from mha_deploy.verification.yardstick import Reference, as_reference

if TYPE_CHECKING:
    from mha_deploy.attention import MultiHeadAttention

Answer = Callable[[Feeds], Array]
MOST_GROUPS = 16
# Beyond what int8 costs, and below what another order of heads makes.
MOST_INCONSISTENT = 0.2


@dataclass(frozen=True, slots=True)
class HeatMap:
    """`error` [position, column]: largest absolute error over a column's features, in the value's own
    unit; NaN where a row is not compared, inf where the artifact is not finite.

    `columns` says what a column is ("head", "output features 0-23"), `allowed` is the gate of that
    value in this sample, by the rule of `CaseResult`. `why` says why columns are not heads.
    """

    subject: str
    artifact: str
    case: str
    precision: Precision
    sample: int
    samples: int
    error: Array
    allowed: float
    labels: tuple[str, ...]
    value: str
    axis: str
    why: str = ""

    @property
    def max_error(self) -> float:
        return float(np.nanmax(self.error, initial=0.0))

    @property
    def worst(self) -> tuple[int, int]:
        """Position and column of the largest error."""
        place = np.unravel_index(int(np.nanargmax(self.error)), self.error.shape)
        return int(place[0]), int(place[1])


class Chosen:
    """Keeps, of the results that it is shown, the worst: one that failed, then what needed most.

    `case` and `artifact` name those among which to choose, all where empty. Each result comes with a
    function that makes its map; what never came to numbers has none to show.
    """

    def __init__(self, case: str = "", artifact: str = "") -> None:
        self._case, self._artifact = case, artifact
        self._worst = (False, -1.0)
        self._seen: list[str] = []
        self._make: Callable[[], HeatMap] | None = None

    def check(self, names: Sequence[str]) -> None:
        """Raise InputError, before they are run, where none of the cases `names` is the one to draw."""
        if self._case not in ("", *names):
            raise self._unknown(names)

    def _unknown(self, names: Sequence[str]) -> InputError:
        known = ", ".join(dict.fromkeys(names)) or "none came to numbers"
        return InputError(f"no case {self._case!r} to draw a heat map of; cases: {known}")

    def see(self, result: CaseResult, make: Callable[[], HeatMap]) -> None:
        if np.isnan(result.max_abs_error) or self._artifact not in ("", result.artifact):
            return
        self._seen.append(result.name)
        if self._case not in ("", result.name):
            return
        needed = result.needed if np.isfinite(result.needed) else np.inf
        badness = (result.outcome == FAILED, float(needed))
        if badness > self._worst:
            self._worst, self._make = badness, make

    @property
    def any(self) -> bool:
        """Whether anything came to numbers."""
        return bool(self._seen)

    def make(self) -> HeatMap:
        """The map of the worst.

        Raises:
            InputError: nothing that was seen fits.
        """
        if self._make is None:
            raise self._unknown(self._seen)
        return self._make()


def output_map(
    result: CaseResult,
    case: Case,
    *,
    subject: str,
    reference: MultiHeadAttention | Reference,
    answer: Answer,
    groups: int = MOST_GROUPS,
    why: str,
) -> HeatMap:
    """The error of the output, its features in `groups` (fewer where they do not divide)."""
    reference = as_reference(reference)
    case, sample = _worst(case, reference, answer)
    ours, truth = answer(case.feeds)[sample], _truth(reference, case)[sample]
    features = truth.shape[-1]
    groups = next(count for count in range(min(groups, features), 0, -1) if features % count == 0)
    wide = features // groups
    labels = tuple(f"{g * wide}-{(g + 1) * wide - 1}" if wide > 1 else str(g) for g in range(groups))
    return HeatMap(
        subject=subject,
        artifact=result.artifact,
        case=case.name,
        precision=result.precision,
        sample=sample,
        samples=len(case.compared),
        error=_by_column(ours, truth, case.compared[sample], groups),
        allowed=result.allowed,
        labels=labels,
        value="output",
        axis="output features",
        why=why,
    )


def head_map(
    result: CaseResult,
    case: Case,
    *,
    subject: str,
    module: MultiHeadAttention,
    answer: Answer,
    context: Callable[[Feeds], list[Array]],
) -> HeatMap:
    """The error of the context, head by head; of the output where the artifact does not hold heads apart.

    `context` gives what the artifact holds before its output projection, in every order
    [batch, query, heads x value_dim] that it may mean, or nothing. The order is taken from which the
    artifact's own output follows by the reference's projection.
    """
    spec, reference = module.spec, as_reference(module)
    groups = partial(
        output_map,
        result,
        case,
        subject=subject,
        reference=reference,
        answer=answer,
        groups=spec.num_heads,
    )
    worst, sample = _worst(case, reference, answer)
    held = context(worst.feeds)
    if not held:
        return groups(why=f"{result.artifact} does not show its attention context")
    output = answer(worst.feeds)
    off, order = min((_inconsistent(module, each, output, worst), n) for n, each in enumerate(held))
    if off > MOST_INCONSISTENT:
        return groups(why="the output does not follow from the file's context by the reference's projection")
    one, rows = _single(worst, sample, spec)
    contexts = _Contexts(module)
    given = _Given(held[order][rows], spec.signature, result.precision)
    judged = Judge(contexts, max_relative_error=result.max_relative_error)(given, result.artifact, one)
    error = _by_column(held[order][sample], _truth(contexts, one)[0], worst.compared[sample], spec.num_heads)
    return HeatMap(
        subject=subject,
        artifact=result.artifact,
        case=case.name,
        precision=result.precision,
        sample=sample,
        samples=len(worst.compared),
        error=error,
        allowed=judged.allowed,
        labels=tuple(map(str, range(spec.num_heads))),
        value="attention context",
        axis="head",
    )


def _single(case: Case, sample: int, spec: AttentionSpec) -> tuple[Case, Array]:
    """The case with one sample only, or as few as the spec takes, and which those are."""
    rows = (sample + np.arange(spec.dims[0].min)) % len(case.compared)

    right = rows if not case.copies else np.array(case.copies)[rows]
    one = replace(
        case,
        sizes={**case.sizes, spec.dims[0].name: len(rows)},
        feeds={name: array[rows] for name, array in case.feeds.items()},
        clean={name: array[right] for name, array in case.reference_feeds.items()},
        compared=case.compared[rows],
        copies=(),
    )
    return one, rows


def _worst(case: Case, reference: Reference, answer: Answer) -> tuple[Case, int]:
    """Of the case's inputs the one, and of its samples the one, with the largest error of the output."""
    found = []
    for feeds, right in case.draws:
        one = replace(case, feeds=dict(feeds), clean=dict(right), others=())
        error = _error(answer(feeds), _truth(reference, one))
        each = np.where(case.compared[..., None], error, 0.0).max(axis=(1, 2))
        found.append((float(each.max()), one, int(each.argmax())))
    _, chosen, sample = max(found, key=lambda each: each[0])
    return chosen, sample


def _truth(reference: Reference, case: Case) -> Array:
    with reference.open("fused", Precision.FP64) as session:
        return case.spread(session.run(case.reference_feeds)["y"])


def _error(ours: Array, truth: Array) -> Array:
    """|ours - truth|, inf where either is not finite."""
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(ours.astype(np.float64) - truth)
    return np.where(np.isfinite(error), error, np.inf)


def _by_column(ours: Array, truth: Array, rows: Array, columns: int) -> Array:
    """[position, column] of [position, features]: the largest error of a column's features."""
    error = _error(ours, truth).reshape(len(truth), columns, -1).max(axis=-1)
    return np.where(rows[:, None], error, np.nan)


def _inconsistent(module: MultiHeadAttention, context: Array, output: Array, case: Case) -> float:
    """How far `output` is from what the reference makes of `context`, as a share of the output.

    A median, so that a few wrong or infinite elements, which the map is to show, do not count.
    """
    import torch

    rest = copy.deepcopy(module).to(torch.float64)
    query = case.spread(next(iter(case.reference_feeds.values())))
    residual = torch.from_numpy(np.array(query)).to(torch.float64)
    with torch.inference_mode():
        made = rest.output(torch.from_numpy(np.array(context)).to(torch.float64))
        if module.spec.norm == "pre":
            made = residual + made
        elif module.spec.norm == "post":
            made = rest.norm(residual + made)
    with np.errstate(invalid="ignore", over="ignore"):
        off = np.abs(made.numpy() - output)[case.compared]
    usual = float(np.nanmedian(np.abs(output[case.compared].astype(np.float64))))
    return float(np.nanmedian(off)) / usual if usual else float(np.nanmedian(off))


class _Contexts:
    """The reference whose answer is the context."""

    def __init__(self, module: MultiHeadAttention) -> None:
        self._module = module

    def open(self, path: str, precision: Precision) -> Session:
        from mha_deploy.sessions.reference import ContextSession

        self._module.path = path
        return ContextSession(self._module, precision)


class _Given(Session):
    """Answers what it was given, whatever it is asked."""

    def __init__(self, answer: Array, signature: Signature, precision: Precision) -> None:
        super().__init__("given", signature, precision, "none")
        self._answer = answer

    def _execute(self, _feeds: Feeds) -> dict[str, Array]:
        return {"y": self._answer}

    def _check_outputs(self, outputs: dict[str, Array], sizes: object) -> None:
        """It is no answer of the block's shape."""
