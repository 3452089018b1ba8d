"""The one model that a server serves: what it is, in the protocol's words, and its requests' way through
the runner."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

from mha_deploy.errors import DeadlineError, RequestError, RunnerClosedError
from mha_deploy.machine import version
from mha_deploy.runner import Answer, BatchRunner, RunnerSnapshot
from mha_deploy.serving.faults import Outcome, fault_of
from mha_deploy.serving.limits import Limits
from mha_deploy.serving.protocol import InferRequest
from mha_deploy.serving.rows import MASK_NAMES, Rows, served_signature, split, without_mask
from mha_deploy.serving.stats import PHASES, ServerStats, latency_json, phases_us, slowest, triton_stats
from mha_deploy.serving.wire import DATATYPES, clip, dtype_of
from mha_deploy.signature import TensorSpec

VERSION = "1"
EXTENSIONS = (
    "binary_tensor_data",
    "statistics",
    "model_configuration",
    "schedule_policy",
    "model_repository",
)

_PHASES_FORM = "".join(f"{phase};dur=%.3f, " for phase in PHASES)

log = logging.getLogger("mha_deploy.serving")


class Counted:
    """See `Model.counted`."""

    def __init__(self, model: Model) -> None:
        self._model, self._begin = model, time.perf_counter()

    def __enter__(self) -> None:
        self._model.stats.begun()
        if self._model.draining:
            error = RunnerClosedError("the server is shutting down and takes no new requests")
            self.__exit__(None, error)
            raise error

    def __exit__(self, _kind: object, error: BaseException | None, *_: object) -> None:
        outcome = Outcome.ANSWERED if error is None else fault_of(error).outcome
        if outcome is Outcome.FAILED:
            log.error("a request failed: %s", type(error).__name__)
        self._model.stats.ended(outcome, time.perf_counter() - self._begin)


class Model:
    """A runner, served under its spec's name as version 1.

    Used from one event loop's thread; the tensors' work is the runner's, in its own threads.
    """

    def __init__(self, runner: BatchRunner, limits: Limits) -> None:
        self.runner, self.limits = runner, limits
        self.spec, self.name = runner.spec, runner.spec.name
        self.signature = served_signature(runner.spec, runner.signature)
        self._without_mask = without_mask(runner.spec, self.signature)
        output = self.signature.outputs[0]
        self.datatype, self.dtype = DATATYPES[output.dtype], dtype_of(DATATYPES[output.dtype])
        self.stats = ServerStats()
        self.platform = f"mha-deploy_{runner.snapshot().provider}"
        self.draining = False

    @property
    def ready(self) -> bool:
        return not self.draining

    def check_name(self, name: str, wanted: str = "") -> None:
        """Raises RequestError (404) unless `name` is this model's, and `wanted`, if any, its version."""
        if name != self.name:
            raise RequestError(f"no model {clip(name)}; this server has {self.name!r}", 404)
        if wanted not in ("", VERSION):
            raise RequestError(f"model {self.name!r} has no version {clip(wanted)}; it has {VERSION!r}", 404)

    def counted(self) -> Counted:
        """One infer request, from the arrival of its head to its answer; counted however it ends.

        Raises:
            RunnerClosedError: as a block, the server is draining.
        """
        return Counted(self)

    async def infer(self, request: InferRequest) -> tuple[Rows, list[Answer]]:
        """The answers to a request's rows. When this is cancelled, so are they.

        Raises:
            FeedError: the tensors are not what the model takes.
            RequestError: 413, more rows than the queue ever holds.
            RunnerError: no room, no time, or closing.
        """
        masked = MASK_NAMES[self.spec.mask] in request.tensors
        (self.signature if masked else self._without_mask).check(request.tensors)
        rows = split(self.spec, request.tensors)
        self._check_room(rows)
        try:
            answers = await self._run(rows, request.timeout_s, self._priority(request.priority))
        except TimeoutError as error:
            message = f"no answer within the {self.limits.request_s:g} s that any request is given"
            raise DeadlineError(message, predicted=False) from error
        tokens = sum(each.tokens(self.spec) for each in rows.requests)
        self.stats.computed(answers, rows.shape[0], tokens)
        return rows, answers

    def _check_room(self, rows: Rows) -> None:
        """Rows that fill the queue by themselves would be refused whenever they come."""
        options, requests = self.runner.options, rows.requests
        if len(requests) == 1:
            return
        for count, bound, what, option in (
            (len(requests), options.max_queue_requests, "rows", "--queue-requests"),
            (
                sum(e.tokens(self.spec) for e in requests),
                options.max_queue_tokens,
                "tokens",
                "--queue-tokens",
            ),
            (sum(e.nbytes for e in requests), options.max_queue_bytes, "bytes", "--queue-bytes"),
        ):
            if count > bound:
                raise RequestError(
                    f"a request of {count} {what}, but the queue holds {bound} ({option}); send fewer rows",
                    413,
                )

    def _priority(self, priority: int) -> int:
        levels = self.runner.options.priority_levels
        if priority > levels:
            raise RequestError(
                f"priority {priority}; expected 0 (the default) or 1 (the highest) to {levels}"
            )
        return priority

    async def _run(self, rows: Rows, timeout_s: float, priority: int) -> list[Answer]:
        """Raises TimeoutError once `limits.request_s` have passed, by the event loop's timer: a deadline in
        the runner would wake its watch for every request."""
        if len(rows.requests) == 1:
            (only,), wait_s = rows.requests, self.limits.request_s
            answer = await self.runner.submit_async(
                only, timeout_s=timeout_s, priority=priority, wait_s=wait_s
            )
            return [answer]
        async with asyncio.timeout(self.limits.request_s):
            return await self._run_all(rows, timeout_s, priority)

    async def _run_all(self, rows: Rows, timeout_s: float, priority: int) -> list[Answer]:
        futures: list[asyncio.Future[Answer]] = []
        try:
            for each in rows.requests:
                submitted = self.runner.submit(each, timeout_s=timeout_s, priority=priority)
                futures.append(asyncio.wrap_future(submitted))
            return await asyncio.gather(*futures)
        except BaseException:
            for future in futures:  # the client gets one answer: with one row lost the others are no use
                future.cancel()
            await asyncio.gather(*futures, return_exceptions=True)
            raise

    def metadata(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "versions": [VERSION],
            "platform": self.platform,
            "inputs": [self._described(tensor) for tensor in self.signature.inputs],
            "outputs": [self._described(tensor) for tensor in self.signature.outputs],
        }

    @staticmethod
    def _described(tensor: TensorSpec) -> dict[str, Any]:
        shape = [axis if isinstance(axis, int) else -1 for axis in tensor.shape]
        return {"name": tensor.name, "datatype": DATATYPES[tensor.dtype], "shape": shape}

    def config(self, snapshot: RunnerSnapshot) -> dict[str, Any]:
        """The model's configuration in Triton's form. `parameters` say what has no place there."""
        options = self.runner.options
        dims = {dim.name: f"{dim.min}..{dim.max}" for dim in self.signature.dims}
        return {
            "name": self.name,
            "platform": self.platform,
            "backend": "mha-deploy",
            "max_batch_size": self.signature.dims[0].max,
            "input": [self._configured(t, optional=t.dtype == "bool") for t in self.signature.inputs],
            "output": [self._configured(t) for t in self.signature.outputs],
            "dynamic_batching": {
                "max_queue_delay_microseconds": 0,
                "priority_levels": options.priority_levels,
                "default_priority_level": options.default_priority,
                "default_queue_policy": {
                    "timeout_action": "REJECT",
                    "default_timeout_microseconds": int(self.limits.request_s * 1e6),
                    "allow_timeout_override": True,
                    "max_queue_size": options.max_queue_requests,
                },
            },
            "instance_group": [{"name": self.name, "kind": "KIND_AUTO", "count": snapshot.workers}],
            "parameters": {
                key: {"string_value": str(value)}
                for key, value in {
                    **dims,
                    "mode": options.mode,
                    "threads": snapshot.threads,
                    "soloist_threads": snapshot.soloist,
                }.items()
            },
        }

    @staticmethod
    def _configured(tensor: TensorSpec, *, optional: bool = False) -> dict[str, Any]:
        described = Model._described(tensor)
        named = {"FP16": "TYPE_FP16", "FP32": "TYPE_FP32", "FP64": "TYPE_FP64", "BF16": "TYPE_BF16"}
        kind = named.get(described["datatype"], f"TYPE_{described['datatype']}")
        config = {"name": tensor.name, "data_type": kind, "dims": described["shape"][1:]}
        return {**config, "optional": True} if optional else config

    def statistics(self, snapshot: RunnerSnapshot) -> dict[str, Any]:
        return {"model_stats": [triton_stats(self.name, VERSION, self.stats, snapshot)]}

    def latency(self, snapshot: RunnerSnapshot) -> dict[str, Any]:
        """Requests' latency at the server and rows' latency by phase in the runner, all and recent."""
        total, window = self.stats.latency()
        return {
            "model": self.name,
            "version": VERSION,
            "window_s": snapshot.window_s,
            "percentiles": "nearest rank, within 1 %; intervals: 95 %, from order statistics",
            "request": {"total": latency_json(total), "window": latency_json(window)},
            "rows": {
                phase: {
                    "total": latency_json(snapshot.phases[phase]),
                    "window": latency_json(snapshot.window[phase]),
                }
                for phase in snapshot.phases
            },
        }

    def live(self, since: int) -> dict[str, Any]:
        """The seconds after `since` of the server's history, for the live page."""
        return {
            "model": self.name,
            "version": VERSION,
            "ready": self.ready,
            "time_s": int(time.time()),
            "window": latency_json(self.stats.latency()[1]),
            "received": self.stats.received,
            "in_progress": self.stats.in_progress,
            "outcomes": {outcome.value: self.stats.outcomes[outcome] for outcome in Outcome},
            "seconds": [second.to_json() for second in self.stats.history if second.time_s > since],
        }


def server_metadata() -> dict[str, Any]:
    return {"name": "mha-deploy", "version": version("mha-deploy"), "extensions": list(EXTENSIONS)}


def phases_header(answers: Sequence[Answer], begun: float) -> str:
    """The value of a Server-Timing header (W3C Server Timing): each phase in milliseconds."""
    total = f"total;dur={(time.perf_counter() - begun) * 1e3:.3f}"
    if not answers:
        return total
    queue, batch, compute, scatter = phases_us(slowest(answers))
    return _PHASES_FORM % (queue / 1e3, batch / 1e3, compute / 1e3, scatter / 1e3) + total
