"""The session contract: one way to run an artifact, whatever runtime is under it."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from mha_deploy.errors import FrozenAxisError, SessionError
from mha_deploy.precision import Precision
from mha_deploy.signature import Array, Feeds, Signature, Sizes


class Session(ABC):
    """Runs one artifact.

    - `run` returns when the outputs are on the host; the arrays belong to the caller, and a later
      run does not touch them.
    - Names, dtypes, shapes and ranges are checked before the runtime is touched.
    - The thread that runs first owns the session; another thread gets a SessionError.
    - `run` after `close` raises SessionError; closing twice is allowed; `with` closes.
    - `for_another_thread` is a session of its own, with an owner and a `close` of its own.

    `provider` names what executes (an execution provider, a device), as reports show it.
    """

    def __init__(self, name: str, signature: Signature, precision: Precision, provider: str) -> None:
        self.name, self.signature, self.precision, self.provider = name, signature, precision, provider
        self._owner = 0
        self._closed = False

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """Outputs by name for `feeds` by name.

        Raises:
            FeedError: an input is missing, unknown, of another dtype or shape, or out of range.
            SessionError: after close, or from a second thread.
            FrozenAxisError: the artifact answered with another shape than its signature says.
        """
        self._check_open()
        caller = threading.get_ident()
        self._owner = self._owner or caller
        if self._owner != caller:
            raise SessionError(f"session {self.name!r} belongs to another thread; open one per thread")
        sizes = self.signature.check(feeds)
        outputs = self._execute(feeds)
        self._check_outputs(outputs, sizes)
        return outputs

    def _check_open(self) -> None:
        if self._closed:
            raise SessionError(f"session {self.name!r} is closed; open a new one")

    def _check_outputs(self, outputs: dict[str, Array], sizes: Sizes) -> None:
        for tensor in self.signature.outputs:
            expected = self.signature.shape(tensor, sizes)
            found = outputs[tensor.name].shape
            if found != expected:
                raise FrozenAxisError(
                    f"session {self.name!r} answered {tensor.name!r} with shape {list(found)}; "
                    f"expected {list(expected)}: an axis of this artifact is not dynamic"
                )

    @abstractmethod
    def _execute(self, feeds: Feeds) -> dict[str, Array]:
        """Run checked feeds; the arrays returned are new ones."""

    def for_another_thread(self) -> Self | None:
        """One more session over the weights that this one has loaded, where the runtime runs them in several
        threads at once; None where it does not, and a session has to be opened for each.

        Raises:
            SessionError: after close.
        """
        return None

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._release()

    def _release(self) -> None:
        """Give back what the runtime holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
