"""How requests become a session's inputs, and its outputs answers: one class a layout of graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from mha_deploy.ragged import Request, pad
from mha_deploy.runner.ticket import Shape
from mha_deploy.signature import Array, Feeds
from mha_deploy.spec import AttentionSpec


class Layout(Protocol):
    """What the runner must know of a graph's inputs."""

    def shape(self, request: Request) -> Shape:
        """The lengths at which a request runs alone; requests of one shape may always run together."""

    def feeds(self, requests: Sequence[Request], shape: Shape) -> Feeds:
        """Inputs of the session for these requests together."""

    def answers(self, y: Array, requests: Sequence[Request]) -> list[Array]:
        """Each request's own answer [q_len, d_model]."""

    def tokens(self, rows: int, shape: Shape) -> int:
        """Tokens that a run computes, padding included."""


class PaddedLayout:
    """One row a request, padded at the end to the batch's lengths: what `export` writes."""

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec
        self._rows = spec.dims[0]
        self._q, self._kv = spec.signature.dim(spec.query_axis), spec.signature.dim(spec.key_axis)

    def shape(self, request: Request) -> Shape:
        return max(request.q_len, self._q.min), max(request.kv_len, self._kv.min)

    def feeds(self, requests: Sequence[Request], shape: Shape) -> Feeds:
        rows = max(len(requests), self._rows.min)
        if rows == 1 and shape == (requests[0].q_len, requests[0].kv_len):
            return self._alone(requests[0])
        return pad(
            self._spec, requests, {self._rows.name: rows, self._q.name: shape[0], self._kv.name: shape[1]}
        )

    def _alone(self, request: Request) -> Feeds:
        """One request that fills its row: its own arrays, uncopied."""
        feeds = {name: array[None] for name, array in request.tensors.items()}
        if self._spec.mask == "padding":
            feeds["mask"] = request.mask[None] if request.mask.size else np.ones((1, request.kv_len), bool)
        elif self._spec.mask == "full":
            everything = np.ones((1, request.q_len, request.kv_len), bool)
            feeds["attn_mask"] = request.mask[None] if request.mask.size else everything
        return feeds

    def answers(self, y: Array, requests: Sequence[Request]) -> list[Array]:
        return [y[row, : request.q_len] for row, request in enumerate(requests)]

    def tokens(self, rows: int, shape: Shape) -> int:
        length = shape[0] if self._spec.kind == "self" else sum(shape)
        return max(rows, self._rows.min) * length
