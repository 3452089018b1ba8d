"""A worker: one thread, one session, batch after batch."""

from __future__ import annotations

import threading
import time

from mha_deploy.errors import FrozenAxisError
from mha_deploy.runner.backlog import Batch
from mha_deploy.runner.desk import Desk, Progress
from mha_deploy.runner.layout import Layout
from mha_deploy.sessions import Session


class Worker(threading.Thread):
    """Runs what the desk hands out; no error of a session or of a caller's future ends it."""

    def __init__(self, session: Session, desk: Desk, layout: Layout, number: int) -> None:
        # A session that hangs must not keep the process from ending.
        super().__init__(name=f"mha-worker-{number}", daemon=True)
        self._session, self._desk, self._layout = session, desk, layout
        self._progress = Progress()
        desk.progress.append(self._progress)

    def run(self) -> None:
        with self._session:
            while batch := self._desk.take(self._progress):
                self._run(batch)

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
