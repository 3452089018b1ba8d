"""Two graphs that should mean the same, run side by side on the same random inputs.

For graphs with no reference module: a lowered ONNX file against the one it came from. Each file
runs in ONNX Runtime, and in `onnx.reference` where ONNX Runtime does not take it.
"""

from __future__ import annotations

import ast
import operator
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mha_deploy.errors import CheckError, GraphError, MissingError
from mha_deploy.precision import numpy_dtype
from mha_deploy.sessions.onnx_runtime import import_onnxruntime, one_line
from mha_deploy.signature import Array, Sizes, TensorSpec

RUNS = 8
DRAWS = 3
MOST_DRAWS = 6
FLOAT_EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}
LOWEST = {"float16": -65504.0, "bfloat16": -3.39e38, "float32": -3.4e38, "float64": -1.79e308}
# What hands a mask's values on as they are: an input behind these alone takes -inf.
_KEEPS_VALUES = {"Identity", "Cast", "Unsqueeze", "Squeeze", "Reshape", "Expand", "Slice", "Transpose", "Pad"}
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


@dataclass(frozen=True, slots=True)
class Proof:
    """`proved` False: one of the two could not be run or nothing was comparable; `note` says why."""

    proved: bool
    note: str


@dataclass(frozen=True, slots=True)
class _Case:
    size: Sizes
    feeds: dict[str, Array]
    expected: dict[str, Array]


@dataclass(frozen=True, slots=True)
class _Range:
    """Integers from `low` to `high`, both included."""

    low: int
    high: int


class _Runner(Protocol):
    where: str

    def __init__(self, path: Path) -> None: ...

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]: ...


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
    draws = _Inputs(inputs, _masks(original, inputs))
    refused: list[str] = []
    differ: list[CheckError] = []
    for oracle in _ORACLES:
        try:
            before = oracle(original)
            cases = [case for size in sizes for case in _cases(before, draws, size)]
        except GraphError as error:
            refused.append(str(error))
            continue
        try:
            proof = _hold(before, cases, lowered)
        except CheckError as error:
            differ.append(error)
        else:
            doubt = f", but not {_ORACLES[0].where}" if differ else ""
            return Proof(proof.proved, proof.note + doubt)
    if differ:
        raise differ[0]
    return Proof(False, f"the original cannot be run, so nothing was compared: {'; '.join(refused)}")


def _hold(before: _Runner, cases: Sequence[_Case], lowered: Path) -> Proof:
    """Compare the lowered graph with what `before`, which runs the original, answered."""
    after, answers = _run_lowered(lowered, cases)
    worst = 0.0
    compared: Counter[str] = Counter({name: 0 for case in cases for name in case.expected})
    for case, answer in zip(cases, answers, strict=True):
        moved = [before.run(_moved(case.feeds, seed)) for seed in range(RUNS)]
        for name, right in case.expected.items():
            ours = _same_kind(name, answer, right)
            difference, count = _compare(name, case.size, ours, right, [each[name] for each in moved])
            worst, compared[name] = max(worst, difference), compared[name] + count
    where = before.where if after.where == before.where else f"{before.where}, itself {after.where}"
    never = [name for name, count in compared.items() if not count]
    if never or not compared:
        return Proof(False, f"{', '.join(never) or 'no output'}: nothing was comparable {where}")
    return Proof(True, f"equal to the original {where}, largest difference {worst:.2g}")


def _same_kind(name: str, answers: Mapping[str, Array], right: Array) -> Array:
    if name not in answers:
        raise CheckError(f"the lowered graph has no output {name!r}, the original has; please report it")
    answer = answers[name]
    if (answer.shape, answer.dtype) != (right.shape, right.dtype):
        raise CheckError(
            f"lowered output {name!r} is {answer.dtype.name} of shape {answer.shape}, the original's "
            f"{right.dtype.name} of shape {right.shape}; this is a fault of the lowering, please report it"
        )
    return answer


def _compare(
    name: str, size: Sizes, answer: Array, right: Array, moved: Sequence[Array]
) -> tuple[float, int]:
    """The largest difference, and how many elements were compared."""
    if right.dtype.name not in FLOAT_EPS:
        stable = np.all([each == right for each in moved], axis=0)
        wrong = int((stable & (answer != right)).sum())
        if wrong:
            raise _differs(name, size, f"{wrong} of {right.size} elements are not equal")
        return 0.0, int(stable.sum())
    exact, ours = right.astype(np.float64), answer.astype(np.float64)
    if np.isnan(ours).any():
        raise _differs(name, size, "NaN in the lowered graph")
    # ONNX Runtime writes a score that is masked as the lowest number; -inf means the same.
    finite = np.isfinite(exact) & (exact > LOWEST[right.dtype.name] / 2)
    error = float(np.abs(ours[finite] - exact[finite]).max(initial=0.0))
    scatter = 0.0
    for each in moved:
        away = np.abs(each.astype(np.float64)[finite] - exact[finite])
        scatter = max(scatter, float(away[np.isfinite(away)].max(initial=0.0)))
    allowed = 2 * scatter + 2 * FLOAT_EPS[right.dtype.name] * float(np.abs(exact[finite]).max(initial=0.0))
    if error > allowed:
        raise _differs(name, size, f"{error:.3g}, allowed {allowed:.3g}")
    return error, int(finite.sum())


