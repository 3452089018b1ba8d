"""Named inputs to verify with, made from a signature and a seed.

Random inputs are standard normal, as activations after a normalisation are; ones or zeros would
leave the softmax uniform, and a wrong scale, mask or projection unseen.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from mha_deploy.ragged import Request, pad
from mha_deploy.signature import Array, Sizes
from mha_deploy.spec import AttentionSpec

# Attention scores that a case may hold at once, in elements (1 GiB in fp32).
SCORES_LIMIT = 2**28
GARBAGE = (np.nan, np.inf, -np.inf, 1e30)


@dataclass(frozen=True, slots=True)
class Case:
    """One set of inputs.

    `feeds` go to the artifact, `clean` to the reference; they differ where the point is that what
    stands in padding has no effect. `compared` [batch, query] marks the rows that count: padded
    query rows do not. `others` are further inputs of the kind, judged with the first as one: where a
    case has few elements, ten runs over one input say little of what PyTorch scatters.
    """

    name: str
    sizes: Sizes
    feeds: dict[str, Array]
    compared: Array
    clean: dict[str, Array] = field(default_factory=dict)
    others: tuple[dict[str, Array], ...] = ()

    @property
    def reference_feeds(self) -> dict[str, Array]:
        return self.clean or self.feeds


def standard_cases(spec: AttentionSpec, requests: Sequence[Request] = (), seed: int = 0) -> list[Case]:
    """The cases of `verify`: sizes, masks, garbage, magnitudes, and real inputs where there are some."""
    maker = _Maker(spec, seed)
    opt = {dim.name: dim.opt for dim in spec.dims}
    small = maker.small()
    cases = [maker.drawn("min", {dim.name: dim.min for dim in spec.dims}), maker.case("opt", opt)]
    cases += [maker.case(name, sizes) for name, sizes in maker.largest()]
    cases.append(maker.case("odd", {dim.name: maker.odd(dim.name) for dim in spec.dims}))
    if spec.mask != "none":
        cases.append(maker.ragged("ragged-padding", small))
        cases.append(maker.ragged("ragged-long", maker.long()))
        cases.append(maker.fully_masked("fully-masked-row", small))
        cases.append(maker.garbage("padding-garbage", small))
    cases.append(maker.scaled("large-values", small, 1000.0))
    cases.append(maker.scaled("sharp-softmax", small, 4.0))
    if requests:
        cases.append(maker.real("real-inputs", requests))
    return cases


def lattice_cases(spec: AttentionSpec, seed: int = 0) -> list[Case]:
    """Every combination of sizes 1, 2 and odd, and each axis alone at its maximum.

    A maximum that memory does not hold is halved until it does. These are sizes that an export never
    traces, so that a frozen axis shows.
    """
    maker = _Maker(spec, seed)
    small = [sorted({maker.within(d.name, 1), maker.within(d.name, 2), maker.odd(d.name)}) for d in spec.dims]
    names = [dim.name for dim in spec.dims]
    lattice = [dict(zip(names, sizes, strict=True)) for sizes in itertools.product(*small)]
    base = {name: maker.within(name, 2) for name in names}
    lattice += [{**base, dim.name: dim.max} for dim in spec.dims]
    unique = {tuple(sizes.items()): sizes for sizes in map(maker.fitted, lattice)}
    return [maker.case(describe(sizes), sizes) for sizes in unique.values()]


def sized_case(spec: AttentionSpec, sizes: Sizes) -> Case:
    """Random inputs at these sizes, nothing masked."""
    return _Maker(spec, 0).case(describe(sizes), sizes)


def describe(sizes: Sizes) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


class _Maker:
    """Builds cases of one spec from one random stream."""

    def __init__(self, spec: AttentionSpec, seed: int) -> None:
        self.spec, self.random = spec, np.random.default_rng(seed)
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

    def long(self) -> dict[str, int]:
        """Two rows at the greatest lengths, where kernels that work in tiles have many."""
        most = {self.q: self.spec.signature.dim(self.q).max, self.kv: self.spec.signature.dim(self.kv).max}
        return self.fitted({self.batch: self.within(self.batch, 2), **most})

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

    def largest(self) -> Iterator[tuple[str, dict[str, int]]]:
        """All axes at their maximum at once or, where that is too much for memory, in two cases."""
        everything = {dim.name: dim.max for dim in self.spec.dims}
        if self.fits(everything):
            yield "max", everything
            return
        wide = {name: self.within(name, 16) for name in everything} | {self.batch: self.spec.dims[0].max}
        yield "max-length", self.fitted({**everything, self.batch: self.spec.dims[0].min})
        yield "max-batch", self.fitted(wide)

    def case(self, name: str, sizes: Sizes) -> Case:
        feeds: dict[str, Array] = {}
        for tensor in self.spec.signature.inputs:
            shape = self.spec.signature.shape(tensor, sizes)
            normal = self.random.standard_normal(shape, dtype=np.float32)
            feeds[tensor.name] = normal if tensor.is_float else np.ones(shape, bool)
        return Case(name, sizes, feeds, np.ones((sizes[self.batch], sizes[self.q]), bool))

    def drawn(self, name: str, sizes: Sizes) -> Case:
        """`case`, over as many inputs as it takes to have some thousand elements."""
        elements = sizes[self.batch] * sizes[self.q] * self.spec.d_model
        draws = [self.case(name, sizes).feeds for _ in range(max(1, min(16, 8192 // elements)))]
        return Case(name, sizes, draws[0], self.case(name, sizes).compared, others=tuple(draws[1:]))

    def ragged(self, name: str, sizes: Sizes) -> Case:
        """Rows padded on the right, on the left and with holes, beside one that is full."""
        length, rows = sizes[self.kv], sizes[self.batch]
        position = np.arange(length)
        shorter = max(1, length // 3)
        styles = (position < shorter, position >= length - shorter, position % 2 == 0, position < length)
        keep = np.stack([styles[row % len(styles)] for row in range(rows)])
        return self._masked(self.case(name, sizes), keep)

    def fully_masked(self, name: str, sizes: Sizes) -> Case:
        """The first sample has nothing to look at; its rows are compared too."""
        case = self.ragged(name, sizes)
        mask = case.feeds[self._mask_name].copy()
        mask[0] = False
        compared = case.compared.copy()
        compared[0] = True
        return Case(name, sizes, {**case.feeds, self._mask_name: mask}, compared)

    def garbage(self, name: str, sizes: Sizes) -> Case:
        """NaN, inf and huge numbers where nobody may look; the reference sees zeros there."""
        case = self.ragged(name, sizes)
        mask = case.feeds[self._mask_name]
        unseen = np.logical_not(mask if self.spec.mask == "padding" else mask.any(axis=1))
        dirty, clean = dict(case.feeds), dict(case.feeds)
        for tensor in self.spec.signature.inputs:
            if tensor.is_float and tensor.shape[1] == self.kv:
                positions = unseen[:, :, None]
                junk = self.random.choice(np.array(GARBAGE, np.float32), case.feeds[tensor.name].shape)
                dirty[tensor.name] = np.where(positions, junk, case.feeds[tensor.name])
                clean[tensor.name] = np.where(positions, np.float32(0), case.feeds[tensor.name])
        return Case(name, sizes, dirty, case.compared, clean)

    def scaled(self, name: str, sizes: Sizes, factor: float) -> Case:
        case = self.case(name, sizes)
        feeds = {n: a * np.float32(factor) if a.dtype != bool else a for n, a in case.feeds.items()}
        return Case(name, sizes, feeds, case.compared)

    def real(self, name: str, requests: Sequence[Request]) -> Case:
        """As many of the requests as one batch takes, padded together."""
        chosen = list(requests)[: self.spec.dims[0].max]
        sizes = {
            self.batch: self.within(self.batch, len(chosen)),
            self.q: self.within(self.q, max(request.q_len for request in chosen)),
            self.kv: self.within(self.kv, max(request.kv_len for request in chosen)),
        }
        feeds = pad(self.spec, chosen, sizes)
        lengths = np.array([r.q_len for r in chosen] + [0] * (sizes[self.batch] - len(chosen)))
        return Case(name, sizes, feeds, np.arange(sizes[self.q])[None, :] < lengths[:, None])

    def _square(self, case: Case) -> tuple[int, int, int]:
        return (case.sizes[self.batch], case.sizes[self.q], case.sizes[self.kv])

    @property
    def _mask_name(self) -> str:
        return "mask" if self.spec.mask == "padding" else "attn_mask"

    def _masked(self, case: Case, keep: Array) -> Case:
        """`case` with keys kept as `keep` [batch, key]; in self attention the same positions are queries."""
        rows = keep if self.spec.kind == "self" else case.compared
        mask = keep
        if self.spec.mask == "full":
            # Every query its own keys, and now and then none: a mask transposed, reduced over queries
            # or taken from one query would not show in a mask that is the same for all of them.
            mask = rows[:, :, None] & keep[:, None, :] & (self.random.random(self._square(case)) < 0.8)
            mask[:, 2::7] = False
        return Case(case.name, case.sizes, {**case.feeds, self._mask_name: mask}, rows)
