"""One session, timed on batches of noise."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import numpy as np

from mha_deploy.precision import numpy_dtype
from mha_deploy.ragged import Request
from mha_deploy.runner.layout import Layout, laid_out
from mha_deploy.runner.ticket import Shape
from mha_deploy.sessions import Session
from mha_deploy.signature import Array
from mha_deploy.spec import AttentionSpec

RUNS_A_CELL = 3
RUNS_AFTER_IDLING, IDLE_S = 5, 0.01
# A prime number of values, so that rows cut from it, each so many values further on, differ.
_NOISE: Array = np.random.default_rng(0).standard_normal(65521)
_STRIDE = 7919


class Trial:
    """`run` and `timed` do what a worker does with a batch."""

    def __init__(self, session: Session, spec: AttentionSpec) -> None:
        self.spec = spec
        self._session, self.layout = laid_out(session, spec)

    def run(self, requests: Sequence[Request]) -> list[Array]:
        """Inputs put together, run, and the answers taken apart, as a worker does it."""
        shapes = [self.layout.shape(request) for request in requests]
        longest = (max(q for q, _ in shapes), max(kv for _, kv in shapes))
        return self.layout.answers(self._session.run(self.layout.feeds(requests, longest))["y"], requests)

    def timed_after_idling(self, requests: Sequence[Request]) -> float:
        """Microseconds of a run that nothing went before for a while: the median of a few.

        Threads have then to be woken and caches to be filled, and how long that takes varies.
        """
        times = []
        for _ in range(RUNS_AFTER_IDLING):
            time.sleep(IDLE_S)
            begin = time.perf_counter()
            self.run(requests)
            times.append((time.perf_counter() - begin) * 1e6)
        return statistics.median(times)

    def timed(self, requests: Sequence[Request]) -> float:
        """Microseconds of a run, after one that does not count.

        The least of a few: what other work on the machine takes is no cost of the session.
        """
        self.run(requests)
        times = []
        for _ in range(RUNS_A_CELL):
            begin = time.perf_counter()
            self.run(requests)
            times.append((time.perf_counter() - begin) * 1e6)
        return min(times)


def noise(layout: Layout, spec: AttentionSpec, shapes: Sequence[Shape]) -> list[Request]:
    """A request for each shape; what the first holds does not depend on how many there are."""
    floats = [tensor for tensor in layout.signature.inputs if tensor.is_float]
    requests = []
    for row, (q, kv) in enumerate(shapes):
        values = np.roll(_NOISE, -row * _STRIDE)
        requests.append(
            Request(
                {
                    tensor.name: np.resize(
                        values, (q if tensor.shape[1] == spec.query_axis else kv, int(tensor.shape[-1]))
                    ).astype(numpy_dtype(tensor.dtype))
                    for tensor in floats
                },
                q,
                kv,
            )
        )
    return requests
