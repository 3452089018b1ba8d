"""A request's padded tensors -> one runner request a row, each with its own length; answers -> y.

In self attention with a padding mask, row b ends at its last visible position: what lies beyond is not
computed, and y is 0 there. Holes before it stay in the row's own mask. In cross attention the mask
shortens keys and values; every query is answered. A full mask shortens nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mha_deploy.ragged import Request
from mha_deploy.serving.wire import all_true
from mha_deploy.signature import Array, Signature
from mha_deploy.spec import AttentionSpec

MASK_NAMES = {"padding": "mask", "full": "attn_mask", "none": ""}


@dataclass(frozen=True, slots=True)
class Rows:
    """One client's request as the runner takes it.

    `shape` is y's, [batch, query, d_model]; `places[i]` is the row of y that `requests[i]` answers.
    Rows in which nothing is visible have no request in self attention: their y is 0 throughout.
    """

    shape: tuple[int, ...]
    requests: tuple[Request, ...]
    places: tuple[int, ...]


def served_signature(spec: AttentionSpec, signature: Signature) -> Signature:
    """What a client may send: as `signature`, but with the batch from 1, and short lengths where a mask
    lets the runner pad them."""
    batch, *lengths = signature.dims
    if spec.mask != "none":
        lengths = [replace(dim, min=1) for dim in lengths]
    return replace(signature, dims=(replace(batch, min=1), *lengths))


def without_mask(spec: AttentionSpec, signature: Signature) -> Signature:
    """What a client sends who leaves the mask out."""
    name = MASK_NAMES[spec.mask]
    return replace(signature, inputs=tuple(t for t in signature.inputs if t.name != name))


def split(spec: AttentionSpec, tensors: Mapping[str, Array]) -> Rows:
    """The rows of padded `tensors` that were checked, views of them; no mask means that all is visible."""
    mask_name = MASK_NAMES[spec.mask]
    data = {name: array for name, array in tensors.items() if name != mask_name}
    query, key = ("x", "x") if spec.kind == "self" else ("query", "key")
    batch, q_len, kv_len = data[query].shape[0], data[query].shape[1], data[key].shape[1]
    ends, masks = [kv_len] * batch, [_EMPTY] * batch
    if mask_name in tensors and not all_true(tensors[mask_name]):
        ends, masks = _visible(spec, tensors[mask_name])
    places = [row for row in range(batch) if ends[row] > 0]
    requests = []
    for row in places:
        lengths = {name: ends[row] if spec.kind == "self" or name != query else q_len for name in data}
        parts = {name: array[row, : lengths[name]] for name, array in data.items()}
        requests.append(Request(parts, lengths[query], lengths[key], mask=masks[row]))
    shape = (batch, q_len, spec.d_model)
    return Rows(shape, tuple(requests), tuple(places))


_EMPTY = np.zeros(0, bool)


def _visible(spec: AttentionSpec, mask: Array) -> tuple[list[int], list[Array]]:
    """Each row's length by its mask, and what of the mask is left to say within it."""
    if spec.mask == "full":
        return [mask.shape[-1]] * len(mask), [_EMPTY if row.all() else row for row in mask]
    ends = np.where(mask.any(1), mask.shape[1] - mask[:, ::-1].argmax(1), 0)
    if spec.kind == "cross":
        ends = np.maximum(ends, 1)  # its queries are answered even where there is no key to look at
    cut = [row[:end] for row, end in zip(mask, ends, strict=True)]
    return [int(end) for end in ends], [_EMPTY if row.all() else row for row in cut]


def joined(rows: Rows, answers: Sequence[Array], dtype: np.dtype[Any]) -> Array:
    """y, of `rows.shape`, from the answers [length, d_model]: a lone whole one itself, else a copy."""
    if rows.shape[0] == 1 and rows.places and answers[0].shape == rows.shape[1:]:
        return answers[0][None]
    y: Array = np.zeros(rows.shape, dtype)
    for place, answer in zip(rows.places, answers, strict=True):
        y[place, : len(answer)] = answer
    return y
