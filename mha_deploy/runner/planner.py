"""Which waiting requests run together: as the cost model predicts, for each batch anew."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from itertools import islice

from mha_deploy.runner.cost import REMEMBERED, CostModel, Size
from mha_deploy.runner.heap import LazyHeap
from mha_deploy.runner.layout import Layout, positions
from mha_deploy.runner.options import RunnerOptions
from mha_deploy.runner.ticket import Shape, Ticket
from mha_deploy.spec import AttentionSpec

# Shapes that are looked at, nearest first, for requests to pad: beyond these padding never pays. (Where
# nothing is padded every shape may, and as many are looked at as a batch has rows.)
_NEIGHBOURS = 8
# Mixing lengths has to save more than this share of the time: predictions are no better than that.
_WORTH = 0.05


class Planner:
    """Chooses a batch around the request whose turn it is."""

    def __init__(
        self,
        spec: AttentionSpec,
        model: CostModel,
        options: RunnerOptions,
        layout: Layout,
        *,
        alone: bool,
    ) -> None:
        self._spec, self._model, self._rows = spec, model, spec.dims[0]
        self._least_rows, self._alone = layout.least_rows, alone
        self._cheapest: dict[Shape, int] = {}
        self._mixes = options.mode == "fast" and layout.mixes
        self._neighbours = self._rows.max if layout.packs else _NEIGHBOURS

    def work_us(self, rows: int, shape: Shape, tokens: int = 0) -> float:
        """Predicted microseconds of so many rows at these lengths; `tokens` of them real, 0: all."""
        fill = self.fill(rows, shape, tokens) if tokens else 1.0
        return self._model.predict_us(self.size(rows, shape), fill)

    def size(self, rows: int, shape: Shape) -> Size:
        """What runs for so many rows: a graph may take no fewer than some number of them."""
        return (max(rows, self._least_rows), *shape)

    def fill(self, rows: int, shape: Shape, tokens: int) -> float:
        """The share of a batch's positions that are its requests' tokens."""
        return min(1.0, tokens / (self.size(rows, shape)[0] * positions(self._spec, shape)))

    def share_us(self, shape: Shape) -> float:
        """What one request of this shape costs where it is run in the best batch there is for it."""
        rows = self._cheapest.get(shape)
        if rows is None:
            sizes = [2**power for power in range(self._rows.max.bit_length())]
            rows = min(sizes, key=lambda size: self.work_us(size, shape) / size)
            if len(self._cheapest) >= REMEMBERED:
                self._cheapest.clear()
            self._cheapest[shape] = rows
        return self.work_us(rows, shape) / rows

    def batch(
        self, head: Ticket, shapes: Mapping[Shape, LazyHeap], waiting: int, now: float
    ) -> tuple[tuple[Ticket, ...], Shape]:
        """`head` and those that join it, and the lengths that they run at."""
        if waiting == 1 or self._alone:
            return (head,), head.shape
        same = shapes[head.shape]
        rows = self._best_rows(min(len(same), self._rows.max), head.shape, waiting)
        members = [head]
        if rows > 1:
            members += islice((each for each in same.ordered() if each is not head), rows - 1)
        if self._mixes:
            members = self._mixed(members, shapes)
        members = self._in_time(members, now)
        return tuple(members), _longest(members)

    def _best_rows(self, available: int, shape: Shape, waiting: int) -> int:
        """The rows a batch at which those that wait are done the soonest, on average.

        The requests of this shape run in batches of b: together they take T = ceil(k / b) x cost(b). Each
        of them is done after half of that and half a batch more, everybody else waits for all of it.
        """
        if available == 1:
            return 1

        def total_wait(rows: int) -> float:
            cost, batches = self.work_us(rows, shape), -(-available // rows)
            return available * cost * (batches + 1) / 2 + (waiting - available) * cost * batches

        sizes = {available} | {2**power for power in range(available.bit_length())}
        return min(sorted(sizes), key=total_wait)

    def _mixed(self, members: list[Ticket], shapes: Mapping[Shape, LazyHeap]) -> list[Ticket]:
        """More members, of other lengths, while one run with them costs less than running apart."""
        shape, tokens = members[0].shape, sum(member.tokens for member in members)
        distance = {other: sum(abs(a - b) for a, b in zip(other, shape, strict=True)) for other in shapes}
        for other in heapq.nsmallest(
            self._neighbours, (s for s in shapes if s != shape), key=distance.__getitem__
        ):
            for ticket in shapes[other].ordered():
                longest = (max(shape[0], other[0]), max(shape[1], other[1]))
                rows, more = len(members), tokens + ticket.tokens
                apart = self.work_us(rows, shape, tokens) + self.work_us(1, other)
                if rows == self._rows.max or self.work_us(rows + 1, longest, more) >= apart * (1 - _WORTH):
                    break
                members, shape, tokens = [*members, ticket], longest, more
        return members

    def _in_time(self, members: list[Ticket], now: float) -> list[Ticket]:
        """As many members as let the first one's, and every member's own, deadline be met."""
        while len(members) > 1:
            tokens = sum(member.tokens for member in members)
            finish = now + self.work_us(len(members), _longest(members), tokens) / 1e6
            if finish <= min(member.deadline for member in members):
                break
            members = members[: len(members) // 2]
        return members


def _longest(members: Sequence[Ticket]) -> Shape:
    return max(member.shape[0] for member in members), max(member.shape[1] for member in members)
