"""Sessions as turns, and the sizes and inputs that they run on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from mha_deploy.benchmark.rounds import Turn
from mha_deploy.errors import FeedError
from mha_deploy.precision import numpy_dtype
from mha_deploy.sessions import Session
from mha_deploy.signature import Array, Feeds, Signature, Sizes
from mha_deploy.spec import AttentionSpec

Grid = Mapping[str, Sequence[int]]


def session_turn(name: str, session: Session, feeds: Sequence[Feeds], *, share: float = 1.0) -> Turn:
    """Runs of `session` over `feeds` in rotation."""
    runs = _Rotation(session, feeds)
    return Turn(name, runs.run, runs.shape, cycle=len(feeds), share=share)


class ReopenedSession:
    """A session that its turn opens anew before every round; `with` closes the last one.

    Raises:
        BundleError, MissingError, ...: whatever `open_session` does.
    """

    def __init__(self, open_session: Callable[[], Session], feeds: Callable[[Signature], Feeds]) -> None:
        self._open, self.session = open_session, open_session()
        self._runs = _Rotation(self.session, [feeds(self.session.signature)])

    def turn(self, name: str) -> Turn:
        return Turn(name, self._run, self._shape, renew=self._reopen)

    def _run(self) -> None:
        self._runs.run()

    def _shape(self) -> str:
        return self._runs.shape()

    def _reopen(self) -> None:
        self.session.close()
        self.session = self._open()
        self._runs = _Rotation(self.session, self._runs.feeds)

    def __enter__(self) -> ReopenedSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.session.close()


class _Rotation:
    def __init__(self, session: Session, feeds: Sequence[Feeds]) -> None:
        self._session, self.feeds, self._next = session, feeds, 0

    def run(self) -> None:
        feeds = self.feeds[self._next]
        self._next = (self._next + 1) % len(self.feeds)
        self._session.run(feeds)

    def shape(self) -> str:
        return ", ".join(f"{name} {list(array.shape)}" for name, array in self.feeds[self._next].items())


def random_feeds(signature: Signature, sizes: Sizes) -> dict[str, Array]:
    """Standard normal inputs, nothing masked: the cost of a padded graph does not depend on its mask."""
    random = np.random.default_rng(0)
    return {
        tensor.name: random.standard_normal(signature.shape(tensor, sizes), np.float32).astype(
            numpy_dtype(tensor.dtype)
        )
        if tensor.is_float
        else np.ones(signature.shape(tensor, sizes), bool)
        for tensor in signature.inputs
    }


def default_grid(spec: AttentionSpec) -> dict[str, list[int]]:
    """Batches of 1 and opt; lengths of 16, opt and max."""
    return {
        dim.name: sorted(
            {min(max(size, dim.min), dim.max) for size in ((16, dim.opt, dim.max) if place else (1, dim.opt))}
        )
        for place, dim in enumerate(spec.dims)
    }


def optimum(spec: AttentionSpec) -> dict[str, list[int]]:
    """The one size to tune for."""
    return {dim.name: [dim.opt] for dim in spec.dims}


def cells_of(spec: AttentionSpec, asked: Grid, default: Grid) -> list[dict[str, int]]:
    """Every combination of the sizes asked for, once, those of other dims taken from `default`.

    Raises:
        FeedError: an unknown dim, or a size out of range.
    """
    unknown = [name for name in asked if name not in default]
    if unknown:
        raise FeedError(f"grid names {', '.join(unknown)}; the dims are {', '.join(default)}")
    grid = {dim.name: list(dict.fromkeys(asked.get(dim.name, default[dim.name]))) for dim in spec.dims}
    for dim in spec.dims:
        for size in grid[dim.name]:
            if not dim.min <= size <= dim.max:
                raise FeedError(
                    f"grid has {dim.name} = {size}; this block takes {dim.name} {dim.min}..{dim.max}"
                )
    return [dict(zip(grid, sizes, strict=True)) for sizes in itertools.product(*grid.values())]
