"""Random inputs that exercise what an attention graph reads: masks, lengths, indices, values."""

from __future__ import annotations

import ast
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mha_deploy.errors import GraphError
from mha_deploy.precision import numpy_dtype
from mha_deploy.signature import Array, Sizes, TensorSpec

DRAWS = 3
FLOAT_EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}
_KEEPS_VALUES = {"Identity", "Cast", "Unsqueeze", "Squeeze", "Reshape", "Expand", "Slice", "Transpose", "Pad"}
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


@dataclass(frozen=True, slots=True)
class Case:
    size: Sizes
    feeds: dict[str, Array]
    expected: dict[str, Array]


@dataclass(frozen=True, slots=True)
class Range:
    """Integers from `low` to `high`, both included."""

    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Inputs:
    """Random values for `tensors`. `masks` names the floats and integers that mask, True where that is only
    a guess."""

    tensors: Sequence[TensorSpec]
    masks: Mapping[str, bool]

    @property
    def has_integers(self) -> bool:
        return any(not t.is_float and t.dtype != "bool" for t in self.tensors)

    def guesses(self, number: int) -> bool:
        return number != 1 and any(self.masks.values())

    def ranges(self, size: Sizes) -> list[Range]:
        """From 1 to each size that an axis has, the largest first: one of them is the keys'."""
        if not self.has_integers:
            return []
        axes = {axis for tensor in self.tensors for axis in shape_at(tensor, size)}
        return [Range(1, axis) for axis in sorted(axes, reverse=True) if axis > 1]

    def draw(self, size: Sizes, number: int, integers: Range) -> dict[str, Array]:
        """Draw 1 has finite masks, every other one masks of 0 and -inf."""
        random = np.random.default_rng(number)
        return {t.name: self._values(t, shape_at(t, size), random, number, integers) for t in self.tensors}

    def _values(
        self,
        tensor: TensorSpec,
        shape: tuple[int, ...],
        random: np.random.Generator,
        number: int,
        integers: Range,
    ) -> Array:
        dtype = numpy_dtype(tensor.dtype)
        if tensor.dtype == "bool":
            return _kept(shape, random, number)
        if not tensor.is_float and tensor.name in self.masks and number != 1:
            return _kept(shape, random, number).astype(dtype)
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


def moved_by_one_eps(feeds: Mapping[str, Array], seed: int) -> dict[str, Array]:
    random = np.random.default_rng(seed)
    moved = dict(feeds)
    for name, array in feeds.items():
        if array.dtype.name in FLOAT_EPS:
            step = 1 + FLOAT_EPS[array.dtype.name] * random.uniform(-1, 1, array.shape)
            moved[name] = np.where(np.isfinite(array), array * step, array).astype(array.dtype)
    return moved


def shape_at(tensor: TensorSpec, sizes: Sizes) -> tuple[int, ...]:
    """The concrete shape of `tensor`, sums of symbols worked out."""
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


def symbols(axis: str) -> list[str]:
    """The names that an axis is made of: `past + seq` has two."""
    try:
        tree = ast.parse(axis, mode="eval")
    except SyntaxError:
        return [axis]
    return [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)] or [axis]


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


def masks_among(path: Path, inputs: Sequence[TensorSpec]) -> dict[str, bool]:
    """Floats that reach an Attention's mask and not its operands, and floats and integers called so."""
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
    found = {n: masks.get(n, True) for n in floats if n in masks or "mask" in n.lower()}
    # Integers that reach a mask may be lengths: only the name tells.
    integers = [t.name for t in inputs if t.dtype.startswith(("int", "uint")) and "mask" in t.name.lower()]
    return found | dict.fromkeys(integers, True)


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
