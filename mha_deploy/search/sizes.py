"""The sizes to be fast at where none are asked for."""

from __future__ import annotations

import math
from collections.abc import Callable

from mha_deploy.cases import describe
from mha_deploy.spec import AttentionSpec

SHORT_LENGTH = 16


def default_sizes(spec: AttentionSpec) -> list[dict[str, int]]:
    """A short request and a batch of such, one and a batch of the size to tune for, the longest one, and
    one between.

    Of short ones a batch too: an engine that is fast for one need not be for many. One between, since
    where a second engine begins to pay can only be told at a length that was measured.
    """
    batch = spec.dims[0]

    def sizes(requests: int, length: Callable[[int, int], int]) -> dict[str, int]:
        found = {dim.name: max(dim.min, length(dim.opt, dim.max)) for dim in spec.dims[1:]}
        return {batch.name: max(batch.min, min(requests, batch.max)), **found}

    def short(_opt: int, most: int) -> int:
        return min(SHORT_LENGTH, most)

    wanted = [
        sizes(1, short),
        sizes(batch.opt, short),
        sizes(1, lambda opt, _most: opt),
        sizes(batch.opt, lambda opt, _most: opt),
        sizes(1, lambda opt, most: math.isqrt(opt * most)),
        sizes(1, lambda _opt, most: most),
    ]
    return list({describe(each): each for each in wanted}.values())