def _differs(name: str, size: Sizes, how: str) -> CheckError:
    return CheckError(
        f"the lowered graph differs from the original at {dict(size)} in {name!r}: {how}; "
        "this is a fault of the lowering, please report it"
    )


class _OnnxRuntime:
    where = "in ONNX Runtime"

    def __init__(self, path: Path) -> None:
        try:
            onnxruntime = import_onnxruntime()
        except MissingError as error:
            raise GraphError(str(error)) from error
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        # With all optimisations on it crashes, rather than raises, on some graphs that are not fused.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        try:
            self._session = onnxruntime.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # its exceptions share no public base class
            raise GraphError(f"ONNX Runtime: {one_line(error)}") from error
        self._names = [output.name for output in self._session.get_outputs()]

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        try:
            values = self._session.run(self._names, dict(feeds))
        except Exception as error:  # as above
            raise GraphError(f"ONNX Runtime: {one_line(error)}") from error
        return dict(zip(self._names, values, strict=True))


class _Reference:
    where = "in onnx.reference"

    def __init__(self, path: Path) -> None:
        from onnx.reference import ReferenceEvaluator

        try:
            self._session = ReferenceEvaluator(str(path), new_ops=[_attention_with_whole_masks()])
        except Exception as error:  # whatever the implementation of an operator raises
            raise GraphError(f"onnx.reference: {one_line(error)}") from error

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")  # of numpy, about -inf and overflow
                values = self._session.run(None, dict(feeds))
        except Exception as error:  # as above
            raise GraphError(f"onnx.reference: {one_line(error)}") from error
        return {str(n): np.asarray(v) for n, v in zip(self._session.output_names, values, strict=True)}


def _attention_with_whole_masks() -> Any:
    """The reference's `Attention`, but for masks of one row for all queries.

    onnx 1.23 takes such a mask's one row for the number of queries where is_causal is set.
    """
    from onnx.reference.ops.op_attention import Attention as Reference

    class Attention(Reference):
        op_domain = ""
        _validate_attention25 = False  # what opset 25 alone refuses

        def _run(  # type: ignore[override]  # all that it does not look at goes through
            self, q: Array, k: Array, v: Array, attn_mask: Any = None, *others: Any, **attributes: Any
        ) -> Any:
            if attn_mask is not None:  # none is an input that the node leaves out
                whole = (*attn_mask.shape[:-2], q.shape[-2], attn_mask.shape[-1])
                attn_mask = np.broadcast_to(attn_mask, whole)
            return super()._run(q, k, v, attn_mask, *others, **attributes)

    return Attention


_ORACLES: tuple[type[_Runner], ...] = (_OnnxRuntime, _Reference)


def _cases(runner: _Runner, inputs: _Inputs, size: Sizes) -> list[_Case]:
    """Draws at one size. Integers start at each axis' size in turn and shrink until the graph takes them."""
    ranges = inputs.ranges(size)
    cases = []
    for number in range(max(DRAWS, min(len(ranges), MOST_DRAWS))):
        tried = [*ranges[number:], _Range(0, 1), _Range(1, 1)]
        case = _first_that_runs(runner, inputs, size, number, tried)
        # A float that is a mask by its name only may be multiplied with: -inf is then no input for it.
        nan = any(x.dtype.name in FLOAT_EPS and np.isnan(x).any() for x in case.expected.values())
        if not (nan and inputs.guesses(number)):
            cases.append(case)
    return cases


def _first_that_runs(
    runner: _Runner, inputs: _Inputs, size: Sizes, number: int, tried: Sequence[_Range]
) -> _Case:
    refused = []
    for integers in tried if inputs.has_integers else tried[-1:]:
        feeds = inputs.draw(size, number, integers)
        try:
            return _Case(size, feeds, runner.run(feeds))
        except GraphError as error:
            refused.append(error)
    raise refused[-1]


