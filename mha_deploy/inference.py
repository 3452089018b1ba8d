"""`infer`: a file of requests in, a file of answers out."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mha_deploy.bundle import Bundle
from mha_deploy.errors import FeedError
from mha_deploy.masks import keep_mask
from mha_deploy.ragged import Request, is_packed, join, pack, unpack
from mha_deploy.runner import DEFAULT_OPTIONS, BatchRunner, CostModel, RunnerOptions
from mha_deploy.runner.calibration import measured, stored
from mha_deploy.sessions import DEFAULT_PLACEMENT, Placement, Session
from mha_deploy.sessions.packed import PackedSession, PaddedView
from mha_deploy.signature import LARGEST, Array, Feeds
from mha_deploy.spec import AttentionSpec

# Long enough for the sizes that a batch is decided on, short beside starting a process.
GLANCE_S = 0.2
# A file's requests are there already: the queue that holds them needs no bounds.
UNBOUNDED = RunnerOptions(
    workers=1,
    max_queue_requests=LARGEST,
    max_queue_tokens=LARGEST,
    max_queue_bytes=2**62,
    max_wait_s=math.inf,
)


@dataclass(frozen=True, slots=True)
class InferReport:
    """What a run over many requests did. Times are of the session's runs, without file access."""

    requests: int
    batches: int
    tokens: int
    padded_tokens: int
    batch_ms: tuple[float, ...]
    provider: str

    @property
    def total_ms(self) -> float:
        return sum(self.batch_ms)

    def to_json(self) -> dict[str, object]:
        return {
            "requests": self.requests,
            "batches": self.batches,
            "tokens": self.tokens,
            "padded_tokens": self.padded_tokens,
            "total_ms": self.total_ms,
            "batch_ms": list(self.batch_ms),
            "provider": self.provider,
        }


@dataclass(frozen=True, slots=True)
class Answers:
    """`y`, packed [sum(lengths), d_model] or padded [batch, query, d_model] as the inputs were."""

    y: Array
    report: InferReport


def infer(
    bundle: Bundle,
    tensors: Feeds,
    artifact: str = "",
    *,
    mask_form: str = "keep",
    placement: Placement = DEFAULT_PLACEMENT,
) -> Answers:
    """Run packed requests (see `ragged`) or padded inputs under the graph's own names.

    Packed requests run in batches of equal length (see `BatchRunner`), each answer bit for bit the one
    that its request gets alone; a packed artifact takes them in runs of near length (see
    `sessions.packed.PackedSession`).
    Padded inputs run as they are, in slices of the largest batch the graph takes; `mask_form` says
    how their mask is to be read (see `masks`).

    Raises:
        FeedError: names, shapes, dtypes or lengths that the block does not take.
    """
    spec = bundle.spec
    if is_packed(tensors) and bundle.artifact(artifact, placement).layout == "padded":
        return _run_ragged(bundle, unpack(spec, tensors), artifact, placement)
    with bundle.open_session(artifact, placement) as session:
        if isinstance(session, PackedSession) and is_packed(tensors):
            return _run_packed(session, unpack(spec, tensors))
        padded = PaddedView(session) if isinstance(session, PackedSession) else session
        return _run_padded(padded, spec, with_keep_mask(spec, tensors, mask_form))


def _run_ragged(bundle: Bundle, requests: Sequence[Request], artifact: str, placement: Placement) -> Answers:
    """All requests at once to one worker, for what is reported is the time in its session."""
    model, drift = _costs(bundle, requests, artifact, placement)

    def open_session(_threads: int) -> Session:
        return bundle.open_session(artifact, placement)

    with BatchRunner(open_session, bundle.spec, UNBOUNDED, model, drift=drift) as runner:
        answers = [future.result() for future in runner.submit_all(requests)]
        did = runner.snapshot()
    times = {answer.batch: answer.compute_us / 1e3 for answer in answers}
    report = InferReport(
        len(answers), len(times), did.tokens, did.padded_tokens, tuple(times.values()), did.provider
    )
    return Answers(pack([answer.y for answer in answers]), report)


