"""Masks as people have them, turned into the one form that graphs take.

The convention here is boolean, True = keep. Others are common (torch.nn.MultiheadAttention: True =
ignore; Hugging Face: 1 = keep; additive: 0 and -inf), so a caller names the form of a mask that is
not ours, and this module, the only place that does, converts it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mha_deploy.errors import FeedError
from mha_deploy.precision import numpy_dtype
from mha_deploy.signature import Array, TensorSpec
from mha_deploy.spec import MASK_CONVENTION, AttentionSpec

FORMS = ("keep", "ignore", "additive")
_CONVENTIONS = {"keep": MASK_CONVENTION, "ignore": "boolean, True = ignore, False = keep (the form 'ignore')"}


def keep_mask(mask: Array, spec: AttentionSpec, shape: tuple[int, int, int], form: str = "keep") -> Array:
    """`mask` as the boolean array that the graph of `spec` takes.

    `shape` is (batch, query length, key length). Values by `form`: "keep" is boolean or 0/1 with
    True = keep; "ignore" is boolean or 0/1 with True = ignore; "additive" is floating point with 0
    where kept and -inf (or the dtype's lowest number) where ignored.

    Shapes for a padding mask [batch, key]: [batch, key], [batch, 1, 1, key] and [1, 1, 1, key]. For
    a full mask [batch, query, key]: those of rank 4, [query, key], [batch, query, key] and
    [batch | 1, 1, query | 1, key]. Rank 3 is always per sample, never per head. One mask serves all
    heads: a mask per head is refused.

    Raises:
        FeedError: any other values or shape, with the shape given and the convention.
    """
    keep = _keep_values(np.asarray(mask), form)
    batch, queries, keys = shape
    if spec.mask == "none":
        raise FeedError(
            f"a mask of shape {list(keep.shape)} was given; this block takes none (mask = 'none')"
        )
    target = (batch, keys) if spec.mask == "padding" else (batch, queries, keys)
    four = (batch, 1, 1, keys) if spec.mask == "padding" else (batch, 1, queries, keys)
    accepted = keep.shape == target or (spec.mask == "full" and keep.shape == (queries, keys))
    if keep.ndim == 4 and keep.shape[3] == keys:
        accepted = all(size in (1, full) for size, full in zip(keep.shape, four, strict=True))
    if not accepted:
        raise FeedError(_refusal(keep, spec, target))
    if keep.ndim == 4:
        keep = keep[:, 0, 0] if spec.mask == "padding" else keep[:, 0]
    return np.ascontiguousarray(np.broadcast_to(keep, target))


def form_of(dtype: str) -> str:
    """The form that a graph's mask input of this dtype has as a rule: floating point is added to scores."""
    return "additive" if "float" in dtype else "keep"


def from_keep(keep: Array, tensor: TensorSpec, queries: int, form: str) -> Array:
    """The inverse of `keep_mask`: `keep` as another graph's mask input `tensor` takes it.

    `keep` is [batch, key] or [batch, query, key], True = keep. An additive mask holds 0 and the dtype's
    lowest number, as Hugging Face writes it: -inf would make NaN of a row with nothing to look at.
    An axis of heads or queries that `tensor` fixes gets that size, others 1 and `queries`.

    Raises:
        FeedError: `tensor` has no shape that such a mask fits, or no dtype that the form has.
    """
    if form == "additive" and not tensor.is_float:
        raise FeedError(f"mask input {tensor}; the form 'additive' is floating point")
    rank = len(tensor.shape)
    if rank not in (2, 3, 4) or rank < keep.ndim:
        raise FeedError(f"mask input {tensor} does not take a mask of shape {list(keep.shape)}")
    if rank > 2 and keep.ndim == 2:
        keep = np.broadcast_to(keep[:, None], (len(keep), _fixed(tensor.shape[-2], queries), keep.shape[1]))
    if rank == 4:
        keep = np.broadcast_to(keep[:, None], (len(keep), _fixed(tensor.shape[1], 1), *keep.shape[1:]))
    dtype = numpy_dtype(tensor.dtype)
    if form == "additive":
        return np.where(keep, 0, lowest(dtype)).astype(dtype)
    return (keep if form == "keep" else ~keep).astype(dtype)


def narrowed(array: Array, dtype: np.dtype[Any]) -> Array:
    """`array` in `dtype`; the lowest number of a mask stays the lowest, where a cast would make it -inf."""
    if array.dtype.kind != "f" or array.dtype == dtype:
        return array.astype(dtype, copy=False)
    masked = array == np.finfo(array.dtype).min
    return np.where(masked, lowest(dtype), np.where(masked, 0, array)).astype(dtype)


def lowest(dtype: np.dtype[Any]) -> float:
    """The lowest finite number of a floating-point dtype, bfloat16 included."""
    if dtype.name == "bfloat16":
        import ml_dtypes

        return float(ml_dtypes.finfo(dtype).min)  # type: ignore[no-untyped-call]
    return float(np.finfo(dtype).min)


def _fixed(axis: str | int, otherwise: int) -> int:
    return axis if isinstance(axis, int) else otherwise


def _keep_values(mask: Array, form: str) -> Array:
    if form not in FORMS:
        raise FeedError(f"mask form {form!r}; expected one of {', '.join(FORMS)}")
    if form == "additive":
        return _from_additive(mask)
    if mask.dtype.kind in "iu" and np.isin(mask, (0, 1)).all():
        mask = mask.astype(bool)
    if mask.dtype != bool:
        raise FeedError(
            f"mask has shape {list(mask.shape)} and dtype {mask.dtype.name}; expected {_CONVENTIONS[form]}, "
            "or 0/1 (for 0 and -inf to add to the scores, name the form 'additive')"
        )
    return mask if form == "keep" else ~mask


def _from_additive(mask: Array) -> Array:
    if mask.dtype.kind != "f":
        raise FeedError(
            f"mask has shape {list(mask.shape)} and dtype {mask.dtype.name}; the form 'additive' "
            "is floating point, 0 = keep, -inf = ignore"
        )
    ignore = mask <= np.finfo(mask.dtype).min
    if not np.array_equal(ignore, mask != 0):
        raise FeedError(
            f"additive mask of shape {list(mask.shape)} holds other values than 0 (keep) and -inf or "
            f"{np.finfo(mask.dtype).min:.3g} (ignore); a bias on the scores is not a mask"
        )
    return np.asarray(mask == 0)


def _refusal(keep: Array, spec: AttentionSpec, target: tuple[int, ...]) -> str:
    forms = [list(target)]
    if spec.mask == "full":
        forms.append(list(target[1:]))
    middle = 1 if spec.mask == "padding" else f"{target[1]}|1"
    spelled = ", ".join(map(str, forms))
    return (
        f"{spec.mask} mask has shape {list(keep.shape)}; expected {spelled} or "
        f"[{target[0]}|1, 1, {middle}, {target[-1]}], {MASK_CONVENTION}; one mask serves all heads"
    )