def _run_lowered(path: Path, cases: Sequence[_Case]) -> tuple[_Runner, list[dict[str, Array]]]:
    why = []
    for oracle in _ORACLES:
        try:
            runner = oracle(path)
            return runner, [runner.run(case.feeds) for case in cases]
        except GraphError as error:
            why.append(str(error))
    raise GraphError(f"the lowered graph does not run where the original does: {'; '.join(why)}")


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Random values for `tensors`. `masks` names the floats that mask, True where that is only a guess."""

    tensors: Sequence[TensorSpec]
    masks: Mapping[str, bool]

    @property
    def has_integers(self) -> bool:
        return any(not t.is_float and t.dtype != "bool" for t in self.tensors)

    def guesses(self, number: int) -> bool:
        return number != 1 and any(self.masks.values())

    def ranges(self, size: Sizes) -> list[_Range]:
        """From 1 to each size that an axis has, the largest first: one of them is the keys'."""
        if not self.has_integers:
            return []
        axes = {axis for tensor in self.tensors for axis in _shape(tensor, size)}
        return [_Range(1, axis) for axis in sorted(axes, reverse=True) if axis > 1]

    def draw(self, size: Sizes, number: int, integers: _Range) -> dict[str, Array]:
        """Draw 1 has finite masks, every other one masks of 0 and -inf."""
        random = np.random.default_rng(number)
        return {t.name: self._values(t, _shape(t, size), random, number, integers) for t in self.tensors}

    def _values(
        self,
        tensor: TensorSpec,
        shape: tuple[int, ...],
        random: np.random.Generator,
        number: int,
        integers: _Range,
    ) -> Array:
        dtype = numpy_dtype(tensor.dtype)
        if tensor.dtype == "bool":
            return _kept(shape, random, number)
        if not tensor.is_float:  # no two neighbours alike
            pool = random.permutation(np.arange(integers.low, integers.high + 1))
            return np.resize(pool, shape).astype(dtype)
        if tensor.name in self.masks and number != 1:
            return np.where(_kept(shape, random, number), 0.0, -np.inf).astype(dtype)
        return random.standard_normal(shape).astype(dtype)


def _kept(shape: tuple[int, ...], random: np.random.Generator, number: int) -> Array:
    """Mostly True; a row and a column all False. What has one row only is all False in the last draw only."""
    kept = np.asarray(random.random(shape) < 0.8)
    if len(shape) < 2 or not kept.size:
        return kept
    rows = kept.reshape(-1, shape[-1])
    if shape[-1] > 1:
        rows[:, random.integers(shape[-1])] = False
    if len(rows) > 1 or number == DRAWS - 1:
        rows[random.integers(len(rows))] = False
    return rows.reshape(shape)


def _moved(feeds: Mapping[str, Array], seed: int) -> dict[str, Array]:
    random = np.random.default_rng(seed)
    moved = dict(feeds)
    for name, array in feeds.items():
        if array.dtype.name in FLOAT_EPS:
            step = 1 + FLOAT_EPS[array.dtype.name] * random.uniform(-1, 1, array.shape)
            moved[name] = np.where(np.isfinite(array), array * step, array).astype(array.dtype)
    return moved


def _shape(tensor: TensorSpec, sizes: Sizes) -> tuple[int, ...]:
    return tuple(_length(axis, sizes) if isinstance(axis, str) else axis for axis in tensor.shape)


def _length(axis: str, sizes: Sizes) -> int:
    """A symbol's size; of `past + seq` the sum, whatever `sizes` says of it, so that lengths agree.

    Raises:
        GraphError: `sizes` does not tell it.
    """
    try:
        length = _evaluate(ast.parse(axis, mode="eval").body, sizes)
    except (SyntaxError, ValueError, KeyError) as error:
        if axis not in sizes:
            raise GraphError(f"no size is known for the axis {axis!r}") from error
        length = sizes[axis]
    if length < 0:
        raise GraphError(f"the axis {axis!r} has the size {length}")
    return length


def _evaluate(tree: ast.expr, sizes: Sizes) -> int:
    match tree:
        case ast.Name(id=name):
            return sizes[name]
        case ast.Constant(value=int(number)):
            return number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            length: int = _OPERATORS[type(op)](_evaluate(left, sizes), _evaluate(right, sizes))
            return length
    raise ValueError(ast.dump(tree))


def _masks(path: Path, inputs: Sequence[TensorSpec]) -> dict[str, bool]:
    """Float inputs that reach an Attention's mask and not its operands, or that are called so."""
    import onnx

    graph = onnx.load(path, load_external_data=False).graph
    made_by = {name: node for node in graph.node for name in node.output if name}
    attentions = [node for node in graph.node if node.op_type == "Attention"]
    operands = {name for node in attentions for name in _sources(list(node.input[:3]), made_by)}
    masks: dict[str, bool] = {}
    for node in attentions:
        for name, guess in _sources(list(node.input[3:4]), made_by).items():
            masks[name] = guess or masks.get(name, False)
    floats = [tensor.name for tensor in inputs if tensor.is_float and tensor.name not in operands]
    return {n: masks.get(n, True) for n in floats if n in masks or "mask" in n.lower()}


def _sources(names: list[str], made_by: Mapping[str, Any]) -> dict[str, bool]:
    """What `names` are computed from, True where something on the way changes values."""
    found: dict[str, bool] = {}
    left = [(name, False) for name in names if name]
    while left:
        name, changed = left.pop()
        if found.get(name) in (changed, True):
            continue
        found[name] = changed
        if name in made_by and made_by[name].op_type not in ("Shape", "Size"):
            node = made_by[name]
            changed = changed or node.op_type not in _KEEPS_VALUES
            left += [(each, changed) for each in node.input if each]
    return found
