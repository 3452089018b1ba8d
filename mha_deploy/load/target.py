"""Where requests go: a server, or a runner in this process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from mha_deploy.load.inputs import VARIANTS, Inputs
from mha_deploy.load.records import Outcome
from mha_deploy.signature import Array

# What a target calls once for each request, in the loop's thread: its index, what became of it, when
# (`time.monotonic`), the answer as it came, and a word on what went wrong.
Done = Callable[[int, Outcome, float, object, str], None]


class Target(ABC):
    """Takes requests and never waits: `send` returns at once, and `done` is called later."""

    name: str
    inputs: Inputs

    @abstractmethod
    async def open(self, lengths: Array) -> None:
        """Make ready for requests of these lengths, so that `send` has little left to do.

        Raises:
            InputError: it cannot be reached, or is not what it was taken for.
        """

    @abstractmethod
    def send(self, index: int, length: int, done: Done) -> None:
        """Send one request of that length, variant `variant_of(index)`."""

    @abstractmethod
    def decode(self, answer: object) -> Array:
        """y, [length, d_model] (a batch axis of 1 may stand before it), from what `done` was given.

        Raises:
            InputError: it is not what an answer is.
        """

    @abstractmethod
    async def close(self) -> None:
        """Let go of everything; requests still on their way are dropped."""


def variant_of(index: int) -> int:
    return index % VARIANTS
