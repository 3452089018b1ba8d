"""The sizes that prove dynamic axes."""

from __future__ import annotations

import itertools

from mha_deploy.cases.case import Case, describe
from mha_deploy.cases.draw import drawn
from mha_deploy.cases.sizes import Sizing
from mha_deploy.signature import Sizes
from mha_deploy.spec import AttentionSpec


def lattice_cases(spec: AttentionSpec, seed: int = 0) -> list[Case]:
    """Every combination of sizes 1, 2 and odd, and each axis alone at its maximum.

    A maximum that memory does not hold is halved until it does. These are sizes that an export never
    traces, so that a frozen axis shows.
    """
    sizing = Sizing(spec)
    small = [
        sorted({sizing.within(d.name, 1), sizing.within(d.name, 2), sizing.odd(d.name)}) for d in spec.dims
    ]
    names = [dim.name for dim in spec.dims]
    lattice = [dict(zip(names, sizes, strict=True)) for sizes in itertools.product(*small)]
    base = {name: sizing.within(name, 2) for name in names}
    lattice += [{**base, dim.name: dim.max} for dim in spec.dims]
    unique = {tuple(sizes.items()): sizes for sizes in map(sizing.fitted, lattice)}
    return [drawn(spec, describe(sizes), sizes, seed) for sizes in unique.values()]


def sized_case(spec: AttentionSpec, sizes: Sizes) -> Case:
    """Random inputs at these sizes, nothing masked."""
    return drawn(spec, describe(sizes), sizes)
