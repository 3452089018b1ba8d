"""Which tensor of the checkpoint a graph's stored tensor is: rounded, transposed, or as it was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import ml_dtypes
import numpy as np

from mha_deploy.signature import Array


def parameter_of(stored: Array, weights: Mapping[str, Array]) -> str:
    """The name in `weights` (fp32) of what `stored` is; "" for none.

    A stored tensor may be transposed, rounded to its own dtype, or rounded to bf16 and kept in fp32.
    """
    return next((name for name, _ in _same(stored, weights)), "")


def exact(stored: Array, weights: Mapping[str, Array]) -> Array:
    """`stored` in fp32, with the checkpoint's values where it is one of its tensors."""
    return next((weight for _, weight in _same(stored, weights)), stored.astype(np.float32))


def is_transposed(stored: Array, weights: Mapping[str, Array]) -> bool:
    name = parameter_of(stored, weights)
    return bool(name) and exact(stored, weights) is not weights[name]


def _same(stored: Array, weights: Mapping[str, Array]) -> Iterator[tuple[str, Array]]:
    for name, weight in weights.items():
        for way in (weight, weight.T) if weight.ndim > 1 else (weight,):
            if way.shape == stored.shape and any(np.array_equal(r, stored) for r in _rounded(way, stored)):
                yield name, way


def _rounded(weight: Array, like: Array) -> Iterator[Array]:
    with np.errstate(over="ignore"):
        yield weight.astype(like.dtype)
        if like.dtype == np.float32:
            yield weight.astype(ml_dtypes.bfloat16).astype(np.float32)
