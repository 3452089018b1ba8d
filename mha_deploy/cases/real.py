"""Inputs that were given, as cases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mha_deploy.cases.case import Case
from mha_deploy.cases.masks import fully_masked, garbage, masked
from mha_deploy.cases.sizes import Sizing
from mha_deploy.errors import FeedError
from mha_deploy.ragged import Request, pad
from mha_deploy.signature import Array, Feeds
from mha_deploy.spec import AttentionSpec

REAL = "real-inputs"


def masked_real_cases(spec: AttentionSpec, case: Case) -> list[Case]:
    """A real case with holes, with a row that has nothing to look at, and with garbage in the padding.

    For integer precisions, whose masks can be judged on real values only; none for a block that takes
    no padding mask.
    """
    if spec.mask != "padding":
        return []
    mask = case.feeds["mask"]
    holes = mask & (np.arange(mask.shape[1]) % 3 != 1)
    return [
        masked(spec, replace(case, name="real-holes"), holes),
        fully_masked(spec, replace(case, name="real-fully-masked")),
        garbage(spec, replace(case, name="real-garbage")),
    ]


def real_cases(spec: AttentionSpec, requests: Sequence[Request]) -> list[Case]:
    """All requests, as many in a case as one batch takes, padded together.

    Raises:
        FeedError: a request is longer than the block takes.
    """
    most = spec.dims[0].max
    batches = [requests[start : start + most] for start in range(0, len(requests), most)]
    return [real_case(spec, _numbered(number), batch) for number, batch in enumerate(batches)]


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
    return Case(REAL, sizes, arrays, compared, real=True)


def real_case(spec: AttentionSpec, name: str, requests: Sequence[Request]) -> Case:
    """These requests, no more than one batch takes, padded together.

    Raises:
        FeedError: a request is longer than the block takes.
    """
    sizing = Sizing(spec)
    sizes = {
        sizing.batch: sizing.within(sizing.batch, len(requests)),
        sizing.q: _longest(spec, sizing.q, [request.q_len for request in requests]),
        sizing.kv: _longest(spec, sizing.kv, [request.kv_len for request in requests]),
    }
    feeds = {key: _as_fp32(array) for key, array in pad(spec, requests, sizes).items()}
    lengths = np.array([r.q_len for r in requests] + [0] * (sizes[sizing.batch] - len(requests)))
    compared = np.arange(sizes[sizing.q])[None, :] < lengths[:, None]
    return Case(name, sizes, feeds, compared, real=True)


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
