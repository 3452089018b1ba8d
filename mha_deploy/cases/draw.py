"""Random inputs of one case.

They are standard normal, as activations after a normalisation are; ones or zeros would leave the
softmax uniform, and a wrong scale, mask or projection unseen.
"""

from __future__ import annotations

import zlib

import numpy as np

from mha_deploy.cases.case import Case
from mha_deploy.signature import Array, Sizes
from mha_deploy.spec import AttentionSpec


def generator(seed: int, name: str) -> np.random.Generator:
    """The random stream of the case `name`: the same whichever other cases are made."""
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def drawn(spec: AttentionSpec, name: str, sizes: Sizes, seed: int = 0) -> Case:
    """Standard normal inputs at these sizes, nothing masked."""
    batch, queries = sizes[spec.dims[0].name], sizes[spec.query_axis]
    feeds = _feeds(spec, sizes, generator(seed, name))
    return Case(name, sizes, feeds, np.ones((batch, queries), bool))


def drawn_often(spec: AttentionSpec, name: str, sizes: Sizes, seed: int = 0) -> Case:
    """`drawn`, over as many inputs as it takes to have some thousand elements, 16 at most."""
    batch, queries = sizes[spec.dims[0].name], sizes[spec.query_axis]
    random = generator(seed, name)
    times = max(1, min(16, 8192 // (batch * queries * spec.d_model)))
    first, *others = (_feeds(spec, sizes, random) for _ in range(times))
    return Case(name, sizes, first, np.ones((batch, queries), bool), others=tuple(others))


def scaled(case: Case, factor: float) -> Case:
    """`case` with every input multiplied."""
    feeds = {n: a * np.float32(factor) if a.dtype != bool else a for n, a in case.feeds.items()}
    return Case(case.name, case.sizes, feeds, case.compared)


def _feeds(spec: AttentionSpec, sizes: Sizes, random: np.random.Generator) -> dict[str, Array]:
    feeds: dict[str, Array] = {}
    for tensor in spec.signature.inputs:
        shape = spec.signature.shape(tensor, sizes)
        feeds[tensor.name] = (
            random.standard_normal(shape, dtype=np.float32) if tensor.is_float else np.ones(shape, bool)
        )
    return feeds
