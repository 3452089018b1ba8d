"""`infer`: a file of requests in, a file of answers out."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mha_deploy.batching import DEFAULT_TOKEN_BUDGET, InferReport, run_requests
from mha_deploy.bundle import Bundle
from mha_deploy.errors import FeedError
from mha_deploy.masks import keep_mask
from mha_deploy.ragged import Request, is_packed, join, pack, unpack
from mha_deploy.sessions import DEFAULT_PLACEMENT, Placement, Session
from mha_deploy.sessions.packed import PackedSession
from mha_deploy.signature import Array, Feeds
from mha_deploy.spec import AttentionSpec


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
    token_budget: int = DEFAULT_TOKEN_BUDGET,
    mask_form: str = "keep",
    placement: Placement = DEFAULT_PLACEMENT,
) -> Answers:
    """Run packed requests (see `ragged`) or padded inputs under the graph's own names.

    Packed requests are batched with others of near length, within `token_budget` tokens a batch; a
    packed artifact groups them by what a run costs instead (see `sessions.packed.PackedSession`).
    Padded inputs run as they are, in slices of the largest batch the graph takes; `mask_form` says
    how their mask is to be read (see `masks`).

    Raises:
        FeedError: names, shapes, dtypes or lengths that the block does not take.
    """
    spec = bundle.spec
    open_ = bundle.open_session if is_packed(tensors) else bundle.open_padded_session
    with open_(artifact, placement) as session:
        if isinstance(session, PackedSession):
            return _run_packed(session, unpack(spec, tensors))
        if is_packed(tensors):
            answers, report = run_requests(session, spec, unpack(spec, tensors), token_budget)
            return Answers(pack(answers), report)
        return _run_padded(session, spec, with_keep_mask(spec, tensors, mask_form))


def _run_packed(session: PackedSession, requests: Sequence[Request]) -> Answers:
    """Each run that the session plans by itself, to have its time.

    Padded tokens are positions that the attention core alone is filled up with.
    """
    lengths = [(request.q_len, request.kv_len) for request in requests]
    answers: dict[int, Array] = {}
    positions, times = 0, []
    for members in session.runs(lengths):
        feeds = join(session.spec, [requests[i] for i in members])
        begin = time.perf_counter()
        y = session.run(feeds)["y"]
        times.append((time.perf_counter() - begin) * 1e3)
        ends = np.cumsum([lengths[i][0] for i in members])[:-1]
        answers |= dict(zip(members, np.split(y, ends), strict=True))
        own = [lengths[i] if session.spec.kind == "cross" else lengths[i][:1] for i in members]
        positions += len(members) * sum(map(max, zip(*own, strict=True)))
    tokens = sum(sum(pair) if session.spec.kind == "cross" else pair[0] for pair in lengths)
    report = InferReport(
        len(requests), len(times), tokens, positions - tokens, tuple(times), session.provider
    )
    return Answers(pack([answers[i] for i in range(len(requests))]), report)


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
    rows = {len(array) if array.ndim else 0 for array in feeds.values()}
    if not feeds:
        raise FeedError("the inputs hold no arrays")
    if len(rows) != 1:
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in feeds.items())
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
