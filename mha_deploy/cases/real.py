"""Cases made of real requests: as they came, and masked further."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mha_deploy.cases.case import Case
from mha_deploy.cases.masks import fully_masked, garbage, masked
from mha_deploy.cases.sizes import Sizing
from mha_deploy.errors import FeedError
from mha_deploy.ragged import Request, pad
from mha_deploy.spec import AttentionSpec


def real_case(spec: AttentionSpec, name: str, requests: Sequence[Request]) -> Case:
    """As many of the requests as one batch takes, padded together.

    Raises:
        FeedError: one is longer than the block takes.
    """
    sizing = Sizing(spec)
    chosen = list(requests)[: spec.dims[0].max]
    longest = {
        sizing.q: max(request.q_len for request in chosen),
        sizing.kv: max(request.kv_len for request in chosen),
    }
    for dim in spec.dims[1:]:
        if longest[dim.name] > dim.max:
            raise FeedError(
                f"a request has {dim.name} = {longest[dim.name]}; this block takes {dim.min}..{dim.max}"
            )
    wanted = {sizing.batch: len(chosen), **longest}
    sizes = {name: sizing.within(name, size) for name, size in wanted.items()}
    lengths = np.array([r.q_len for r in chosen] + [0] * (sizes[sizing.batch] - len(chosen)))
    compared = np.arange(sizes[sizing.q])[None, :] < lengths[:, None]
    return Case(name, sizes, pad(spec, chosen, sizes), compared, real=True)


def masked_real_cases(spec: AttentionSpec, requests: Sequence[Request]) -> list[Case]:
    """Real requests with holes, with a row that has nothing to look at, and with garbage in the padding.

    For integer precisions, whose masks can be judged on real values only; none for a block that takes
    no padding mask, or where there are no requests.
    """
    if spec.mask != "padding" or not requests:
        return []
    case = real_case(spec, "real-inputs", requests)
    mask = case.feeds["mask"]
    holes = mask & (np.arange(mask.shape[1]) % 3 != 1)
    return [
        masked(spec, replace(case, name="real-holes"), holes),
        fully_masked(spec, replace(case, name="real-fully-masked")),
        garbage(spec, replace(case, name="real-garbage")),
    ]
