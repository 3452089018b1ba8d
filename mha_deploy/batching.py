"""Ragged requests through a padded graph: which requests share a batch, and each one's own answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from mha_deploy.errors import FeedError
from mha_deploy.ragged import Request, pad
from mha_deploy.sessions import Session
from mha_deploy.signature import Array
from mha_deploy.spec import AttentionSpec

# On a CPU, batches beyond about 512 tokens get slower per token.
DEFAULT_TOKEN_BUDGET = 512
# A request joins a batch while at most this share of the batch's tokens would be padding.
MAX_PADDING = 0.125


@dataclass(frozen=True, slots=True)
class Plan:
    """One batch: which requests (by index), and the size of every dim of the graph."""

    members: tuple[int, ...]
    sizes: dict[str, int]


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


def plan_batches(
    spec: AttentionSpec, requests: Sequence[Request], token_budget: int = DEFAULT_TOKEN_BUDGET
) -> list[Plan]:
    """Batches of requests of near length, longest first, each within `token_budget` padded tokens.

    Tokens are query positions, plus key positions in cross attention. A request beyond the budget
    runs alone. Without a mask there is no padding: a batch then holds requests of one length.

    Raises:
        FeedError: a request is longer or shorter than the graph takes, or the budget is below 1.
    """
    if token_budget < 1:
        raise FeedError(f"token budget {token_budget}; expected at least 1")
    for index, request in enumerate(requests):
        _check_lengths(spec, index, request)
    order = sorted(range(len(requests)), key=lambda i: (-requests[i].kv_len, -requests[i].q_len, i))
    groups: list[list[int]] = []
    for index in order:
        if groups and _joins(spec, [requests[i] for i in (*groups[-1], index)], token_budget):
            groups[-1].append(index)
        else:
            groups.append([index])
    return [Plan(tuple(group), _sizes(spec, [requests[i] for i in group])) for group in groups]


def run_requests(
    session: Session,
    spec: AttentionSpec,
    requests: Sequence[Request],
    token_budget: int = DEFAULT_TOKEN_BUDGET,
) -> tuple[list[Array], InferReport]:
    """Answers [q_len, d_model] in the order of `requests`, and what it took."""
    answers: dict[int, Array] = {}
    times, padded = [], 0
    plans = plan_batches(spec, requests, token_budget)
    for plan in plans:
        feeds = pad(spec, [requests[i] for i in plan.members], plan.sizes)
        start = time.perf_counter()
        y = session.run(feeds)["y"]
        times.append((time.perf_counter() - start) * 1e3)
        padded += _tokens(spec, plan.sizes)
        for row, index in enumerate(plan.members):
            answers[index] = y[row, : requests[index].q_len]
    tokens = sum(_request_tokens(spec, request) for request in requests)
    report = InferReport(len(requests), len(plans), tokens, padded - tokens, tuple(times), session.provider)
    return [answers[i] for i in range(len(requests))], report


def _check_lengths(spec: AttentionSpec, index: int, request: Request) -> None:
    for axis, length in ((spec.query_axis, request.q_len), (spec.key_axis, request.kv_len)):
        dim = spec.signature.dim(axis)
        # Shorter requests can be padded where a mask says so; longer ones are never cut.
        shortest = dim.min if spec.mask == "none" else 1
        if not shortest <= length <= dim.max:
            raise FeedError(
                f"request {index} has {axis} = {length}; this block takes {axis} {dim.min}..{dim.max}"
            )


def _joins(spec: AttentionSpec, members: list[Request], token_budget: int) -> bool:
    if len(members) > spec.dims[0].max:
        return False
    q_lens, kv_lens = {m.q_len for m in members}, {m.kv_len for m in members}
    if spec.mask == "none" and (len(q_lens) > 1 or len(kv_lens) > 1):
        return False
    sizes = _sizes(spec, members)
    if _tokens(spec, sizes) > token_budget:
        return False
    # What the dims' minima add would be there in any batch: it speaks against no member.
    rows = _tokens(spec, {**sizes, spec.dims[0].name: len(members)})
    real = sum(_tokens(spec, {**_sizes(spec, [m]), spec.dims[0].name: 1}) for m in members)
    return rows - real <= MAX_PADDING * rows


def _sizes(spec: AttentionSpec, members: list[Request]) -> dict[str, int]:
    batch, q, kv = spec.dims[0], spec.signature.dim(spec.query_axis), spec.signature.dim(spec.key_axis)
    return {
        batch.name: max(batch.min, len(members)),
        q.name: max(q.min, *(m.q_len for m in members)),
        kv.name: max(kv.min, *(m.kv_len for m in members)),
    }


def _tokens(spec: AttentionSpec, sizes: dict[str, int]) -> int:
    lengths = {axis: sizes[axis] for axis in (spec.query_axis, spec.key_axis)}
    return sizes[spec.dims[0].name] * sum(lengths.values())


def _request_tokens(spec: AttentionSpec, request: Request) -> int:
    return request.q_len if spec.kind == "self" else request.q_len + request.kv_len
