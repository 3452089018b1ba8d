"""A worker: one thread, one session, batch after batch."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence

from mha_deploy.errors import FrozenAxisError
from mha_deploy.ragged import Request
from mha_deploy.runner.admission import Progress
from mha_deploy.runner.backlog import Batch
from mha_deploy.runner.desk import Desk
from mha_deploy.runner.layout import Layout
from mha_deploy.sessions import Session


class Worker(threading.Thread):
    """Runs what the desk hands out; no error of a session or of a caller's future ends it.

    `first` is run before anything else, if it holds a request, and not counted: a session's first run
    allocates what later ones use. `warm` is set when that is over, however it ended. A `solo` one takes
    only requests that have all cores to themselves.
    """

    def __init__(
        self,
        session: Session,
        desk: Desk,
        layout: Layout,
        number: int,
        first: Sequence[Request] = (),
        *,
        solo: bool = False,
    ) -> None:
        # A session that hangs must not keep the process from ending.
        super().__init__(name=f"mha-worker-{number}", daemon=True)
        self._session, self._desk, self._layout = session, desk, layout
        self._first, self.warm = tuple(first), threading.Event()
        self._take = desk.take_alone if solo else desk.take
        self._progress = desk.solo if solo else Progress()
        if not solo:
            desk.progress.append(self._progress)

    def run(self) -> None:
        with self._session:
            self._warm_up()
            while batch := self._take(self._progress):
                self._run(batch)

    def _warm_up(self) -> None:
        for request in self._first:
            with contextlib.suppress(Exception):  # whoever asks first will hear of it
                self._session.run(self._layout.feeds([request], self._layout.shape(request)))
        self._first = ()
        self.warm.set()

    def _run(self, batch: Batch) -> None:
        try:
            feeds = self._layout.feeds(batch.requests, batch.shape)
            made = time.monotonic()
            y = self._session.run(feeds)["y"]
            computed = time.monotonic()
            answers = self._layout.answers(y, batch.requests)
        except FrozenAxisError as error:
            # The answer's rows are not the requests': nobody can say which of them are right.
            self._desk.failed(self._progress, batch.tickets, error)
        except BaseException as error:
            if len(batch.tickets) == 1:
                self._desk.failed(self._progress, batch.tickets, error)
            else:
                self._run_alone(batch)
        else:
            self._desk.answered(self._progress, batch, answers, (made, computed))

    def _run_alone(self, batch: Batch) -> None:
        """Member by member, so that only the culprit fails."""
        for ticket in batch.tickets:
            again = self._desk.take_again(self._progress, ticket)
            if again:
                self._run(again)
        self._desk.rest(self._progress)
