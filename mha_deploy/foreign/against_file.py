"""A foreign ONNX file against another one that should mean the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from mha_deploy.errors import FeedError, GraphError, InputError
from mha_deploy.foreign.drawing import named, sizes_of
from mha_deploy.foreign.matching import BY_NAME, Pair, match_inputs, parse_names
from mha_deploy.foreign.onnx_file import ForeignFile, dims_of, read_foreign
from mha_deploy.foreign.session import as_rows, in_fp32, runnable, through_twin, twin_note
from mha_deploy.masks import form_of, from_keep, narrowed
from mha_deploy.precision import numpy_dtype
from mha_deploy.proof import Comparison, cases_at, compare
from mha_deploy.proof_inputs import Case, Inputs, masks_among
from mha_deploy.proof_runners import ORACLES, Runner
from mha_deploy.sessions import DEFAULT_PLACEMENT, Placement
from mha_deploy.sessions.onnx_runtime import one_line, open_inference_session
from mha_deploy.signature import Array, Dim, Feeds, Sizes
from mha_deploy.verification import FAILED, OUT_OF_RANGE, PASSED, CaseResult, VerifyReport, failed_case
from mha_deploy.verification.metrics import Errors

RULE = "allowed = 2 x yardstick + 2 eps x max|output|"
YARDSTICK = "what the other file scatters in eight runs with its inputs moved by up to one eps"
_NOWHERE = "the other file is not finite in any row"
BUDGET = "relative error at most the declared budget"


def verify_against_file(
    path: Path,
    other: Path,
    *,
    dims: Sequence[str] = (),
    input_names: Sequence[str] = (),
    max_relative_error: float = 0.0,
    placement: Placement = DEFAULT_PLACEMENT,
    progress: Callable[[str], None] = lambda _: None,
) -> VerifyReport:
    """Hold the ONNX file at `path` against the file `other`, which counts as right.

    Both run on the same random inputs (`proof.compare`, which also proves our own rewrites): masks of
    0 and -inf or of booleans, finite ones, integers. `other` runs in ONNX Runtime, or in onnx.reference
    where that does not take it. Two files alone do not tell what a coarser precision costs: where
    theirs differ, or where no input can be moved, `max_relative_error` is the budget. `dims` and
    `input_names` ("other=path's") are as elsewhere. A file that does not load or run has failed.

    Raises:
        InputError: no such file, inputs that cannot be told apart, no output in common, an unknown dim,
            or precisions that differ without a budget.
        GraphError: `other` does not run.
        MissingError: this machine lacks ONNX Runtime or a provider.
    """
    right = read_foreign(other)
    against = f"{other.name} ({right.computes})"
    try:
        file = read_foreign(path)
    except GraphError as error:
        result = failed_case("load", path.name, right.precision, {}, str(error))
        return VerifyReport(path.name, (result,), {path.name: "not loaded"}, against=against)
    budget = max_relative_error
    if not budget and (file.precision is not right.precision or file.precision.is_integer):
        raise InputError(
            f"{path.name} computes in {file.computes}, {other.name} in {right.computes}: two files alone do "
            "not tell what that costs; declare a budget with --max-relative-error 1%, or hold the file to "
            "its module with --reference"
        )
    masks = masks_among(other, right.inputs)
    if not budget and not any(t.is_float and t.name not in masks for t in right.inputs):
        raise InputError(
            f"{other.name} has no floating-point input to move, so it has no yardstick; declare a budget "
            "with --max-relative-error 0.01%, or hold the file to its module with --reference"
        )
    pairs = match_inputs(right.inputs, file.inputs, parse_names(input_names))
    ranges = dims_of(right, dims)
    outputs = _outputs(file, right)
    before, cases = _draws(right, ranges)
    notes = (
        f"inputs: {', '.join(map(str, pairs))}",
        f"dims: {', '.join(map(str, ranges)) or 'none'}",
        file.judged,
    )
    if through_twin(file, placement):
        pairs = tuple(replace(pair, theirs=in_fp32(pair.theirs)) for pair in pairs)
    with runnable(file, placement) as runs:
        try:
            session = open_inference_session(runs, placement)
        except GraphError as error:
            results = [failed_case("load", path.name, file.precision, sizes_of(ranges), str(error))]
            return VerifyReport(path.name, tuple(results), {path.name: "not loaded"}, against=against)
        results = []
        for name, case in cases:
            progress(f"{path.name}: {name}")
            results += _results(
                file, name, case, before=before, run=partial(_run, session, pairs, outputs), budget=budget
            )
    lines = [*_not_checked(file, right, pairs, outputs), *twin_note(file, placement)]
    return VerifyReport(
        path.name,
        tuple(results),
        {path.name: session.get_providers()[0]},
        against=f"{against}, {before.where}",
        rule=BUDGET if budget else RULE,
        yardstick="the budget" if budget else YARDSTICK,
        notes=notes,
        not_checked=tuple(lines),
    )


def _outputs(file: ForeignFile, right: ForeignFile) -> dict[str, str]:
    """The file's output for each of the other's: of its name, or the only one."""
    names = {tensor.name for tensor in file.outputs}
    common = {tensor.name: tensor.name for tensor in right.outputs if tensor.name in names}
    if not common and len(file.outputs) == len(right.outputs) == 1:
        return {right.outputs[0].name: file.outputs[0].name}
    if not common:
        raise InputError(
            f"{file.path.name} gives {named(file.outputs)}, {right.path.name} {named(right.outputs)}: no "
            "output in common; rename one"
        )
    return common


def _draws(right: ForeignFile, ranges: Sequence[Dim]) -> tuple[Runner, list[tuple[str, Case]]]:
    """Who runs the file that counts as right, and its answers to several draws at several sizes."""
    sizes = {"min": {d.name: d.min for d in ranges}}
    if ranges:
        odd = {d.name: min(max(3 + 2 * i, d.min), d.max) for i, d in enumerate(ranges)}
        sizes |= {"odd": odd, "opt": {d.name: d.opt for d in ranges}, "max": {d.name: d.max for d in ranges}}
    inputs = Inputs(right.inputs, masks_among(right.path, right.inputs))
    refused = []
    for oracle in ORACLES:
        try:
            runner = oracle(right.path)
            return runner, [
                (f"{name}-{number}", case)
                for name, size in sizes.items()
                for number, case in enumerate(cases_at(runner, inputs, size), start=1)
            ]
        except GraphError as error:
            refused.append(str(error))
    raise GraphError(f"{right.path.name}, which counts as right, does not run: {'; '.join(refused)}")


def _run(
    session: object, pairs: Sequence[Pair], outputs: Mapping[str, str], feeds: Feeds
) -> dict[str, Array]:
    theirs = {pair.theirs.name: _as_theirs(feeds[pair.ours.name], pair) for pair in pairs}
    try:
        values = session.run(list(outputs.values()), theirs)  # type: ignore[attr-defined]
    except Exception as error:  # its exceptions share no public base class
        raise GraphError(f"ONNX Runtime failed to run it: {one_line(error)}") from error
    return dict(zip(outputs, values, strict=True))


def _as_theirs(array: Array, pair: Pair) -> Array:
    ours, theirs = pair.ours, pair.theirs
    if ours.is_float == theirs.is_float:
        return narrowed(array, numpy_dtype(theirs.dtype))
    if ours.is_float:
        raise FeedError(
            f"input {theirs} cannot take what the other file's {ours} does; both need the same kind"
        )
    return from_keep(array.astype(bool), theirs, array.shape[-2], form_of(theirs.dtype))


def _results(
    file: ForeignFile,
    name: str,
    case: Case,
    *,
    before: Runner,
    run: Callable[[Feeds], dict[str, Array]],
    budget: float,
) -> Iterator[CaseResult]:
    try:
        answer = run(case.feeds)
    except GraphError as error:
        yield failed_case(name, file.path.name, file.precision, case.size, str(error))
        return
    shared = Case(case.size, case.feeds, {key: case.expected[key] for key in answer})
    if budget:
        for key in answer:
            yield _budgeted(
                file, _label(name, key, answer), (answer[key], case.expected[key]), case.size, budget
            )
        return
    for found in compare(before, shared, answer):
        label = _label(name, found.output, answer)
        yield _compared(file, label, found, answer[found.output], shared.expected[found.output])


def _label(name: str, output: str, answer: Mapping[str, Array]) -> str:
    return name if len(answer) == 1 else f"{name} {output}"


def _compared(file: ForeignFile, name: str, found: Comparison, answer: Array, right: Array) -> CaseResult:
    result = failed_case(name, file.path.name, file.precision, found.size, found.wrong)
    if answer.shape != right.shape:
        return result
    if not np.isfinite(as_rows(right)).all(axis=-1).any() or not found.compared:
        return replace(result, outcome=FAILED if found.wrong else OUT_OF_RANGE, note=found.wrong or _NOWHERE)
    errors = _errors(answer, right)
    return replace(
        result,
        outcome=FAILED if found.wrong else PASSED,
        max_abs_error=found.error,
        yardstick=found.scatter,
        allowed=found.allowed,
        relative_error=errors.relative,
        cosine=errors.cosine,
        sqnr_db=errors.sqnr_db,
        worst=errors.worst,
        note=found.wrong,
    )


def _budgeted(
    file: ForeignFile, name: str, both: tuple[Array, Array], size: Sizes, budget: float
) -> CaseResult:
    answer, right = both
    result = failed_case(name, file.path.name, file.precision, size, "")
    if answer.shape != right.shape:
        return replace(result, note=f"shape {list(answer.shape)}, the other's {list(right.shape)}")
    if not np.isfinite(as_rows(right)).all(axis=-1).any():
        return replace(result, outcome=OUT_OF_RANGE, note=_NOWHERE)
    errors = _errors(answer, right)
    return replace(
        result,
        outcome=PASSED if errors.relative <= budget else FAILED,
        max_abs_error=errors.max_abs,
        relative_error=errors.relative,
        max_relative_error=budget,
        cosine=errors.cosine,
        sqnr_db=errors.sqnr_db,
        worst=errors.worst,
    )


def _errors(answer: Array, right: Array) -> Errors:
    """Over the rows where the one that counts as right is finite."""
    ours, truth = (as_rows(array).astype(np.float64) for array in (answer, right))
    return Errors.of(ours, truth, np.asarray(np.isfinite(truth).all(axis=-1)))


def _not_checked(
    file: ForeignFile, right: ForeignFile, pairs: Sequence[Pair], outputs: Mapping[str, str]
) -> list[str]:
    lines = [f"whether {right.path.name} itself is right"]
    masks = masks_among(right.path, right.inputs)
    if not masks and not any(tensor.dtype == "bool" for tensor in right.inputs):
        lines.append("padding: the files have no mask input")
    guesses = [name for name, guess in masks.items() if guess]
    if guesses:
        lines.append(f"the meaning of {named(guesses)} beyond a name: drawn as a mask")
    guessed = [pair for pair in pairs if pair.how != BY_NAME]
    if guessed:
        lines.append(f"the meaning of inputs beyond {', '.join(map(str, guessed))}")
    ignored = [t.name for t in right.outputs if t.name not in outputs]
    ignored += [t.name for t in file.outputs if t.name not in outputs.values()]
    if ignored:
        lines.append(f"outputs {', '.join(ignored)}: only one of the two files has them")
    return [*lines, *file.remarks]
