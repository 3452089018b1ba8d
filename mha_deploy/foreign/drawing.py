"""Cases for a file that no spec describes: random inputs by what its signature and names tell of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from mha_deploy.errors import InputError
from mha_deploy.foreign.onnx_file import ForeignFile
from mha_deploy.masks import lowest
from mha_deploy.precision import numpy_dtype
from mha_deploy.proof_inputs import Inputs, Range, masks_among
from mha_deploy.signature import Array, Dim, Feeds, Sizes, TensorSpec

PADDED, HIDDEN = "padding", "fully-masked-row"
BIAS = 1
"""The draw to which `Inputs` gives float masks of finite numbers, as a bias on the scores has."""
_SMALL = (4, 9, 11, 13)
"""Sizes of the cases that are about values and masks, by axis: small, and different from each other."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """Inputs of one case, by name."""

    name: str
    sizes: Sizes
    feeds: dict[str, Array]


class Drawing:
    """Draws the cases of one file.

    `takes` runs the reference on feeds; integers start at each axis' size in turn and shrink until it
    does (they may be lengths, positions or indices), else the reference's own error is the user's.
    """

    def __init__(
        self, file: ForeignFile, dims: Sequence[Dim], takes: Callable[[Feeds], None], seed: int
    ) -> None:
        inputs = tuple(replace(t, dtype="float32") if t.is_float else t for t in file.inputs)
        self._dims, self._takes, self._seed = dims, takes, seed
        self._inputs = Inputs(inputs, masks_among(file.path, inputs))
        self.masks = tuple(t for t in inputs if t.dtype == "bool" or t.name in self._inputs.masks)
        self.integers = tuple(t.name for t in inputs if _is_integer(t) and t not in self.masks)
        self.guessed = tuple(name for name, guess in self._inputs.masks.items() if guess)
        self._is_attention = file.is_attention

    def cases(self, names: Sequence[str] = ()) -> list[Drawn]:
        """Sizes, magnitudes and, where the file is an attention, masks and a sharp softmax.

        Raises:
            InputError: one of `names` is no case of this file, or the reference does not run.
        """
        made = self._makers()
        unknown = [name for name in names if name not in made]
        if unknown:
            raise InputError(f"no case {unknown[0]!r}; cases of this file: {', '.join(made)}")
        return [make() for name, make in made.items() if not names or name in names]

    def _makers(self) -> dict[str, Callable[[], Drawn]]:
        dims = self._dims
        small = {d.name: _within(d, _SMALL[i % len(_SMALL)]) for i, d in enumerate(dims)}
        sizes = {"min": {d.name: d.min for d in dims}}
        if dims:
            odd = {d.name: _within(d, 3 + 2 * i) for i, d in enumerate(dims)}
            sizes |= {"opt": {d.name: d.opt for d in dims}, "max": {d.name: d.max for d in dims}, "odd": odd}
        made: dict[str, Callable[[], Drawn]] = {
            name: partial(self._drawn, name, size, number)
            for number, (name, size) in enumerate(sizes.items(), start=2)
        }
        made["large-values"] = lambda: self._scaled(self._drawn("large-values", small, 6), 1000.0)
        if not self._is_attention:
            return made
        made["sharp-softmax"] = lambda: self._scaled(self._drawn("sharp-softmax", small, 7), 4.0)
        if any(tensor.is_float for tensor in self.masks):
            made["mask-as-bias"] = partial(self._drawn, "mask-as-bias", small, BIAS)
        if self.masks:
            made[PADDED] = lambda: self._masked(self._drawn(PADDED, small, 8), _padded)
            made[HIDDEN] = lambda: self._masked(self._drawn(HIDDEN, small, 9), _all_or_nothing)
        return made

    def _drawn(self, name: str, sizes: Sizes, number: int) -> Drawn:
        """Draw `number` of `Inputs`: float masks mostly 0, but for draw BIAS."""
        number = number if number == BIAS else number + 16 * self._seed
        refused = []
        for integers in [*self._inputs.ranges(sizes), Range(0, 1), Range(1, 1)]:
            feeds = self._halved(self._inputs.draw(sizes, number, integers), number)
            try:
                self._takes(feeds)
            except InputError as error:
                refused.append(error)
                continue
            return Drawn(name, sizes, feeds)
        raise refused[0]

    def _halved(self, feeds: dict[str, Array], number: int) -> dict[str, Array]:
        """Boolean and integer masks half True: which of the two values hides is not known."""
        random = np.random.default_rng([number, self._seed])
        halves = {
            t.name: (random.random(feeds[t.name].shape) < 0.5).astype(feeds[t.name].dtype)
            for t in self.masks
            if not t.is_float
        }
        return feeds | halves

    def _scaled(self, case: Drawn, factor: float) -> Drawn:
        masks = {tensor.name for tensor in self.masks}
        feeds = {
            name: array * np.float32(factor) if array.dtype.kind == "f" and name not in masks else array
            for name, array in case.feeds.items()
        }
        return replace(case, feeds=feeds)

    def _masked(self, case: Drawn, pattern: Callable[[tuple[int, ...]], Array]) -> Drawn:
        feeds = dict(case.feeds)
        for tensor in self.masks:
            feeds[tensor.name] = _as_mask(pattern(case.feeds[tensor.name].shape), tensor)
        return replace(case, feeds=feeds)


def _is_integer(tensor: TensorSpec) -> bool:
    return not tensor.is_float and tensor.dtype != "bool"


def _within(dim: Dim, size: int) -> int:
    return min(max(size, dim.min), dim.max)


def _as_mask(kept: Array, tensor: TensorSpec) -> Array:
    dtype = numpy_dtype(tensor.dtype)
    return np.where(kept, 0, lowest(dtype)).astype(dtype) if tensor.is_float else kept.astype(dtype)


def _padded(shape: tuple[int, ...]) -> Array:
    """Right, left and with holes, row by row; as True = keep and as True = ignore alike."""
    length = shape[-1]
    position = np.arange(length)
    third = max(1, length // 3)
    styles = np.stack([position < third, position >= length - third, position % 2 == 0, position > 0])
    batch = np.arange(shape[0] if len(shape) > 1 else 1) % len(styles)
    first = styles[batch].reshape(len(batch), *(1,) * (len(shape) - 2), length)
    return np.array(np.broadcast_to(first if len(shape) > 1 else styles[0], shape))


def _all_or_nothing(shape: tuple[int, ...]) -> Array:
    """The first sample all False, the second all True, others padded: one of the two sees nothing."""
    kept = _padded(shape)
    if len(shape) > 1:
        kept[:1], kept[1:2] = False, True
    return kept


def named(tensors: Sequence[TensorSpec] | Sequence[str]) -> str:
    return ", ".join(t if isinstance(t, str) else t.name for t in tensors)


def sizes_of(dims: Sequence[Dim]) -> Mapping[str, int]:
    return {dim.name: dim.opt for dim in dims}
