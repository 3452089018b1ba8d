"""What requests carry: random tensors of any length, cut out of one pool, so that sending copies little."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from mha_deploy.errors import InputError, RequestError
from mha_deploy.precision import numpy_dtype
from mha_deploy.serving.wire import DTYPES, clip
from mha_deploy.signature import Array, Signature, TensorSpec

BATCH, LENGTH = "batch", "length"
# Requests of one length that differ in what they carry: an answer given to the wrong one is then seen.
VARIANTS = 3
_SHIFT = 17


@dataclass(frozen=True, slots=True)
class Inputs:
    """Batches of one, by length and variant: standard normal values, every position visible."""

    tensors: tuple[TensorSpec, ...]
    pools: Mapping[str, Array]

    @classmethod
    def of(cls, tensors: Sequence[TensorSpec], longest: int, seed: int = 0) -> Self:
        """For lengths up to `longest`.

        Raises:
            InputError: a tensor is neither floating point [batch, length, width] nor a boolean mask.
        """
        for tensor in tensors:
            floats = tensor.is_float and len(tensor.shape) == 3 and isinstance(tensor.shape[-1], int)
            if not floats and tensor.dtype != "bool":
                raise InputError(f"cannot make requests for input {tensor}; expected attention's inputs")
        random = np.random.default_rng(seed)
        pools = {}
        for tensor in tensors:
            rows = longest + VARIANTS * _SHIFT
            shape = (rows, *tensor.shape[2:]) if tensor.is_float else (longest ** (len(tensor.shape) - 1),)
            ones: Array = np.ones(_sizes(shape, longest), bool)
            values = random.standard_normal(_sizes(shape, longest), np.float32) if tensor.is_float else ones
            pools[tensor.name] = values.astype(numpy_dtype(tensor.dtype))
        return cls(tuple(tensors), pools)

    @classmethod
    def for_signature(cls, signature: Signature, longest: int, seed: int = 0) -> Self:
        """For a bundle's block: every length axis takes the request's length.

        Raises:
            InputError: `longest` is beyond a length axis' maximum.
        """
        check_lengths(longest, longest, {dim.name: (1, dim.max) for dim in signature.dims[1:]})
        return cls.of(signature.inputs, longest, seed)

    @classmethod
    def for_metadata(cls, metadata: Mapping[str, Any], longest: int, seed: int = 0) -> Self:
        """For a served model, by its metadata (Open Inference Protocol v2).

        Raises:
            InputError: the metadata are not the protocol's, or not those of an attention block.
        """
        try:
            tensors = [
                TensorSpec(each["name"], DTYPES[each["datatype"]], _axes(each["shape"]))
                for each in metadata["inputs"]
            ]
        except (KeyError, TypeError, IndexError, RequestError) as error:
            raise InputError(
                f"the server describes its inputs as {clip(metadata)}; cannot read it"
            ) from error
        return cls.of(tensors, longest, seed)

    def feeds(self, length: int, variant: int) -> dict[str, Array]:
        """Contiguous views of the pools, [1, length, width]; masks [1, length] or [1, length, length]."""
        feeds = {}
        for tensor in self.tensors:
            shape = (1, *_sizes(tensor.shape[1:], length))
            pool = self.pools[tensor.name]
            if tensor.is_float:
                feeds[tensor.name] = pool[variant * _SHIFT : variant * _SHIFT + shape[1]].reshape(shape)
            else:
                feeds[tensor.name] = pool[: int(np.prod(shape))].reshape(shape)
        return feeds


def check_lengths(shortest: int, longest: int, ranges: Mapping[str, tuple[int, int]]) -> None:
    """Hold a run's lengths against what a block takes: least and most, by the names of its length axes.

    Raises:
        InputError: they go beyond one of them.
    """
    for name, (least, most) in ranges.items():
        if longest > most:
            raise InputError(f"a request of length {longest}; this block takes {name} up to {most}")
        if shortest < least:
            raise InputError(f"a request of length {shortest}; this block takes {name} from {least} up")


def _axes(shape: Sequence[int]) -> tuple[str | int, ...]:
    return (BATCH, *(LENGTH if axis < 0 else axis for axis in shape[1:]))


def _sizes(shape: Sequence[str | int], length: int) -> tuple[int, ...]:
    return tuple(axis if isinstance(axis, int) else length for axis in shape)
