"""Masks on a case: padding right, left and with holes, empty rows, garbage where nobody may look."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mha_deploy.cases.case import Case
from mha_deploy.cases.draw import generator
from mha_deploy.signature import Array
from mha_deploy.spec import AttentionSpec

GARBAGE = (np.nan, np.inf, -np.inf, 1e30)
RIGHT, LEFT, HOLES = "right", "left", "holes"


def mask_name(spec: AttentionSpec) -> str:
    return "mask" if spec.mask == "padding" else "attn_mask"


def ragged(
    spec: AttentionSpec, case: Case, seed: int = 0, sides: Sequence[str] = (RIGHT, LEFT, HOLES, "")
) -> Case:
    """Rows padded on these sides in turn, "" being a full row; each keeps a length of its own."""
    length, rows = case.sizes[spec.key_axis], case.sizes[spec.dims[0].name]
    position = np.arange(length)
    keep = []
    for row in range(rows):
        kept = max(1, length // 3 + row // len(sides))
        styles = {RIGHT: position < kept, LEFT: position >= length - kept, HOLES: position % 2 == 0}
        keep.append(styles.get(sides[row % len(sides)], position < length))
    return masked(spec, case, np.stack(keep), seed)


def masked(spec: AttentionSpec, case: Case, keep: Array, seed: int = 0) -> Case:
    """`case` with keys kept as `keep` [batch, key]; in self attention the same positions are queries."""
    rows = keep if spec.kind == "self" else case.compared
    mask = keep
    if spec.mask == "full":
        # Every query its own keys, and now and then none: a mask transposed, reduced over queries
        # or taken from one query would not show in a mask that is the same for all of them.
        square = (len(rows), rows.shape[1], keep.shape[1])
        random = generator(seed, f"{case.name} mask")
        mask = rows[:, :, None] & keep[:, None, :] & (random.random(square) < 0.8)
        mask[:, 2::7] = False
    return replace(case, feeds={**case.feeds, mask_name(spec): mask}, compared=rows)


def fully_masked(spec: AttentionSpec, case: Case) -> Case:
    """The first sample of a masked case has nothing to look at; its rows are compared too."""
    mask, compared = case.feeds[mask_name(spec)].copy(), case.compared.copy()
    mask[0], compared[0] = False, True
    return replace(case, feeds={**case.feeds, mask_name(spec): mask}, compared=compared)


def unseen(spec: AttentionSpec, case: Case) -> Array:
    """Key positions [batch, key] that no query of a masked case looks at."""
    mask = case.feeds[mask_name(spec)]
    return np.logical_not(mask if spec.mask == "padding" else mask.any(axis=1))


def garbage(spec: AttentionSpec, case: Case, seed: int = 0) -> Case:
    """A masked case with NaN, inf and huge numbers where nobody may look; the reference sees zeros there."""
    hidden = unseen(spec, case)[:, :, None]
    random = generator(seed, f"{case.name} garbage")
    dirty, clean = dict(case.feeds), dict(case.feeds)
    for tensor in spec.signature.inputs:
        if tensor.is_float and tensor.shape[1] == spec.key_axis:
            junk = random.choice(np.array(GARBAGE, np.float32), case.feeds[tensor.name].shape)
            dirty[tensor.name] = np.where(hidden, junk, case.feeds[tensor.name])
            clean[tensor.name] = np.where(hidden, np.float32(0), case.feeds[tensor.name])
    return replace(case, feeds=dirty, clean=clean)
