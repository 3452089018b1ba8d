"""Blocks, requests and sessions for the tests of the runner."""

import contextlib
import threading
import time

import numpy as np

from mha_deploy.ragged import Request
from mha_deploy.runner import BatchRunner, CostModel, RunnerOptions
from mha_deploy.sessions.fake import FakeSession
from mha_deploy.signature import Dim
from mha_deploy.spec import AttentionSpec

WIDTH = 4
TRIM_ME = np.float32(1e9)
PATIENCE_S = 20  # what a test waits for before it calls it a hang


def block(*dims, **fields):
    return AttentionSpec(WIDTH, 2, dims=dims, **fields)


SELF = block(Dim("batch", 1, 2, 4), Dim("seq", 1, 8, 24))
UNMASKED = block(Dim("batch", 1, 2, 4), Dim("seq", 1, 8, 24), mask="none")
CROSS = block(Dim("batch", 1, 2, 4), Dim("q_len", 1, 8, 24), Dim("kv_len", 1, 8, 24), kind="cross")
CROSS_UNMASKED = block(
    Dim("batch", 1, 2, 4), Dim("q_len", 1, 8, 24), Dim("kv_len", 1, 8, 24), kind="cross", mask="none"
)
FULL = block(Dim("batch", 1, 2, 4), Dim("seq", 1, 8, 24), mask="full")
RAISED = block(Dim("batch", 2, 3, 4), Dim("seq", 5, 8, 24))
BLOCKS = (SELF, UNMASKED, CROSS, CROSS_UNMASKED, FULL, RAISED)


def request(spec, q_len, kv_len=0, number=1, **fields):
    """Whole numbers, other ones for every request, so that every sum over them is exact."""
    random = np.random.default_rng(number)

    def rows(length):
        return random.integers(1, 1000, (length, WIDTH)).astype(np.float32)

    if spec.kind == "self":
        return Request({"x": rows(q_len)}, q_len, q_len, **fields)
    kv_len = kv_len or q_len
    return Request(
        {"query": rows(q_len), "key": rows(kv_len), "value": rows(kv_len)}, q_len, kv_len, **fields
    )


def mean_of_what_is_kept(spec):
    """Attention with all scores equal, plus the query; rows that nobody asked for hold `TRIM_ME`."""

    def run(feeds):
        query = feeds.get("query", feeds.get("x"))
        value = feeds.get("value", feeds.get("x"))
        B, S, T = *query.shape[:2], value.shape[1]
        keep = np.ones((B, S, T), bool)
        if spec.mask == "padding":
            keep = np.broadcast_to(feeds["mask"][:, None], (B, S, T))
        elif spec.mask == "full":
            keep = feeds["attn_mask"]
        total = np.einsum("bst,btd->bsd", keep.astype(np.float32), value)
        y = query + total / np.maximum(keep.sum(-1, keepdims=True), 1).astype(np.float32)
        return {"y": np.where(query.any(-1, keepdims=True), y, TRIM_ME)}

    return run


def slow(spec, seconds, spoil=lambda y: y):
    """A session that takes so long for a run, and whose answers are spoilt."""
    answer = mean_of_what_is_kept(spec)

    def run(feeds):
        time.sleep(seconds(feeds))
        return {"y": spoil(answer(feeds)["y"])}

    return FakeSession(spec.signature, run)


def alone(spec, one):
    """The answer to one request of everything visible, from the definition."""
    value = one.tensors["x"] if spec.kind == "self" else one.tensors["value"]
    query = one.tensors["x"] if spec.kind == "self" else one.tensors["query"]
    return query + value.sum(0) / np.float32(len(value))


class Gate:
    """Sessions that wait, once they run, until they are let; `ran` holds the inputs of each run.

    A run that `spoils(feeds)` gives an error for raises it; `answers(y)` changes what is answered.
    """

    def __init__(self, spec, spoils=lambda _: None, answers=lambda y: y):
        self.spec, self.spoils, self.answers = spec, spoils, answers
        self.ran, self.runs, self.entered = [], threading.Semaphore(0), threading.Semaphore(0)

    def session(self, _threads=0):
        answer = mean_of_what_is_kept(self.spec)

        def run(feeds):
            self.ran.append(feeds)
            self.entered.release()
            assert self.runs.acquire(timeout=PATIENCE_S), "a test forgot to let a session run"
            if error := self.spoils(feeds):
                raise error
            return {"y": self.answers(answer(feeds)["y"])}

        return FakeSession(self.spec.signature, run)

    def let(self, count=1000):
        self.runs.release(count)

    def wait_for_a_run(self):
        assert self.entered.acquire(timeout=PATIENCE_S), "no session ran"


@contextlib.contextmanager
def runner_behind(gate, model=None, **options):
    """A runner with one worker; its sessions are let run when the block ends."""
    runner = BatchRunner(gate.session, gate.spec, RunnerOptions(**options), model)
    try:
        yield runner
    finally:
        gate.let()
        runner.close(PATIENCE_S)


def outcome_of(future):
    return future.exception(PATIENCE_S)


def counted(runner):
    """Outcomes that occurred, after a check that they and what is pending are all that was received."""
    seen = runner.snapshot()
    assert seen.received == sum(seen.outcomes.values()) + seen.pending
    return {name: count for name, count in seen.outcomes.items() if count}


class Cheap(CostModel):
    """Batches cost the same whatever their rows, so that all that fit together go together."""

    def predict_us(self, size, _fill=1.0):
        return 100.0 + max(size[1:])


def wait_until_idle(runner):
    end = time.monotonic() + PATIENCE_S
    while not runner._desk._idle and time.monotonic() < end:
        time.sleep(0.001)


def busy(gate, runner):
    """Keep the one worker at a request of its own until the gate lets it."""
    future = runner.submit(request(gate.spec, 24, 24))
    gate.wait_for_a_run()
    return future
