"""A session that runs a Python function: for tests of what stands on sessions, here and elsewhere."""

from __future__ import annotations

from collections.abc import Callable

from mha_deploy.precision import Precision
from mha_deploy.sessions.base import Session
from mha_deploy.signature import Array, Feeds, Signature


class FakeSession(Session):
    """Answers `function(feeds)`, under the same contract as every other session."""

    def __init__(
        self,
        signature: Signature,
        function: Callable[[Feeds], dict[str, Array]],
        name: str = "fake",
        precision: Precision = Precision.FP32,
    ) -> None:
        super().__init__(name, signature, precision, "fake")
        self._function = function

    def _execute(self, feeds: Feeds) -> dict[str, Array]:
        return {name: array.copy() for name, array in self._function(feeds).items()}
