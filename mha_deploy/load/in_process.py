"""A runner in this process: what a bundle does with no network before it."""

from __future__ import annotations

import asyncio
import math
import time
from concurrent.futures import CancelledError, Future
from typing import cast

from mha_deploy.errors import DeadlineError, InputError, MhaDeployError, QueueFullError
from mha_deploy.load.inputs import VARIANTS, Inputs, check_lengths
from mha_deploy.load.records import Outcome
from mha_deploy.load.target import Done, Target, variant_of
from mha_deploy.ragged import Request
from mha_deploy.runner import Answer, BatchRunner
from mha_deploy.serving.rows import served_signature
from mha_deploy.signature import Array


class RunnerTarget(Target):
    """Requests straight to `runner`, which stays the caller's. Inputs are in the artifact's own dtypes.

    Raises:
        InputError: it takes no lengths from `shortest`, if given, to `longest`.
    """

    def __init__(
        self,
        runner: BatchRunner,
        longest: int,
        *,
        shortest: int = 0,
        timeout_s: float = math.inf,
        seed: int = 0,
    ) -> None:
        dims = served_signature(runner.spec, runner.signature).dims[1:]
        check_lengths(shortest or longest, longest, {dim.name: (dim.min, dim.max) for dim in dims})
        self.name = f"{runner.spec.name}: {runner.name} in this process"
        self.inputs = Inputs.for_signature(runner.signature, longest, seed)
        self._runner, self._timeout_s = runner, timeout_s
        self._requests: dict[tuple[int, int], Request] = {}
        self._waiting: set[Future[Answer]] = set()
        self._loop = cast(asyncio.AbstractEventLoop, None)

    async def open(self, lengths: Array) -> None:
        self._loop = asyncio.get_running_loop()
        for length in {int(length) for length in lengths}:
            for variant in range(VARIANTS):
                feeds = self.inputs.feeds(length, variant)
                tensors = {name: array[0] for name, array in feeds.items() if array.dtype != bool}
                self._requests[length, variant] = Request(tensors, length, length)

    def send(self, index: int, length: int, done: Done) -> None:
        request = self._requests[length, variant_of(index)]
        try:
            future = self._runner.submit(request, timeout_s=self._timeout_s)
        except MhaDeployError as error:
            # Not at once: a closed loop would send its next request from within this one.
            self._loop.call_soon(done, index, _outcome(error), time.monotonic(), b"", str(error))
            return
        self._waiting.add(future)

        def ended(_: Future[Answer]) -> None:
            self._loop.call_soon_threadsafe(self._settle, index, future, time.monotonic(), done)

        future.add_done_callback(ended)

    def _settle(self, index: int, future: Future[Answer], ended_s: float, done: Done) -> None:
        self._waiting.discard(future)
        try:
            done(index, Outcome.ANSWERED, ended_s, future.result().y, "")
        except CancelledError:
            return
        except Exception as error:  # a session raises whatever its runtime does
            done(index, _outcome(error), ended_s, b"", str(error))

    def decode(self, answer: object) -> Array:
        if not hasattr(answer, "shape"):
            raise InputError("an answer without a tensor")
        return cast(Array, answer)

    async def close(self) -> None:
        waiting, self._waiting = self._waiting, set()
        for future in waiting:
            future.cancel()
        await asyncio.sleep(0)


def _outcome(error: Exception) -> Outcome:
    match error:
        case QueueFullError() | DeadlineError(predicted=True):
            return Outcome.REFUSED
        case DeadlineError():
            return Outcome.EXPIRED
        case _:
            return Outcome.ERROR
