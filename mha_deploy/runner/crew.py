"""Who runs what: so many workers of so many threads, and a soloist where that pays."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from mha_deploy.runner.cost import CostModel, Size
from mha_deploy.runner.layout import laid_out
from mha_deploy.runner.options import RunnerOptions
from mha_deploy.runner.trial import Trial, noise
from mha_deploy.sessions import Session
from mha_deploy.spec import AttentionSpec

CREW_S, CREW_ROUNDS = 0.08, 2
# A crew of fewer workers has to finish more than so many times as much.
NEAR = 1.25
SOLOIST_S = 0.4
# A soloist has to be so many times as fast as a worker, for it may take cores from who comes meanwhile.
GAIN = 1.1

OpenSession = Callable[[int], Session]


@dataclass(frozen=True, slots=True)
class Soloist:
    """One more session, of so many `threads`, for a request that has all cores to itself.

    It takes those that would cost a worker `from_us` or more.
    """

    threads: int
    from_us: float

    def __post_init__(self) -> None:
        if type(self.threads) is not int or self.threads < 2 or not 0 <= self.from_us < math.inf:
            raise ValueError(f"a soloist of {self.threads} threads from {self.from_us} us")


def crews(options: RunnerOptions, cores: int) -> list[tuple[int, int]]:
    """Workers and threads of each that are to be compared; one where the options say."""
    workers, threads = options.workers, options.threads
    if workers or threads:
        return [(workers or max(1, cores // threads), threads or max(1, cores // workers))]
    return sorted({(cores, 1), (1, cores)})


def best_crew(
    open_session: OpenSession, spec: AttentionSpec, possible: list[tuple[int, int]]
) -> tuple[int, int]:
    """The crew that finishes the most requests of the tuned length a second.

    Of two that are near, the one with more workers: a run of several threads waits for the slowest of them,
    and others, the server's own thread first, want the cores too.
    """
    if len(possible) == 1:
        return possible[0]
    sizes = (spec.dims[0].min, spec.signature.dim(spec.query_axis).opt, spec.signature.dim(spec.key_axis).opt)
    done = dict.fromkeys(possible, 0)
    with contextlib.ExitStack() as stack:
        teams = {
            crew: [_Member(stack, session, spec) for session in opened(stack, open_session, *crew)]
            for crew in possible
        }
        for _, (crew, team) in itertools.product(range(CREW_ROUNDS), teams.items()):
            counts = [member.pool.submit(member.runs, sizes) for member in team]
            done[crew] += sum(count.result() for count in counts)
    most = max(done.values())
    return max(crew for crew in possible if done[crew] * NEAR >= most)


def opened(
    stack: contextlib.ExitStack, open_session: OpenSession, workers: int, threads: int
) -> list[Session]:
    """A session for each worker, which `stack` closes; over one set of weights where the runtime can."""
    found = [stack.enter_context(open_session(threads))]
    while len(found) < workers:
        found.append(stack.enter_context(found[0].for_another_thread() or open_session(threads)))
    return found


class _Member:
    """A session on a thread of its own, as a worker has it."""

    def __init__(self, stack: contextlib.ExitStack, session: Session, spec: AttentionSpec) -> None:
        self._session, self._layout = laid_out(session, spec)
        self.pool = stack.enter_context(ThreadPoolExecutor(1))
        self._spec = spec

    def runs(self, size: Size) -> int:
        """How many runs `CREW_S` seconds hold, after one that does not count."""
        requests = noise(self._layout, self._spec, [size[1:]] * size[0])
        feeds = self._layout.feeds(requests, size[1:])
        self._session.run(feeds)
        end, count = time.perf_counter() + CREW_S, 0
        while time.perf_counter() < end:
            self._session.run(feeds)
            count += 1
        return count


def soloist(open_session: OpenSession, spec: AttentionSpec, model: CostModel, cores: int) -> Soloist | None:
    """One of `cores` threads, beside workers of one thread whose costs are in `model`, if it pays.

    None also where its answers differ from a worker's in a bit: which of them runs a request depends on
    what else there is to do.
    """
    rows = min(size[0] for size in model.samples)
    sizes = sorted((size for size in model.samples if size[0] == rows), key=model.samples.__getitem__)[::-1]
    paying, worth, most = 0, 0.0, 0.0
    with open_session(1) as one, open_session(cores) as many:
        worker, alone = Trial(one, spec), Trial(many, spec)
        end = time.perf_counter() + SOLOIST_S
        # The dearest first, for there it matters; and what it is worth over all of them, for one may meet
        # a busy moment.
        for number, size in enumerate(sizes, 1):
            requests = noise(alone.layout, spec, [size[1:]] * size[0])
            if not np.array_equal(alone.run(requests), worker.run(requests), equal_nan=True):
                return None
            # What has all cores to itself comes after a while in which there was nothing to do.
            alone_us, worker_us = alone.timed_after_idling(requests), worker.timed_after_idling(requests)
            worth += math.log(worker_us / alone_us / GAIN)
            if worth > most:
                most, paying = worth, number
            if time.perf_counter() > end:
                break
    if not paying:
        return None
    # Half way to the next size, on the scale of ratios: at the cost of the last one that pays, a correction
    # of the prediction would decide, and no request of that size might ever be played.
    costs = [*(model.samples[size] for size in sizes), 0.0]
    return Soloist(cores, math.sqrt(costs[paying - 1] * costs[paying]))
