"""A heap of tickets out of which members may fall at any time."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from mha_deploy.runner.ticket import Ticket


class LazyHeap:
    """A heap whose dead members are skipped, and swept out once they are the most of it."""

    def __init__(
        self, key: Callable[[Ticket], float | tuple[float, ...]], live: Callable[[Ticket], bool]
    ) -> None:
        self._key, self._live = key, live
        self._heap: list[tuple[float | tuple[float, ...], int, Ticket]] = []
        self.dead = 0

    def __len__(self) -> int:
        return len(self._heap) - self.dead

    def push(self, ticket: Ticket) -> None:
        heapq.heappush(self._heap, (self._key(ticket), ticket.sequence, ticket))

    def first(self) -> Ticket | None:
        while self._heap and not self._live(self._heap[0][2]):
            heapq.heappop(self._heap)
            self.dead -= 1
        return self._heap[0][2] if self._heap else None

    def buried(self) -> None:
        """One of the members is live no more."""
        self.dead += 1
        if self.dead > 32 and self.dead * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if self._live(entry[2])]
            heapq.heapify(self._heap)
            self.dead = 0

    def ordered(self) -> Iterator[Ticket]:
        """Live members in order, at a cost of O(log n) each that is asked for."""
        taken = []
        try:
            while self._heap:
                entry = heapq.heappop(self._heap)
                if not self._live(entry[2]):
                    self.dead -= 1
                    continue
                taken.append(entry)
                yield entry[2]
        finally:
            for entry in taken:
                heapq.heappush(self._heap, entry)
