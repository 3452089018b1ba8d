"""How requests become a session's inputs, and its outputs answers: one class a layout of graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from mha_deploy.packed import Piece, graph_feeds
from mha_deploy.ragged import Request, pad
from mha_deploy.runner.ticket import Shape
from mha_deploy.sessions import Session
from mha_deploy.sessions.packed import PackedSession
from mha_deploy.signature import Array, Feeds, Signature
from mha_deploy.spec import AttentionSpec


class Layout(Protocol):
    """What the runner must know of a graph's inputs.

    `signature` is what requests are held against: the block's own, in the dtypes of the artifact.
    `least_rows` is the smallest batch that the graph takes. `mixes` says whether requests of different
    lengths can share a run, `packs` whether projections are then computed for their tokens alone.
    """

    signature: Signature
    least_rows: int
    mixes: bool
    packs: bool

    def shape(self, request: Request) -> Shape:
        """The lengths at which a request runs alone; requests of one shape may always run together."""

    def feeds(self, requests: Sequence[Request], shape: Shape) -> Feeds:
        """Inputs of the session for these requests together."""

    def answers(self, y: Array, requests: Sequence[Request]) -> list[Array]:
        """Each request's own answer [q_len, d_model]."""

    def padded_tokens(self, rows: int, shape: Shape, tokens: int) -> int:
        """Tokens that the projections compute beside the `tokens` of the requests."""


class PaddedLayout:
    """One row a request, padded at the end to the batch's lengths: what `export` writes."""

    packs = False

    def __init__(self, spec: AttentionSpec, signature: Signature) -> None:
        self._spec, self.signature = spec, signature
        self._rows, self.least_rows = spec.dims[0], spec.dims[0].min
        self._q, self._kv = spec.signature.dim(spec.query_axis), spec.signature.dim(spec.key_axis)
        self.mixes = spec.mask != "none"
        self._kept: Array = np.ones((1, 0), bool)

    def shape(self, request: Request) -> Shape:
        return max(request.q_len, self._q.min), max(request.kv_len, self._kv.min)

    def feeds(self, requests: Sequence[Request], shape: Shape) -> Feeds:
        rows = max(len(requests), self.least_rows)
        if rows == 1 and shape == (requests[0].q_len, requests[0].kv_len):
            return self._alone(requests[0])
        return pad(
            self._spec, requests, {self._rows.name: rows, self._q.name: shape[0], self._kv.name: shape[1]}
        )

    def _alone(self, request: Request) -> Feeds:
        """One request that fills its row: its own arrays, uncopied."""
        feeds = {name: array[None] for name, array in request.tensors.items()}
        if self._spec.mask == "padding":
            feeds["mask"] = request.mask[None] if request.mask.size else self._all_kept(request.kv_len)
        elif self._spec.mask == "full":
            everything = np.ones((1, request.q_len, request.kv_len), bool)
            feeds["attn_mask"] = request.mask[None] if request.mask.size else everything
        return feeds

    def _all_kept(self, length: int) -> Array:
        """[1, length] of True, out of one array for the longest so far."""
        if length > self._kept.shape[1]:
            self._kept = np.ones((1, length), bool)
        return self._kept[:, :length]

    def answers(self, y: Array, requests: Sequence[Request]) -> list[Array]:
        return [y[row, : request.q_len] for row, request in enumerate(requests)]

    def padded_tokens(self, rows: int, shape: Shape, tokens: int) -> int:
        return max(rows, self.least_rows) * positions(self._spec, shape) - tokens


class PackedLayout:
    """The tokens of all requests end to end: what `export --layout packed` writes.

    Only the attention core, which sets each request out in a row of its own, has padding.
    """

    packs = mixes = True
    least_rows = 1

    def __init__(self, spec: AttentionSpec, signature: Signature) -> None:
        self._spec, self.signature = spec, signature

    def shape(self, request: Request) -> Shape:
        return request.q_len, request.kv_len

    def feeds(self, requests: Sequence[Request], shape: Shape) -> Feeds:  # noqa: ARG002 (the lengths say it)
        return graph_feeds(self._spec, [self._piece(request) for request in requests])

    def _piece(self, request: Request) -> Piece:
        """As in the padded graph, what the request's own mask hides is 0, and its queries are answered."""
        if not request.mask.size:
            return Piece(request.tensors, np.ones(request.kv_len, bool))
        keep = request.mask
        hidden = [
            tensor.name
            for tensor in self.signature.inputs
            if tensor.is_float and tensor.shape[1] == self._spec.key_axis
        ]
        cleared = {name: np.where(keep[:, None], request.tensors[name], 0) for name in hidden}
        return Piece({**request.tensors, **cleared}, keep)

    def answers(self, y: Array, requests: Sequence[Request]) -> list[Array]:
        ends = np.cumsum([request.q_len for request in requests])[:-1]
        return np.split(y, ends)

    def padded_tokens(self, rows: int, shape: Shape, tokens: int) -> int:  # noqa: ARG002 (there are none)
        return 0


def positions(spec: AttentionSpec, shape: Shape) -> int:
    """Positions of a row at these lengths, counted as `Request.tokens` counts tokens."""
    return shape[0] if spec.kind == "self" else sum(shape)


def laid_out(session: Session, spec: AttentionSpec) -> tuple[Session, Layout]:
    """The session that a worker runs, and the layout of its inputs."""
    if isinstance(session, PackedSession):
        return session.graph, PackedLayout(spec, session.padded_signature)
    return session, PaddedLayout(spec, session.signature)