def _costs(
    bundle: Bundle, requests: Sequence[Request], artifact: str, placement: Placement
) -> tuple[CostModel, float]:
    """What batches cost and whether mates show: as a runner has stored it, or from a glance."""
    known = stored(bundle, bundle.artifact(artifact, placement).name, placement, DEFAULT_OPTIONS)
    if known:
        return known.model, known.drift
    if len({(request.q_len, request.kv_len) for request in requests}) == len(requests):
        return CostModel(bundle.spec, {}), 0.0  # no two can share a batch
    with bundle.open_session(artifact, placement) as session:
        return measured(session, bundle.spec, GLANCE_S)


def _run_packed(session: PackedSession, requests: Sequence[Request]) -> Answers:
    """Each run that the session plans by itself, to have its time.

    Padded tokens are positions that the attention core alone is filled up with.
    """
    spec, lengths = session.spec, [(request.q_len, request.kv_len) for request in requests]
    answers: dict[int, Array] = {}
    positions, times = 0, []
    for members in session.runs(lengths):
        feeds = join(spec, [requests[i] for i in members])
        begin = time.perf_counter()
        y = session.run(feeds)["y"]
        times.append((time.perf_counter() - begin) * 1e3)
        ends = np.cumsum([lengths[i][0] for i in members])[:-1]
        answers |= dict(zip(members, np.split(y, ends), strict=True))
        positions += len(members) * _tokens(spec, map(max, zip(*(lengths[i] for i in members), strict=True)))
    tokens = sum(_tokens(spec, pair) for pair in lengths)
    padded = positions - tokens
    report = InferReport(len(requests), len(times), tokens, padded, tuple(times), session.provider)
    return Answers(pack([answers[i] for i in range(len(requests))]), report)


def _tokens(spec: AttentionSpec, lengths: Iterable[int]) -> int:
    """Of one request's (query, key) lengths: self attention has one length for both."""
    query, key = lengths
    return query if spec.kind == "self" else query + key


def with_keep_mask(spec: AttentionSpec, tensors: Feeds, form: str) -> dict[str, Array]:
    """`tensors` with their mask in the one form that graphs take."""
    name = {"padding": "mask", "full": "attn_mask", "none": ""}[spec.mask]
    data = [tensor.name for tensor in spec.signature.inputs if tensor.is_float]
    if name not in tensors or any(each not in tensors or tensors[each].ndim != 3 for each in data):
        return dict(tensors)  # the session's own check says what is wrong
    query, key = tensors[data[0]], tensors[data[min(1, len(data) - 1)]]
    shape = (query.shape[0], query.shape[1], key.shape[1])
    return {**tensors, name: keep_mask(tensors[name], spec, shape, form)}


def _run_padded(session: Session, spec: AttentionSpec, feeds: Mapping[str, Array]) -> Answers:
    if not feeds:
        raise FeedError("the inputs hold no arrays")
    shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in feeds.items())
    if any(not array.ndim for array in feeds.values()):
        raise FeedError(f"inputs without a batch axis: {shapes}")
    rows = {len(array) for array in feeds.values()}
    if len(rows) != 1:
        raise FeedError(f"inputs differ in their batch axis: {shapes}")
    (batch,) = rows
    slices = np.array_split(np.arange(batch), max(1, math.ceil(batch / spec.dims[0].max)))
    parts, times = [], []
    for members in slices:
        # A slice below the smallest batch is filled up with its last row, whose answers are dropped.
        missing = max(0, spec.dims[0].min - len(members)) if len(slices) > 1 else 0
        rows_taken = np.concatenate([members, np.repeat(members[-1:], missing)])
        part = {name: array[rows_taken] for name, array in feeds.items()}
        begin = time.perf_counter()
        parts.append(session.run(part)["y"][: len(members)])
        times.append((time.perf_counter() - begin) * 1e3)
    y = np.concatenate(parts)
    tokens = y.shape[0] * y.shape[1]
    padded = int((~feeds["mask"]).sum()) if spec.kind == "self" and spec.mask == "padding" else 0
    return Answers(y, InferReport(batch, len(parts), tokens - padded, padded, tuple(times), session.provider))
