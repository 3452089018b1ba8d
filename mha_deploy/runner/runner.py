"""The runner itself: threads that own sessions, and the one lock around what they share."""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import TracebackType
from typing import Self

from mha_deploy.bundle import Bundle
from mha_deploy.errors import BundleError, FeedError, RunnerClosedError
from mha_deploy.ragged import Request, RequestCheck
from mha_deploy.runner.calibration import calibrated
from mha_deploy.runner.cost import CostModel
from mha_deploy.runner.crew import OpenSession, Soloist, opened
from mha_deploy.runner.desk import Desk
from mha_deploy.runner.histogram import WINDOW_S
from mha_deploy.runner.layout import Layout, laid_out
from mha_deploy.runner.options import DEFAULT_OPTIONS, RunnerOptions
from mha_deploy.runner.planner import Planner
from mha_deploy.runner.recorder import RunnerLoad, RunnerSnapshot
from mha_deploy.runner.ticket import Answer, AnswerFuture, Awaited, Receiver, Shape, Ticket
from mha_deploy.runner.trial import noise
from mha_deploy.runner.worker import Worker
from mha_deploy.sessions import DEFAULT_PLACEMENT, Placement, Session
from mha_deploy.spec import AttentionSpec

# What a closing runner waits for threads that have nothing left to do.
_JOIN_S = 1.0
# How long a first run is waited for: a session that hangs must not keep the runner from answering so.
_WARM_S = 10.0
# What mode "fast" allows mates to change of an answer, relative to its largest |y|: 1e-6 in fp32.
FAST_DRIFT_EPS = 8
# Not yet closed; a runtime that is torn down under a thread in one of its runs aborts the process.
_running: set[BatchRunner] = set()


