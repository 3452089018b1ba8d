"""The cases of `verify`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from mha_deploy.cases.case import Case
from mha_deploy.cases.draw import drawn, drawn_often, generator, scaled
from mha_deploy.cases.magnitudes import flat_softmax, near_ties, outlier_channels
from mha_deploy.cases.masks import HOLES, LEFT, RIGHT, fully_masked, garbage, ragged
from mha_deploy.cases.real import real_cases
from mha_deploy.cases.sizes import Sizing
from mha_deploy.ragged import Request
from mha_deploy.signature import Sizes
from mha_deploy.spec import AttentionSpec

# Samples of the largest batch that differ; the rest repeat them.
DISTINCT = 2
# How the four cases by chance are masked: a mask that is wrong beyond some length shows in one of them.
BETWEEN = ((HOLES,), (LEFT,), (RIGHT,), (HOLES, LEFT, RIGHT, ""))
# Enough to tell that a graph is the block, at no great cost; `verify` runs all.
QUICK = (
    "ragged-padding",
    "fully-masked-row",
    "padding-garbage",
    "min",
    "odd",
    "sharp-softmax",
    "large-values",
    "real-inputs",
    "ragged-long",
    "opt",
)
Make = Callable[[], Case]


def standard_cases(
    spec: AttentionSpec, requests: Sequence[Request] = (), seed: int = 0, *, names: Sequence[str] = ()
) -> list[Case]:
    """The cases of `verify`, or those named, in order of what they cost: sizes, masks, garbage,
    magnitudes, and real inputs where there are some. A case's inputs depend on `seed` and its name."""
    return [make() for name, make in _recipes(spec, requests, seed).items() if name in (names or (name,))]


def case_names(spec: AttentionSpec, requests: Sequence[Request] = ()) -> list[str]:
    return list(_recipes(spec, requests, 0))


def small_case(spec: AttentionSpec, name: str, seed: int) -> Case:
    return drawn(spec, name, Sizing(spec).small(), seed)


def _recipes(spec: AttentionSpec, requests: Sequence[Request], seed: int) -> dict[str, Make]:
    sizing = Sizing(spec)
    recipes: dict[str, Make] = {}

    def add(name: str, make: Callable[[Case], Case], sizes: Sizes) -> None:
        recipes[name] = lambda: make(drawn(spec, name, sizes, seed))

    small, least = sizing.small(), {dim.name: dim.min for dim in spec.dims}
    if spec.mask != "none":
        add("ragged-padding", lambda case: ragged(spec, case, seed), small)
        for side in (RIGHT, LEFT, HOLES):
            add(f"padding-{side}", partial(ragged, spec, seed=seed, sides=(side,)), small)
        add("fully-masked-row", lambda case: fully_masked(spec, ragged(spec, case, seed)), small)
        add("padding-garbage", lambda case: garbage(spec, ragged(spec, case, seed), seed), small)
    recipes["min"] = lambda: drawn_often(spec, "min", least, seed)
    twos = {name: sizing.within(name, 2) for name in least}
    recipes["two"] = lambda: drawn_often(spec, "two", twos, seed)
    add("odd", _as_it_is, {dim.name: sizing.odd(dim.name) for dim in spec.dims})
    add("sharp-softmax", lambda case: scaled(case, 4.0), small)
    add("near-ties", lambda case: near_ties(case, seed), small)
    add("outlier-channels", lambda case: outlier_channels(case, seed), small)
    add("small-values", lambda case: scaled(case, 0.01), small)
    add("large-values", lambda case: scaled(case, 1000.0), small)
    for number, sizes in enumerate(sizing.between(generator(seed, "between"))):
        masks = _as_it_is if spec.mask == "none" else partial(ragged, spec, seed=seed, sides=BETWEEN[number])
        add(f"between-{number + 1}", masks, sizing.fitted(sizes))
    if spec.mask != "none":
        add("ragged-batch", lambda case: ragged(spec, case, seed), sizing.wide())
    for dim in spec.dims:
        add(f"{dim.name}-max", _as_it_is, sizing.fitted({**twos, dim.name: dim.max}))
    for case in real_cases(spec, requests):
        recipes[case.name] = partial(_as_it_is, case)
    add("flat-softmax", lambda case: flat_softmax(case, seed), sizing.long(2))
    if spec.mask != "none":
        add("ragged-long", lambda case: ragged(spec, case, seed), sizing.long(3))
    add("opt", _as_it_is, {dim.name: dim.opt for dim in spec.dims})
    for name, sizes in sizing.largest():
        recipes[name] = partial(repeated, spec, name, sizes, seed)
    return recipes


def repeated(spec: AttentionSpec, name: str, sizes: Sizes, seed: int) -> Case:
    """A batch of few samples, each many times over in an order that has no period."""
    batch = spec.dims[0].name
    few = drawn(spec, name, {**sizes, batch: min(DISTINCT, sizes[batch])}, seed)
    samples = min(DISTINCT, sizes[batch])
    order = generator(seed, f"{name} order").integers(samples, size=sizes[batch])
    order[:samples] = range(samples)
    feeds = {key: array[order] for key, array in few.feeds.items()}
    copies = tuple(int(sample) for sample in order)
    return replace(
        few, sizes=sizes, feeds=feeds, compared=few.compared[order], clean=few.feeds, copies=copies
    )


def _as_it_is(case: Case) -> Case:
    return case
