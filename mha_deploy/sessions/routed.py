"""One session over two, by length."""

from __future__ import annotations

from mha_deploy.sessions.base import Session
from mha_deploy.sessions.stages import StagedSession, Stages
from mha_deploy.signature import Array, Feeds, Signature, Sizes


def length_of(signature: Signature, sizes: Sizes) -> int:
    """The query length of a run: the second axis of the first input."""
    return sizes[str(signature.inputs[0].shape[1])]


class RoutedSession(Session):
    """Runs feeds of a query length up to `up_to_length` on `short`, longer ones on `long`.

    Length alone decides, so that how many requests share a batch never changes who answers. Its
    precision is the coarser of the two. Closing it closes both. Where both are on a device it is a
    `StagedSession` as they are.
    """

    def __init__(self, short: Session, long: Session, *, up_to_length: int, name: str = "routed") -> None:
        coarser = max(short, long, key=lambda session: (session.precision.is_integer, session.precision.eps))
        provider = f"{short.provider} up to length {up_to_length}, {long.provider} beyond"
        super().__init__(name, short.signature, coarser.precision, provider)
        self.routes, self._up_to_length = (short, long), up_to_length
        if isinstance(short, StagedSession) and isinstance(long, StagedSession):
            self.run_in_stages = self._run_in_stages

    def _execute(self, feeds: Feeds) -> dict[str, Array]:
        return self._route(feeds).run(feeds)

    def _run_in_stages(self, feeds: Feeds, *, cold: bool) -> Stages:
        self.signature.check(feeds)
        route = self._route(feeds)
        assert isinstance(route, StagedSession)
        return route.run_in_stages(feeds, cold=cold)

    def _route(self, feeds: Feeds) -> Session:
        length = feeds[self.signature.inputs[0].name].shape[1]  # as `length_of`, for feeds that were checked
        return self.routes[length > self._up_to_length]

    def for_another_thread(self) -> RoutedSession | None:
        short, long = (each.for_another_thread() for each in self.routes)
        if short is None or long is None:
            for alone in (short, long):
                if alone:
                    alone.close()
            return None
        return RoutedSession(short, long, up_to_length=self._up_to_length, name=self.name)

    def _release(self) -> None:
        for each in self.routes:
            each.close()