class BatchRunner:
    """Many callers, few sessions: requests from any thread or event loop, run in batches.

    A request is run as soon as a worker is idle; while all are busy requests wait, and a worker that
    frees takes the batch that the cost model predicts to be the best then (see `RunnerOptions`).
    Every request ends in exactly one outcome, and every caller hears of it.

    `open_session(threads)` opens a session of so many threads (0: every core); each worker gets one of
    its own, over one set of weights where the runtime can, of a padded graph or a `PackedSession`; and so
    does the `soloist`, which takes what has all cores to itself. Without a `cost_model`, one is learnt
    from the runs themselves. Where batch mates `drift` an answer (see `Calibration`) by more than the
    mode allows, every request runs alone. `warm` lets each session run once, uncounted, before this
    returns.
    """

    def __init__(
        self,
        open_session: OpenSession,
        spec: AttentionSpec,
        options: RunnerOptions = DEFAULT_OPTIONS,
        cost_model: CostModel | None = None,
        *,
        drift: float = 0.0,
        soloist: Soloist | None = None,
        warm: bool = False,
    ) -> None:
        self.spec, self.options = spec, options
        self._model = cost_model or CostModel(spec, {})
        count = options.workers or 1
        laid = _opened(open_session, count, options.threads, soloist, spec)
        sessions, self._layout = [session for session, _ in laid], laid[0][1]
        allowed = FAST_DRIFT_EPS * sessions[0].precision.eps if options.mode == "fast" else 0.0
        self._drift, self._alone = drift, drift > allowed and not options.allow_batch_dependent
        self._planner = Planner(spec, self._model, options, self._layout, alone=self._alone)
        solo_from_us, self._soloist = (soloist.from_us, soloist.threads) if soloist else (math.inf, 0)
        self._desk = Desk(self._planner, self._model, self._layout, options, solo_from_us)
        self.name, self.provider = sessions[0].name, sessions[0].provider
        self.signature = self._layout.signature
        self._check = RequestCheck(spec, self.signature)
        self._levels = range(options.priority_levels + 1)
        self._started, self._process = time.monotonic(), os.getpid()
        watch = threading.Thread(target=self._desk.watch, name="mha-deadlines", daemon=True)
        first = noise(self._layout, spec, [_tuned(spec)]) if warm else ()
        workers = [
            Worker(each, self._desk, self._layout, i, first, solo=i == count)
            for i, each in enumerate(sessions)
        ]
        self._threads = [watch, *workers]
        _running.add(self)
        for thread in self._threads:
            thread.start()
        for worker in workers:
            worker.warm.wait(_WARM_S)

    @classmethod
    def over(
        cls,
        bundle: Bundle,
        artifact: str = "",
        *,
        placement: Placement = DEFAULT_PLACEMENT,
        options: RunnerOptions = DEFAULT_OPTIONS,
    ) -> Self:
        """A runner over an artifact of a bundle, with the workers and the cost model measured here.

        The measurement takes less than 2 s and is kept in the bundle's folder, where that can be
        written, for this artifact on this machine.

        Raises:
            BundleError: as `Bundle.open_session`, or answers of the artifact depend on batch mates and
                the options do not allow that.
            MissingError: as `Bundle.open_session`.
        """
        chosen = bundle.artifact(artifact, placement)
        name = chosen.name
        if chosen.details.get("batch_dependent") and not options.allow_batch_dependent:
            raise BundleError(
                f"answers of artifact {name!r} depend on what else is in their batch (it has one scale for "
                "a whole batch); serve one with scales per token or static ones, or accept that with "
                "--allow-batch-dependent (RunnerOptions.allow_batch_dependent)"
            )
        found = calibrated(bundle, name, placement, options)

        def open_session(threads: int) -> Session:
            return bundle.open_session(name, replace(placement, threads=threads, shares=True))

        options = replace(options, workers=found.workers, threads=found.threads)
        drift = max(found.drift, found.mixed_drift) if options.mode == "fast" else found.drift
        return cls(
            open_session, bundle.spec, options, found.model, drift=drift, soloist=found.soloist, warm=True
        )

    def submit(self, request: Request, *, timeout_s: float = math.inf, priority: int = 0) -> Future[Answer]:
        """Queue a request; the future gets its answer, or DeadlineError, RunnerClosedError or what the
        session raised for it. Cancelling the future drops the request.

        The request's arrays must not change until then. Priority 1 is the highest, 0 the default.

        Raises:
            FeedError: the request does not meet the signature (its length above all), or the priority
                or the timeout is out of range.
            QueueFullError: the queue has no room for it.
            DeadlineError: the predicted answer lies beyond `timeout_s`.
            RunnerClosedError: the runner is closing, or this process was forked from the one it is in.
        """
        future, ticket = self._promised(request, timeout_s, priority)
        self._desk.admit([ticket])
        return future

    def submit_all(self, requests: Sequence[Request]) -> list[Future[Answer]]:
        """Queue requests that are all known at once, before the first of them runs.

        Raises:
            FeedError: one does not meet the signature; none is queued.
            QueueFullError, RunnerClosedError: as `submit`; those before it are queued, and cancelled.
        """
        promised = [
            self._promised(request, math.inf, 0, f"request {index}") for index, request in enumerate(requests)
        ]
        try:
            self._desk.admit([ticket for _, ticket in promised])
        except BaseException:
            for future, _ in promised:
                future.cancel()  # of one that was not admitted this does nothing
            raise
        return [future for future, _ in promised]

    async def submit_async(
        self,
        request: Request,
        *,
        timeout_s: float = math.inf,
        priority: int = 0,
        wait_s: float = math.inf,
    ) -> Answer:
        """As `submit`, awaited; cancelling the task cancels the request.

        `timeout_s` is the request's deadline, which decides whether and when it is run; `wait_s` is only how
        long this waits.

        Raises:
            TimeoutError: no answer within `wait_s`; the request is cancelled.
        """
        awaited = Awaited(wait_s)
        try:
            ticket = self._ticket(awaited, request, timeout_s, priority)
            # The last step: a worker that it wakes waits until this thread lets go of the interpreter.
            self._desk.admit([ticket])
            try:
                return await awaited.waiter
            except BaseException:
                self._desk.drop(ticket)  # of one that is settled this does nothing
                raise
        finally:
            awaited.ended()

    def _promised(
        self, request: Request, timeout_s: float, priority: int, called: str = "a request"
    ) -> tuple[AnswerFuture, Ticket]:
        future = AnswerFuture()
        ticket = self._ticket(future, request, timeout_s, priority, called)
        future.drops(lambda: self._desk.drop(ticket))
        return future, ticket

    def _ticket(
        self,
        receiver: Receiver,
        request: Request,
        timeout_s: float,
        priority: int,
        called: str = "a request",
    ) -> Ticket:
        arrived = time.monotonic()
        if self._process != os.getpid():
            raise RunnerClosedError(
                f"the runner does not cross a fork: its threads are in process {self._process}; make one here"
            )
        try:
            if priority not in self._levels or math.isnan(timeout_s):
                raise FeedError(
                    f"priority {priority}, timeout {timeout_s} s; expected a priority of 0 (default) or 1 "
                    f"(highest) to {self._levels[-1]}, and a number of seconds"
                )
            self._check(request, called)
        except FeedError:
            self._desk.refuse(arrived)
            raise
        shape = self._layout.shape(request)
        return Ticket(
            request=request,
            receiver=receiver,
            shape=shape,
            tokens=request.tokens(self.spec),
            nbytes=request.nbytes,
            priority=priority or self.options.default_priority,
            arrived=arrived,
            deadline=arrived + timeout_s,
            work_us=self._planner.share_us(shape),
        )

    def close(self, grace_s: float = math.inf) -> None:
        """Refuse new requests, finish those there are within `grace_s`, fail the rest.

        A session that hangs is left behind; its thread does not keep the process. Twice is fine. In a
        callback of a future, on a thread that is needed to finish requests, this returns at once, and
        another thread does the waiting. A process that ends closes its runners without grace.
        """
        if self._process != os.getpid():  # there is nothing of it here
            return
        if threading.current_thread() in self._threads:
            self._desk.refuse_new()
            threading.Thread(target=self.close, args=(grace_s,), name="mha-close", daemon=True).start()
            return
        self._desk.close(grace_s)
        end = time.monotonic() + _JOIN_S
        for thread in self._threads:
            if thread.is_alive():  # a signal may have come before it was started
                thread.join(max(0.0, end - time.monotonic()))
        _running.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(math.inf if error is None else 0.0)

    def load(self) -> RunnerLoad:
        """How much there is to do at this moment; cheaper than `snapshot`."""
        desk = self._desk
        with desk.lock:
            backlog, busy = desk.backlog, sum(each.busy for each in (*desk.progress, desk.solo))
            return RunnerLoad(backlog.requests, backlog.tokens, len(desk.open), busy)

    def snapshot(self) -> RunnerSnapshot:
        """Counters, histograms and the queue at this moment."""
        desk = self._desk
        with desk.lock:
            now, recorder, backlog = time.monotonic(), desk.recorder, desk.backlog
            return RunnerSnapshot(
                name=self.name,
                provider=self.provider,
                mode=self.options.mode,
                drift=self._drift,
                batching=not self._alone,
                workers=len(desk.progress),
                threads=self.options.threads,
                soloist=self._soloist,
                received=recorder.received,
                outcomes={outcome.value: count for outcome, count in recorder.outcomes.items()},
                outcome_us={outcome.value: us for outcome, us in recorder.outcome_us.items()},
                pending=len(desk.open),
                queued_requests=backlog.requests,
                queued_tokens=backlog.tokens,
                queued_bytes=backlog.nbytes,
                queued_work_us=backlog.work_us,
                busy_workers=sum(each.busy for each in (*desk.progress, desk.solo)),
                longest_run_s=max(max(0.0, now - each.since) for each in (*desk.progress, desk.solo)),
                batches=recorder.batches(),
                dispatch_reasons=dict(recorder.reasons),
                tokens=recorder.tokens,
                padded_tokens=recorder.padded_tokens,
                phases=recorder.phases.total(),
                window=recorder.phases.window(now),
                window_s=WINDOW_S,
                uptime_s=now - self._started,
                closing=desk.closing,
                cost_model=self._model.to_json(),
            )


@atexit.register
def _close_all() -> None:
    for runner in list(_running):
        runner.close(0.0)


def _tuned(spec: AttentionSpec) -> Shape:
    """The lengths that the artifacts are tuned for."""
    return spec.signature.dim(spec.query_axis).opt, spec.signature.dim(spec.key_axis).opt


def _opened(
    open_session: OpenSession, workers: int, threads: int, soloist: Soloist | None, spec: AttentionSpec
) -> list[tuple[Session, Layout]]:
    """The workers' sessions and the soloist's, each with its layout; or none left open."""
    with contextlib.ExitStack() as stack:
        found = opened(stack, open_session, workers, threads)
        if soloist:
            found.append(stack.enter_context(open_session(soloist.threads)))
        laid = [laid_out(each, spec) for each in found]
        stack.pop_all()
        return laid
