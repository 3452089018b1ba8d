"""Optimisation profiles by symbol: `batch=1:8:32,seq=1:128:512`.

A profile gives every dynamic axis the sizes a plan must take (min, max) and the one it is tuned for
(opt). TensorRT takes several wrong profiles without a word (an unknown tensor, a size outside the
exported range, one axis with two ranges), so everything is checked here, by axis.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mha_deploy.errors import SpecError
from mha_deploy.signature import Dim, Signature, TensorSpec
from mha_deploy.tensorrt.messages import ProfileError

_SIZES = re.compile(r"\d+(:\d+){0,2}")


class ShapeRange(NamedTuple):
    """The three concrete shapes that TensorRT wants for one input."""

    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Profile:
    """One range for every dynamic axis of a graph's inputs."""

    dims: tuple[Dim, ...]

    def __str__(self) -> str:
        return ",".join(f"{d.name}={d.min}:{d.opt}:{d.max}" for d in self.dims)

    def to_json(self) -> dict[str, list[int]]:
        return {d.name: [d.min, d.opt, d.max] for d in self.dims}

    def shapes(self, inputs: Sequence[TensorSpec]) -> dict[str, ShapeRange]:
        """Shapes of the inputs that have a dynamic axis; one symbol has one range wherever it stands.

        Raises:
            ProfileError: an input uses an axis that is not given, or none uses a given one.
        """
        ranges = {d.name: d for d in self.dims}
        unused = set(ranges) - {axis for tensor in inputs for axis in tensor.shape}
        if unused:
            raise ProfileError(
                f"the profile {self} gives a range for axis {min(unused)!r}, which no input has; "
                "it was made for another graph."
            )
        shapes = {}
        for tensor in inputs:
            symbols = [axis for axis in tensor.shape if isinstance(axis, str)]
            missing = [axis for axis in symbols if axis not in ranges]
            if missing:
                raise ProfileError(
                    f"the profile {self} gives no range for axis {missing[0]!r} of input {tensor}; "
                    f"add {missing[0]}=MIN:OPT:MAX to --profile."
                )
            if symbols:
                shapes[tensor.name] = ShapeRange(
                    *(
                        tuple(getattr(ranges[a], end) if isinstance(a, str) else a for a in tensor.shape)
                        for end in ("min", "opt", "max")
                    )
                )
        return shapes


def profiles_for(signature: Signature, texts: Sequence[str] = ()) -> tuple[Profile, ...]:
    """The profiles of a bundle: an axis left out takes the signature's range, no text takes all of it.

    Raises:
        ProfileError: naming the axis, what was given and what the signature allows.
    """
    if not texts:
        return (Profile(signature.dims),)
    return tuple(_parse(text, [d.name for d in signature.dims], signature.dims) for text in texts)


def profiles_for_graph(inputs: Sequence[TensorSpec], texts: Sequence[str]) -> tuple[Profile, ...]:
    """The profiles of an ONNX file that declares no ranges: every axis must be given.

    No profile at all for a graph whose inputs are all of fixed size.

    Raises:
        ProfileError: naming the axis that is unknown, missing or wrong.
    """
    axes = list(dict.fromkeys(a for tensor in inputs for a in tensor.shape if isinstance(a, str)))
    if axes and not texts:
        example = ",".join(f"{axis}=MIN:OPT:MAX" for axis in axes)
        raise ProfileError(
            f"the graph has dynamic axes {', '.join(axes)} and declares no range for them; give one with "
            f"--profile {example}."
        )
    return tuple(_parse(text, axes, ()) for text in texts)


def _parse(text: str, axes: Sequence[str], bounds: Sequence[Dim]) -> Profile:
    allowed = {dim.name: dim for dim in bounds}
    given = _split(text)
    for axis in given:
        if axis not in axes:
            known = f"dynamic axes here: {', '.join(axes)}" if axes else "this graph has no dynamic axis"
            raise ProfileError(f"--profile {text}: no axis {axis!r}; {known}.")
    dims = []
    for axis in axes:
        if axis in given:
            dims.append(_dim(text, axis, given[axis], allowed.get(axis)))
        elif axis in allowed:
            dims.append(allowed[axis])
        else:
            raise ProfileError(
                f"--profile {text}: axis {axis!r} has no range and the graph declares none; "
                f"add {axis}=MIN:OPT:MAX."
            )
    return Profile(tuple(dims))


def _split(text: str) -> dict[str, list[int]]:
    """`seq=1:128:512` per comma, as the axis and its one to three numbers."""
    ranges: dict[str, list[int]] = {}
    for part in text.split(","):
        axis, equals, sizes = (piece.strip() for piece in part.partition("="))
        if not axis or not equals or not _SIZES.fullmatch(sizes):
            name = f"axis {axis!r}: " if axis else ""
            raise ProfileError(
                f"--profile {text}: {name}{part.strip()!r} is no range of whole sizes; expected "
                "AXIS=MIN:OPT:MAX, AXIS=MIN:MAX or AXIS=SIZE, with both ends given."
            )
        if axis in ranges:
            raise ProfileError(
                f"--profile {text}: axis {axis!r} is given twice; give a second profile as a second "
                f"--profile."
            )
        ranges[axis] = [int(size) for size in sizes.split(":")]
    return ranges


def _dim(text: str, axis: str, sizes: list[int], bound: Dim | None) -> Dim:
    low, high = sizes[0], sizes[-1]
    opt = sizes[1] if len(sizes) == 3 else _automatic_opt(low, high, bound)
    try:
        dim = Dim(axis, low, opt, high)
    except SpecError as error:
        raise ProfileError(
            f"--profile {text}: axis {axis!r} has min {low}, opt {opt}, max {high}; "
            "expected 1 <= min <= opt <= max."
        ) from error
    if bound is not None and not bound.min <= low <= high <= bound.max:
        raise ProfileError(
            f"--profile {text}: axis {axis!r} asks for {low}..{high}, but the graph was exported and "
            f"checked for {axis} {bound.min}..{bound.max}; stay inside, or export again with a wider range."
        )
    return dim


def _automatic_opt(low: int, high: int, bound: Dim | None) -> int:
    """The declared opt as far as it lies inside, else the middle; always within low..high."""
    wanted = bound.opt if bound is not None else (low + high) // 2
    return min(max(wanted, low), high)
