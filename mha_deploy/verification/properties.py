"""What must hold of attention whatever the numbers are.

Each property is some runs of one artifact and what must come out 0 between them. How much it may be
off is what the artifact's precision scatters on the property's base inputs: each answer may be that
far from the truth, so two answers to one question may be that far apart.

    batch-mates       a sample's answer does not depend on the others in its batch
    alone             nor on whether there are any
    identical-rows    nor on its place in the batch
    batch-order       a batch permuted has its answers permuted
    more-padding      nor does it depend on how much padding was added
    padding-contents  nor on what stands in it
    key-order         keys permuted together with their values change nothing
    no-look-ahead     a causal answer does not depend on what comes later
    value-scale       values scaled scale their part of the answer
    value-shift       values shifted shift it, by the same in every row
    sizes-outside     sizes just outside the range are refused
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mha_deploy.cases import Case, Sizing
from mha_deploy.cases.draw import drawn, generator
from mha_deploy.cases.masks import mask_name, ragged, unseen
from mha_deploy.signature import Array, Feeds
from mha_deploy.spec import AttentionSpec

# A neighbour that would take the whole range of a scale shared by the batch.
LOUD = 100.0
FILLINGS = (0.0, 1e30, np.inf, np.nan)
ADDED_PADDING = 7


@dataclass(frozen=True, slots=True, eq=False)
class Property:
    """`deviation` of the answers to `feeds` must be 0; it holds compared rows [rows, d_model] only.

    `weight` is how many times the scatter of `base` may add up in it. `of_batch`: it is about what
    shares a batch. `refused` are inputs that must not be answered. `why_not` says why there is
    nothing to check.
    """

    name: str
    base: Case
    feeds: tuple[Feeds, ...] = ()
    deviation: Callable[[Sequence[Array]], Array] = lambda _: np.zeros((0, 1))
    weight: float = 1.0
    of_batch: bool = False
    refused: tuple[Feeds, ...] = ()
    why_not: str = ""


# They compare two answers to different values, where the others compare answers to the same.
LINEAR = ("value-scale", "value-shift")
NAMES = (
    "batch-mates",
    "alone",
    "identical-rows",
    "batch-order",
    "more-padding",
    "padding-contents",
    "key-order",
    "no-look-ahead",
    "value-scale",
    "value-shift",
    "sizes-outside",
)


def properties(spec: AttentionSpec, seed: int = 0) -> list[Property]:
    """Every property of the block, those with nothing to check included."""
    sizing = Sizing(spec)
    wanted = {sizing.batch: 4, sizing.q: 17, sizing.kv: 17 if sizing.q == sizing.kv else 21}
    base = drawn(spec, "properties", {name: sizing.within(name, size) for name, size in wanted.items()}, seed)
    if spec.mask != "none":
        base = ragged(spec, base, seed)
    return [
        *_of_the_batch(sizing, base, seed),
        *_of_padding(spec, sizing, base),
        _key_order(spec, base),
        _no_look_ahead(spec, base, seed),
        *_of_values(spec, base, seed),
        Property("sizes-outside", base, refused=tuple(_outside(spec))),
    ]


def _of_the_batch(sizing: Sizing, base: Case, seed: int) -> Iterator[Property]:
    batch, rows = base.sizes[sizing.batch], base.compared
    if batch < 2:
        for name in NAMES[:4]:
            yield Property(name, base, why_not=f"the batch holds {batch} sample at most")
        return
    random = generator(seed, "batch-mates")
    loud = {
        name: array
        if array.dtype == bool
        else np.concatenate([array[:1], np.float32(LOUD) * _normal(random, array[1:])])
        for name, array in base.feeds.items()
    }
    yield Property(
        "batch-mates",
        base,
        (base.feeds, loud),
        lambda y: np.asarray(y[1][0] - y[0][0])[rows[0]],
        of_batch=True,
    )
    alone = {name: array[:1] for name, array in base.feeds.items()}
    if sizing.within(sizing.batch, 1) == 1:
        yield Property(
            "alone",
            base,
            (base.feeds, alone),
            lambda y: np.asarray(y[1][0] - y[0][0])[rows[0]],
            of_batch=True,
        )
    else:
        yield Property("alone", base, why_not=f"the batch holds {sizing.within(sizing.batch, 1)} at least")
    same = {name: np.repeat(array[:1], batch, axis=0) for name, array in base.feeds.items()}
    yield Property(
        "identical-rows", base, (same,), lambda y: (y[0] - y[0][:1])[np.repeat(rows[:1], batch, axis=0)]
    )
    rolled = {name: np.roll(array, 1, axis=0) for name, array in base.feeds.items()}
    yield Property(
        "batch-order", base, (base.feeds, rolled), lambda y: (np.roll(y[1], -1, axis=0) - y[0])[rows]
    )


def _of_padding(spec: AttentionSpec, sizing: Sizing, base: Case) -> Iterator[Property]:
    if spec.mask == "none":
        for name in ("more-padding", "padding-contents"):
            yield Property(name, base, why_not="the block takes no mask, so it has no padding")
        return
    rows, queries, keys = base.compared, base.sizes[sizing.q], base.sizes[sizing.kv]
    longer = sizing.within(sizing.kv, keys + ADDED_PADDING)
    if longer == keys:
        yield Property("more-padding", base, why_not=f"{sizing.kv} holds {keys} at most")
    else:
        padded = {
            tensor.name: _padded(
                base.feeds[tensor.name],
                spec.signature.shape(tensor, {**base.sizes, sizing.kv: longer}),
            )
            for tensor in spec.signature.inputs
        }
        yield Property(
            "more-padding",
            base,
            (base.feeds, padded),
            lambda y: (y[1][:, :queries] - y[0])[rows],
            of_batch=True,
        )
    hidden = unseen(spec, base)[:, :, None]
    kept = rows
    if spec.kind == "self":  # what stands there is a query too, and a full mask may let that see other keys
        kept = rows & ~hidden[:, :, 0]
    if not hidden.any() or not kept.any():
        yield Property("padding-contents", base, why_not="no key position is hidden at these sizes")
        return
    names = [t.name for t in spec.signature.inputs if t.is_float and t.shape[1] == sizing.kv]
    filled = tuple(
        {**base.feeds, **{name: np.where(hidden, np.float32(junk), base.feeds[name]) for name in names}}
        for junk in FILLINGS
    )
    yield Property(
        "padding-contents", base, filled, lambda y: np.concatenate([(each - y[0])[kept] for each in y[1:]])
    )


def _key_order(spec: AttentionSpec, base: Case) -> Property:
    if spec.causal:
        return Property("key-order", base, why_not="in a causal block the order of keys means something")
    rows, key = base.compared, spec.key_axis
    order = np.roll(np.arange(base.sizes[key])[::-1], 1)
    permuted = {}
    for tensor in spec.signature.inputs:
        array = base.feeds[tensor.name]
        for axis, dim in enumerate(tensor.shape):
            if dim == key:
                array = np.take(array, order, axis=axis)
        permuted[tensor.name] = array
    answered = order if spec.query_axis == key else np.arange(rows.shape[1])
    return Property(
        "key-order",
        base,
        (base.feeds, permuted),
        lambda y: (y[1] - y[0][:, answered])[rows[:, answered]],
    )


def _no_look_ahead(spec: AttentionSpec, base: Case, seed: int) -> Property:
    if not spec.causal:
        return Property("no-look-ahead", base, why_not="the block is not causal")
    queries = min(base.compared.shape[1], base.sizes[spec.key_axis])
    seen = max(1, queries // 2)
    random = generator(seed, "no-look-ahead")
    changed = dict(base.feeds)
    for tensor in spec.signature.inputs:
        if tensor.is_float and tensor.shape[1] == spec.key_axis:
            array = base.feeds[tensor.name]
            changed[tensor.name] = np.concatenate([array[:, :seen], _normal(random, array[:, seen:])], axis=1)
    return Property(
        "no-look-ahead",
        base,
        (base.feeds, changed),
        lambda y: (y[1] - y[0])[:, :seen][base.compared[:, :seen]],
    )


def _of_values(spec: AttentionSpec, base: Case, seed: int) -> Iterator[Property]:
    """The answer is affine in the values at fixed weights: y(2 v) - 2 y(v) + y(0) and
    y(v + c) - y(v) - y(c) + y(0) are 0, whatever the biases are.

    In self attention the weights move with the inputs, except where a query sees one key only: its
    weight is 1.
    """
    why_not, name = "", "value"
    if spec.norm == "post":
        why_not = "a LayerNorm follows the output, which is not linear"
    elif spec.kind == "self":
        name = "x"
        if spec.norm == "pre":
            why_not = "a LayerNorm comes before the values, which is not linear"
        elif spec.mask == "none" and not spec.causal:
            why_not = "without a mask every query sees several keys, whose weights move with the values"
        else:
            base = _one_key_each(spec, base)
    if why_not:
        yield from (Property(each, base, why_not=why_not) for each in ("value-scale", "value-shift"))
        return
    values, rows = base.feeds[name], base.compared
    shift = np.broadcast_to(generator(seed, "value-shift").standard_normal(values.shape[-1]), values.shape)
    shift = shift.astype(np.float32)

    def feeds(array: Array) -> Feeds:
        return {**base.feeds, name: array.astype(np.float32)}

    nothing = feeds(np.zeros_like(values))
    yield Property(
        "value-scale",
        base,
        (nothing, base.feeds, feeds(2 * values)),
        lambda y: (y[2] - 2 * y[1] + y[0])[rows],
        weight=2.5,
    )
    yield Property(
        "value-shift",
        base,
        (nothing, base.feeds, feeds(shift), feeds(values + shift)),
        lambda y: (y[3] - y[2] - y[1] + y[0])[rows],
        weight=2.5,
    )


def _one_key_each(spec: AttentionSpec, base: Case) -> Case:
    """The base with those queries compared that see one key: the first, where the block is causal."""
    alone = np.zeros_like(base.compared)
    rows = np.arange(len(alone))
    alone[rows, 0 if spec.causal else rows % alone.shape[1]] = True
    feeds = dict(base.feeds)
    if spec.mask == "full":
        feeds[mask_name(spec)] = alone[:, :, None] & alone[:, None, :]
    elif spec.mask == "padding":
        feeds[mask_name(spec)] = np.ones_like(alone) if spec.causal else alone
    return replace(base, name="properties of values", feeds=feeds, compared=alone)


def _outside(spec: AttentionSpec) -> Iterator[Feeds]:
    """Inputs one beyond either end of each dim, the others at their least."""
    least = {dim.name: dim.min for dim in spec.dims}
    for dim in spec.dims:
        for size in (dim.min - 1, dim.max + 1):
            yield {
                tensor.name: np.zeros(
                    spec.signature.shape(tensor, {**least, dim.name: size}),
                    np.float32 if tensor.is_float else bool,
                )
                for tensor in spec.signature.inputs
            }


def _normal(random: np.random.Generator, like: Array) -> Array:
    return random.standard_normal(like.shape, dtype=np.float32)


def _padded(array: Array, shape: tuple[int, ...]) -> Array:
    """`array` with zeros, which a mask reads as ignored, after the end of each axis."""
    return np.pad(array, [(0, full - size) for size, full in zip(array.shape, shape, strict=True)])
