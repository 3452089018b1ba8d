"""Sizes that fit a spec's dims and this machine's memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from mha_deploy.signature import Dim, Sizes
from mha_deploy.spec import AttentionSpec

# Attention scores that a case may hold at once, in elements (1 GiB in fp32).
SCORES_LIMIT = 2**28


QUARTERS = 4
TOKENS_BETWEEN = 512


class Sizing:
    """Picks sizes by dim name, none outside the range that the spec declares."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self.batch, self.q, self.kv = spec.dims[0].name, spec.query_axis, spec.key_axis

    def within(self, name: str, size: int) -> int:
        dim = self.spec.signature.dim(name)
        return min(max(size, dim.min), dim.max)

    def odd(self, name: str) -> int:
        """An odd size near the middle of the range, another one for every dim."""
        dim = self.spec.signature.dim(name)
        index = [d.name for d in self.spec.dims].index(name)
        return self.within(name, min(3 + 2 * index + 10 * (index > 0), dim.max) | 1)

    def small(self) -> dict[str, int]:
        wanted = {self.batch: 4, self.q: 33, self.kv: 33 if self.q == self.kv else 41}
        return {name: self.within(name, size) for name, size in wanted.items()}

    def long(self, rows: int) -> dict[str, int]:
        """Few rows at the greatest lengths, where kernels that work in tiles have many."""
        most = {self.q: self.spec.signature.dim(self.q).max, self.kv: self.spec.signature.dim(self.kv).max}
        return self.fitted({self.batch: self.within(self.batch, rows), **most})

    def wide(self) -> dict[str, int]:
        """The largest batch, at lengths that have room for padding on every side."""
        wanted = {self.q: self.within(self.q, 17), self.kv: self.within(self.kv, 17)}
        return self.fitted({self.batch: self.spec.dims[0].max, **wanted})

    def fits(self, sizes: Sizes) -> bool:
        batch, q, kv = (sizes[name] for name in (self.batch, self.q, self.kv))
        data = batch * max(q, kv) * max(self.spec.d_model, self.spec.kdim, self.spec.vdim)
        return max(data, batch * q * kv * self.spec.num_heads) <= SCORES_LIMIT

    def fitted(self, sizes: Sizes) -> dict[str, int]:
        """`sizes`, the largest of them halved until they fit into memory, none below its minimum."""
        fitted = dict(sizes)
        while not self.fits(fitted):
            shrinkable = [n for n in fitted if fitted[n] > self.spec.signature.dim(n).min]
            if not shrinkable:
                break
            largest = max(shrinkable, key=lambda name: fitted[name])
            fitted[largest] = self.within(largest, fitted[largest] // 2)
        return fitted

    def between(self, random: np.random.Generator) -> list[dict[str, int]]:
        """Sizes by chance, one from each quarter of every dim's range, in batches of few tokens.

        Every other size of the suite is known beforehand; a graph that is wrong over a range of lengths
        only would answer all of those rightly.
        """
        quarters = {dim.name: random.permutation(_quarters(dim, random)) for dim in self.spec.dims}
        chosen = [{name: int(sizes[i]) for name, sizes in quarters.items()} for i in range(QUARTERS)]
        for sizes in chosen:
            rows = max(1, TOKENS_BETWEEN // max(sizes[self.q], sizes[self.kv]))
            sizes[self.batch] = self.within(self.batch, min(sizes[self.batch], rows))
        return chosen

    def largest(self) -> Iterator[tuple[str, dict[str, int]]]:
        """All axes at their maximum at once or, where that is too much for memory, in two cases."""
        everything = {dim.name: dim.max for dim in self.spec.dims}
        if self.fits(everything):
            yield "max", everything
            return
        wide = {name: self.within(name, 16) for name in everything} | {self.batch: self.spec.dims[0].max}
        yield "max-length", self.fitted({**everything, self.batch: self.spec.dims[0].min})
        yield "max-batch", self.fitted(wide)


def _quarters(dim: Dim, random: np.random.Generator) -> list[int]:
    """One size out of each quarter of the dim's range."""
    edges = np.linspace(dim.min, dim.max + 1, QUARTERS + 1)
    return [int(random.uniform(low, high)) for low, high in itertools.pairwise(edges)]
