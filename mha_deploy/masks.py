"""Masks as people have them, turned into the one form that graphs take.

The convention here is boolean, True = keep. Others are common (torch.nn.MultiheadAttention: True =
ignore; Hugging Face: 1 = keep; additive: 0 and -inf), so a caller names the form of a mask that is
not ours, and this module, the only place that does, converts it.
"""

from __future__ import annotations

import numpy as np

from mha_deploy.errors import FeedError
from mha_deploy.signature import Array
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
