"""One session over two, by length."""

from __future__ import annotations

from mha_deploy.sessions.base import Session
from mha_deploy.signature import Array, Feeds, Signature, Sizes


def length_of(signature: Signature, sizes: Sizes) -> int:
    """The query length of a run: the second axis of the first input."""
    return sizes[str(signature.inputs[0].shape[1])]


class RoutedSession(Session):
    """Runs feeds of a query length up to `up_to_length` on `short`, longer ones on `long`.

    Length alone decides, so that how many requests share a batch never changes who answers. Its
    precision is the coarser of the two. Closing it closes both.
    """

    def __init__(self, short: Session, long: Session, *, up_to_length: int, name: str = "routed") -> None:
        coarser = max(short, long, key=lambda session: (session.precision.is_integer, session.precision.eps))
        provider = f"{short.provider} up to length {up_to_length}, {long.provider} beyond"
        super().__init__(name, short.signature, coarser.precision, provider)
        self._short, self._long, self._up_to_length = short, long, up_to_length

    def _execute(self, feeds: Feeds) -> dict[str, Array]:
        length = feeds[self.signature.inputs[0].name].shape[1]  # as `length_of`, for feeds that were checked
        return (self._short if length <= self._up_to_length else self._long).run(feeds)

    def for_another_thread(self) -> RoutedSession | None:
        short, long = self._short.for_another_thread(), self._long.for_another_thread()
        if short is None or long is None:
            for alone in (short, long):
                if alone:
                    alone.close()
            return None
        return RoutedSession(short, long, up_to_length=self._up_to_length, name=self.name)

    def _release(self) -> None:
        self._short.close()
        self._long.close()
