"""Inputs that were given, as cases."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mha_deploy.cases.case import Case
from mha_deploy.cases.sizes import Sizing
from mha_deploy.errors import FeedError
from mha_deploy.ragged import Request, pad
from mha_deploy.signature import Array, Feeds
from mha_deploy.spec import AttentionSpec

REAL = "real-inputs"


def real_cases(spec: AttentionSpec, requests: Sequence[Request]) -> list[Case]:
    """All requests, as many in a case as one batch takes, padded together.

    Raises:
        FeedError: a request is longer than the block takes.
    """
    most = spec.dims[0].max
    batches = [requests[start : start + most] for start in range(0, len(requests), most)]
    return [_padded_together(spec, _numbered(number), batch) for number, batch in enumerate(batches)]


def padded_case(spec: AttentionSpec, feeds: Feeds) -> Case:
    """Inputs under the graph's own names, with their mask in the graph's form.

    Raises:
        FeedError: they do not meet the signature.
    """
    arrays = {name: _as_fp32(array) for name, array in feeds.items()}
    sizes = spec.signature.check(arrays)
    compared = np.ones((sizes[spec.dims[0].name], sizes[spec.query_axis]), bool)
    if spec.kind == "self" and spec.mask == "padding":
        compared = arrays["mask"]
    if not compared.any():
        raise FeedError("the mask of these inputs keeps no position; expected at least one to compare")
    return Case(REAL, sizes, arrays, compared)


def _padded_together(spec: AttentionSpec, name: str, requests: Sequence[Request]) -> Case:
    sizing = Sizing(spec)
    sizes = {
        sizing.batch: sizing.within(sizing.batch, len(requests)),
        sizing.q: _longest(spec, sizing.q, [request.q_len for request in requests]),
        sizing.kv: _longest(spec, sizing.kv, [request.kv_len for request in requests]),
    }
    feeds = {key: _as_fp32(array) for key, array in pad(spec, requests, sizes).items()}
    lengths = np.array([r.q_len for r in requests] + [0] * (sizes[sizing.batch] - len(requests)))
    return Case(name, sizes, feeds, np.arange(sizes[sizing.q])[None, :] < lengths[:, None])


def _longest(spec: AttentionSpec, axis: str, lengths: Sequence[int]) -> int:
    dim = spec.signature.dim(axis)
    if max(lengths) > dim.max:
        raise FeedError(
            f"a request has {axis} = {max(lengths)}; this block takes {axis} {dim.min}..{dim.max}"
        )
    return max(dim.min, *lengths)


def _numbered(number: int) -> str:
    return f"{REAL}-{number + 1}" if number else REAL


def _as_fp32(array: Array) -> Array:
    return array if array.dtype == bool else array.astype(np.float32, copy=False)
