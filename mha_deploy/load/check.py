"""Are the answers right? A sample of them against the reference, or else against what they must be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from mha_deploy.bundle import Bundle
from mha_deploy.cases import Case
from mha_deploy.errors import InputError
from mha_deploy.latency import figure
from mha_deploy.load.inputs import Inputs
from mha_deploy.load.target import Target, variant_of
from mha_deploy.serving.rows import served_signature
from mha_deploy.sessions import DEFAULT_PLACEMENT, Placement
from mha_deploy.sessions.fake import FakeSession
from mha_deploy.signature import Array, Feeds, TensorSpec
from mha_deploy.verification import RULE, Judge, as_inputs

SHAPE_RULE = "shape and finiteness only: no bundle was given to compute the right answers"
_INTEGER_RULE = "shape and finiteness only: what an integer precision may be off by is declared to verify"


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What a sample of the answers was held to (`rule`), and how many did not meet it.

    `max_abs_error` is the largest error over the sample, `allowed` what `verify`'s rule allows over the
    same sample; both NaN where there was no reference. `first_failure` names the first that failed.
    """

    rule: str
    sampled: int
    failed: int
    first_failure: str
    max_abs_error: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.failed == 0

    @property
    def failure(self) -> str:
        """What is wrong, "" where nothing is."""
        if self.passed:
            return ""
        return f"{self.failed} of {self.sampled} sampled answers are wrong; first: {self.first_failure}"

    def to_json(self) -> dict[str, Any]:
        errors = {"max_abs_error": figure(self.max_abs_error), "allowed": figure(self.allowed)}
        return {**asdict(self), **errors, "passed": self.passed}


NOT_CHECKED = CheckReport("no answers were sampled", 0, 0, "", np.nan, np.nan)


class Checker:
    """Checks by shape and finiteness; `ReferenceChecker` also by value."""

    rule = SHAPE_RULE

    def compare(self, inputs: Inputs) -> None:
        """Nothing to compare with what requests will hold.

        Raises:
            InputError: in `ReferenceChecker`, which computes what the answer to them is.
        """

    def __call__(self, target: Target, lengths: Array, answers: Mapping[int, object]) -> CheckReport:
        """Check `answers` by index, whose request had that index' length in `lengths`."""
        if not answers:
            return NOT_CHECKED
        failures, found = [], dict[int, tuple[float, float]]()
        for index in sorted(answers):
            length = int(lengths[index])
            try:
                y = _one(target.decode(answers[index]), length)
            except InputError as wrong:
                failures.append(f"request {index} (length {length}): {wrong}")
                continue
            found[index] = self.errors(y, target.inputs.feeds(length, variant_of(index)))
        # A short answer's own yardstick says little, so the sample is judged as one.
        worst, allowed = (max((each[i] for each in found.values()), default=np.nan) for i in (0, 1))
        for index, (error, _) in found.items():
            if error > allowed:
                failures.append(f"request {index} (length {int(lengths[index])}): off by {error:.3g}")
        first = failures[0] if failures else ""
        return CheckReport(self.rule, len(answers), len(failures), first, worst, allowed)

    def errors(self, _y: Array, _feeds: Feeds) -> tuple[float, float]:
        """The largest absolute error of y [length, d_model], and what is allowed."""
        return np.nan, np.nan


BY_SHAPE = Checker()


class ReferenceChecker(Checker):
    """Against the bundle's PyTorch module, by the rule and yardstick of `verify`.

    What answers may be off by is that of the artifact that `bundle` runs at this placement.
    """

    def __init__(self, bundle: Bundle, artifact: str = "", placement: Placement = DEFAULT_PLACEMENT) -> None:
        found = bundle.artifact(artifact, placement)
        self._name, self._precision, self._spec = found.name, found.precision, bundle.spec
        self._signature = served_signature(bundle.spec, bundle.signature)
        self._judge = Judge(bundle.reference())
        self.rule = _INTEGER_RULE if self._precision.is_integer else RULE

    def compare(self, inputs: Inputs) -> None:
        """Hold what requests will hold against what the bundle's block takes.

        Raises:
            InputError: they are not the same inputs, so that there is no right answer to tell.
        """
        if _shapes(inputs.tensors) != _shapes(self._signature.inputs):
            raise InputError(
                f"requests take {_told(inputs.tensors)}, as the server says, but the bundle's block takes "
                f"{_told(self._signature.inputs)}; give the bundle that is served"
            )

    def errors(self, y: Array, feeds: Feeds) -> tuple[float, float]:
        if self._precision.is_integer:
            return np.nan, np.nan
        feeds = as_inputs(feeds, self._signature)
        answer = FakeSession(self._signature, lambda _: {"y": y[None]}, self._name, self._precision)
        sizes = self._signature.check(feeds)
        compared: Array = np.ones((1, len(y)), bool)
        result = self._judge(answer, self._name, Case("answer", sizes, feeds, compared))
        return result.max_abs_error, result.allowed


def _shapes(tensors: Sequence[TensorSpec]) -> dict[str, tuple[bool, tuple[int, ...]]]:
    """By name: whether in floating point, of whichever precision, and its shape, every dim being -1."""
    return {
        each.name: (each.is_float, tuple(axis if isinstance(axis, int) else -1 for axis in each.shape))
        for each in tensors
    }


def _told(tensors: Sequence[TensorSpec]) -> str:
    return ", ".join(str(replace(each, meaning="")) for each in tensors)


def _one(y: Array, length: int) -> Array:
    """y without its batch axis.

    Raises:
        InputError: it has another shape than [length, d_model], or holds NaN or inf.
    """
    one = y[0] if y.ndim == 3 and len(y) == 1 else y
    if one.ndim != 2 or len(one) != length:
        raise InputError(f"y has shape {list(y.shape)}; expected [1, {length}, d_model]")
    if not np.isfinite(one.astype(np.float64)).all():
        raise InputError("y holds NaN or inf")
    return one
