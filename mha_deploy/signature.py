"""Shapes, described once: named axes with their ranges, and the tensors over them.

Export, TensorRT profiles, every session, the verification cases, the bench grid and the server's
validation all read a `Signature`; none of them keeps shape rules of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mha_deploy.errors import FeedError, SpecError
from mha_deploy.json_part import JsonPart
from mha_deploy.precision import Precision, numpy_dtype

Array = NDArray[Any]
Feeds = Mapping[str, Array]
Sizes = Mapping[str, int]

_Expected = tuple[str, np.dtype[Any], tuple[tuple[str, int, int], ...]]
"""An input as `Signature.check` wants it: name, dtype, and each axis' dim ("" if fixed), min and max."""

# Shapes are 32-bit numbers in more than one runtime.
LARGEST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Dim:
    """A named dynamic axis: every size from `min` to `max` works, `opt` is the one to tune for.

    Raises:
        SpecError: unless 1 <= min <= opt <= max.
    """

    name: str
    min: int
    opt: int
    max: int

    def __post_init__(self) -> None:
        bounds = (self.min, self.opt, self.max)
        if not all(isinstance(b, int) and not isinstance(b, bool) for b in bounds):
            raise SpecError(f"dim {self.name!r}: min, opt and max are whole numbers, got {bounds}")
        if self.max > LARGEST:
            raise SpecError(f"dim {self.name!r}: max = {self.max}; expected at most {LARGEST}")
        if not 1 <= self.min <= self.opt <= self.max:
            raise SpecError(
                f"dim {self.name!r}: min={self.min} opt={self.opt} max={self.max}; "
                "expected 1 <= min <= opt <= max"
            )

    def __str__(self) -> str:
        return f"{self.name} {self.min}..{self.opt}..{self.max}"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One named input or output.

    `shape` holds a dim's name for a dynamic axis and a number for a fixed one. `meaning` is a short
    text for people (the mask's convention above all); errors and `inspect` show it.
    """

    name: str
    dtype: str
    shape: tuple[str | int, ...]
    meaning: str = ""

    @property
    def is_float(self) -> bool:
        return "float" in self.dtype

    def __str__(self) -> str:
        axes = ", ".join(str(axis) for axis in self.shape)
        return f"{self.name} [{axes}] {self.dtype}" + (f" ({self.meaning})" if self.meaning else "")


@dataclass(frozen=True, slots=True)
class Signature:
    """Named, typed inputs and outputs over named dims."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    dims: tuple[Dim, ...]
    _expected: tuple[_Expected, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = [dim.name for dim in self.dims]
        for tensor in (*self.inputs, *self.outputs):
            for axis in tensor.shape:
                if isinstance(axis, str) and axis not in names:
                    raise SpecError(
                        f"tensor {tensor.name!r} uses dim {axis!r}; known dims: {', '.join(names)}"
                    )
        object.__setattr__(self, "_expected", tuple(map(self._expect, self.inputs)))

    def _expect(self, tensor: TensorSpec) -> _Expected:
        def axis(given: str | int) -> tuple[str, int, int]:
            if isinstance(given, int):
                return "", given, given
            dim = self.dim(given)
            return given, dim.min, dim.max

        return tensor.name, numpy_dtype(tensor.dtype), tuple(map(axis, tensor.shape))

    def dim(self, name: str) -> Dim:
        for dim in self.dims:
            if dim.name == name:
                return dim
        raise SpecError(f"no dim {name!r}; this block has {', '.join(d.name for d in self.dims)}")

    def input(self, name: str) -> TensorSpec:
        for tensor in self.inputs:
            if tensor.name == name:
                return tensor
        raise SpecError(f"no input {name!r}; this block takes {', '.join(t.name for t in self.inputs)}")

    def shape(self, tensor: TensorSpec, sizes: Sizes) -> tuple[int, ...]:
        """The concrete shape of `tensor` at the given sizes."""
        return tuple(sizes[axis] if isinstance(axis, str) else axis for axis in tensor.shape)

    def at(self, precision: Precision) -> Signature:
        """The same signature with every floating-point tensor in `precision`."""

        def retype(tensors: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
            return tuple(replace(t, dtype=precision.dtype_name) if t.is_float else t for t in tensors)

        return replace(self, inputs=retype(self.inputs), outputs=retype(self.outputs))

    def check(self, feeds: Feeds) -> dict[str, int]:
        """Sizes of every dim that the inputs carry, once names, dtypes, ranks and ranges all fit.

        Raises:
            FeedError: naming the tensor or axis, what it has and what was expected.
        """
        sizes = self._fitting(feeds)
        return self._explained(feeds) if sizes is None else sizes

    def _fitting(self, feeds: Feeds) -> dict[str, int] | None:
        """The sizes, or None where something may be amiss. Every run of every session comes through here."""
        sizes: dict[str, int] = {}
        for name, dtype, axes in self._expected:
            array = feeds.get(name)
            if type(array) is not np.ndarray or array.dtype != dtype or array.ndim != len(axes):
                return None
            for size, (axis, least, most) in zip(array.shape, axes, strict=True):
                if not least <= size <= most or (axis and sizes.setdefault(axis, size) != size):
                    return None
        return sizes if len(feeds) == len(self._expected) else None

    def _explained(self, feeds: Feeds) -> dict[str, int]:
        """`check`, axis by axis and slower: it says what is wrong."""
        expected = [tensor.name for tensor in self.inputs]
        if sorted(feeds) != sorted(expected):
            raise FeedError(f"got inputs {_listed(feeds)}; expected {_listed(expected)}")
        sizes: dict[str, int] = {}
        for tensor in self.inputs:
            array = feeds[tensor.name]
            self._check_array(tensor, array)
            for axis, size in zip(tensor.shape, array.shape, strict=True):
                if isinstance(axis, str):
                    self._bind(tensor, axis, size, array.shape, sizes)
                elif axis != size:
                    raise FeedError(_wrong_shape(tensor, array.shape))
        return sizes

    def _check_array(self, tensor: TensorSpec, array: Array) -> None:
        if not isinstance(array, np.ndarray):
            raise FeedError(f"input {tensor.name!r} is a {type(array).__name__}; expected a numpy array")
        if array.dtype.name != tensor.dtype:
            raise FeedError(f"input {tensor.name!r} has dtype {array.dtype.name}; expected {tensor}")
        if not array.dtype.isnative:  # its name does not show it, and runtimes would misread the bytes
            raise FeedError(
                f"input {tensor.name!r} is in the other byte order; convert it with "
                f"x.astype({tensor.dtype!r})"
            )
        if array.ndim != len(tensor.shape):
            raise FeedError(_wrong_shape(tensor, array.shape))

    def _bind(
        self, tensor: TensorSpec, axis: str, size: int, shape: tuple[int, ...], sizes: dict[str, int]
    ) -> None:
        dim = self.dim(axis)
        if not dim.min <= size <= dim.max:
            raise FeedError(
                f"input {tensor.name!r} has {axis} = {size}; this block takes {axis} {dim.min}..{dim.max}"
            )
        if sizes.setdefault(axis, size) != size:
            raise FeedError(
                f"input {tensor.name!r} has shape {list(shape)}, so {axis} = {size}, "
                f"but an earlier input has {axis} = {sizes[axis]}"
            )

    def to_json(self) -> dict[str, Any]:
        def tensors(group: tuple[TensorSpec, ...]) -> list[dict[str, Any]]:
            return [
                {"name": t.name, "dtype": t.dtype, "shape": list(t.shape), "meaning": t.meaning}
                for t in group
            ]

        dims = [{"name": d.name, "min": d.min, "opt": d.opt, "max": d.max} for d in self.dims]
        return {"inputs": tensors(self.inputs), "outputs": tensors(self.outputs), "dims": dims}

    @classmethod
    def from_json(cls, data: object) -> Signature:
        """Inverse of `to_json`.

        Raises:
            ValueError: a part is missing, unknown or of another kind.
            SpecError: an impossible dim, or a tensor over a dim that is not there.
        """
        part = JsonPart.of(data)

        def tensors(group: JsonPart) -> tuple[TensorSpec, ...]:
            return tuple(
                TensorSpec(**each.fields(TensorSpec), shape=tuple(map(_axis, each["shape"].parts())))
                for each in group.parts()
            )

        dims = tuple(Dim(**dim.fields(Dim)) for dim in part["dims"].parts())
        return cls(tensors(part["inputs"]), tensors(part["outputs"]), dims)


def _axis(part: JsonPart) -> str | int:
    return part.text() if isinstance(part.value, str) else part.whole(least=1)


def _listed(names: Mapping[str, Any] | list[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _wrong_shape(tensor: TensorSpec, shape: tuple[int, ...]) -> str:
    return f"input {tensor.name!r} has shape {list(shape)}; expected {tensor}"
