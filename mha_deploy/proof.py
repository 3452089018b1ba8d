"""Two graphs that should mean the same, run side by side on the same random inputs.

For graphs with no reference module: a lowered ONNX file against the one it came from. Each file
runs in ONNX Runtime, and in `onnx.reference` where ONNX Runtime does not take it.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mha_deploy.errors import CheckError, GraphError
from mha_deploy.proof_inputs import DRAWS, FLOAT_EPS, Case, Inputs, Range, masks_among, moved_by_one_eps
from mha_deploy.proof_runners import ORACLES, Runner
from mha_deploy.signature import Array, Sizes, TensorSpec

RUNS = 8
MOST_DRAWS = 6
LOWEST = {"float16": -65504.0, "bfloat16": -3.39e38, "float32": -3.4e38, "float64": -1.79e308}


@dataclass(frozen=True, slots=True)
class Comparison:
    """One output of one draw against the original's.

    `scatter` is what the original itself is off by when its inputs move by one eps, `allowed` = 2 x
    that + 2 eps of the largest output. `wrong` says how the two differ beyond it, "" where they do
    not; `compared` counts the elements that could be.
    """

    output: str
    size: Sizes
    error: float
    scatter: float
    allowed: float
    compared: int
    wrong: str = ""


@dataclass(frozen=True, slots=True)
class Proof:
    """`proved` False: one of the two could not be run or nothing was comparable; `note` says why."""

    proved: bool
    note: str


def prove_same(original: Path, lowered: Path, inputs: Sequence[TensorSpec], sizes: Sequence[Sizes]) -> Proof:
    """Run both on several draws of random inputs at each of `sizes` and compare every output.

    Masks hide whole rows and columns, integers differ from element to element. Allowed is, draw by
    draw, 2 x what the original itself scatters when its inputs move by one eps (eight runs), plus
    2 eps of the largest output. Integers and booleans are equal, but for elements that the original
    itself changes in those runs.

    Where they differ in ONNX Runtime, the original gets a second hearing in `onnx.reference`: ONNX
    Runtime 1.32 computes a causal `Attention` of one query over a cache wrongly.

    Raises:
        CheckError: they differ, by every runner that takes the original.
        GraphError: the lowered graph does not run.
    """
    draws = Inputs(inputs, masks_among(original, inputs))
    refused: list[str] = []
    differ: list[CheckError] = []
    for oracle in ORACLES:
        try:
            before = oracle(original)
            cases = [case for size in sizes for case in cases_at(before, draws, size)]
        except GraphError as error:
            refused.append(str(error))
            continue
        try:
            proof = _hold(before, cases, lowered)
        except CheckError as error:
            differ.append(error)
        else:
            doubt = f", but not {ORACLES[0].where}" if differ else ""
            return Proof(proof.proved, proof.note + doubt)
    if differ:
        raise differ[0]
    return Proof(False, f"the original cannot be run, so nothing was compared: {'; '.join(refused)}")


def _hold(before: Runner, cases: Sequence[Case], lowered: Path) -> Proof:
    """Compare the lowered graph with what `before`, which runs the original, answered."""
    after, answers = _run_lowered(lowered, cases)
    worst = 0.0
    compared: Counter[str] = Counter({name: 0 for case in cases for name in case.expected})
    for case, answer in zip(cases, answers, strict=True):
        for found in compare(before, case, answer):
            if found.wrong:
                raise CheckError(
                    f"the lowered graph differs from the original at {dict(found.size)} in {found.output!r}: "
                    f"{found.wrong}; this is a fault of the lowering, please report it"
                )
            worst = max(worst, found.error)
            compared[found.output] += found.compared
    where = before.where if after.where == before.where else f"{before.where}, itself {after.where}"
    never = [name for name, count in compared.items() if not count]
    if never or not compared:
        return Proof(False, f"{', '.join(never) or 'no output'}: nothing was comparable {where}")
    return Proof(True, f"equal to the original {where}, largest difference {worst:.2g}")


def compare(before: Runner, case: Case, answer: Mapping[str, Array]) -> Iterator[Comparison]:
    """Hold `answer` against what `before` answered to `case`, output by output."""
    moved = [before.run(moved_by_one_eps(case.feeds, seed)) for seed in range(RUNS)]
    for name, right in case.expected.items():
        if name not in answer:
            yield Comparison(name, case.size, np.nan, np.nan, np.nan, 0, "there is no such output")
        elif (answer[name].shape, answer[name].dtype) != (right.shape, right.dtype):
            kinds = [f"{a.dtype.name} of shape {list(a.shape)}" for a in (answer[name], right)]
            yield Comparison(
                name, case.size, np.nan, np.nan, np.nan, 0, f"{kinds[0]}, the original's {kinds[1]}"
            )
        else:
            yield _compare(name, case.size, answer[name], right, [each[name] for each in moved])


def _compare(name: str, size: Sizes, answer: Array, right: Array, moved: Sequence[Array]) -> Comparison:
    if right.dtype.name not in FLOAT_EPS:
        stable = np.all([each == right for each in moved], axis=0)
        count = int((stable & (answer != right)).sum())
        wrong = f"{count} of {right.size} elements are not equal" if count else ""
        return Comparison(name, size, float(count), 0.0, 0.0, int(stable.sum()), wrong)
    exact, ours = right.astype(np.float64), answer.astype(np.float64)
    # ONNX Runtime writes a score that is masked as the lowest number; -inf means the same.
    finite = np.isfinite(exact) & (exact > LOWEST[right.dtype.name] / 2)
    scatter = 0.0
    for each in moved:
        away = np.abs(each.astype(np.float64)[finite] - exact[finite])
        scatter = max(scatter, float(away[np.isfinite(away)].max(initial=0.0)))
    allowed = 2 * scatter + 2 * FLOAT_EPS[right.dtype.name] * float(np.abs(exact[finite]).max(initial=0.0))
    compared = int(finite.sum())
    if (np.isnan(ours) & ~np.isnan(exact)).any():
        return Comparison(name, size, np.inf, scatter, allowed, compared, "NaN where the original has none")
    error = float(np.abs(ours[finite] - exact[finite]).max(initial=0.0))
    wrong = f"{error:.3g}, allowed {allowed:.3g}" if error > allowed else ""
    return Comparison(name, size, error, scatter, allowed, compared, wrong)


def cases_at(runner: Runner, inputs: Inputs, size: Sizes) -> list[Case]:
    """Draws at one size. Integers start at each axis' size in turn and shrink until the graph takes them."""
    ranges = inputs.ranges(size)
    cases = []
    for number in range(max(DRAWS, min(len(ranges), MOST_DRAWS))):
        tried = [*ranges[number:], Range(0, 1), Range(1, 1)]
        case = _first_that_runs(runner, inputs, size, number, tried)
        # A float that is a mask by its name only may be multiplied with: -inf is then no input for it.
        nan = any(x.dtype.name in FLOAT_EPS and np.isnan(x).any() for x in case.expected.values())
        if not (nan and inputs.guesses(number)):
            cases.append(case)
    return cases


def _first_that_runs(
    runner: Runner, inputs: Inputs, size: Sizes, number: int, tried: Sequence[Range]
) -> Case:
    refused = []
    for integers in tried if inputs.has_integers else tried[-1:]:
        feeds = inputs.draw(size, number, integers)
        try:
            return Case(size, feeds, runner.run(feeds))
        except GraphError as error:
            refused.append(error)
    raise refused[-1]


def _run_lowered(path: Path, cases: Sequence[Case]) -> tuple[Runner, list[dict[str, Array]]]:
    why = []
    for oracle in ORACLES:
        try:
            runner = oracle(path)
            return runner, [runner.run(case.feeds) for case in cases]
        except GraphError as error:
            why.append(str(error))
    raise GraphError(f"the lowered graph does not run where the original does: {'; '.join(why)}")
