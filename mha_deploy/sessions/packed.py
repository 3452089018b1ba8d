"""Packed graphs behind tokens and lengths, and behind the padded contract for whoever compares."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np

from mha_deploy.errors import FeedError
from mha_deploy.packed import (
    UNMEASURED,
    PaddedBatch,
    Piece,
    RunCost,
    graph_feeds,
    plan_runs,
    request_signature,
)
from mha_deploy.ragged import pack, unpack
from mha_deploy.sessions.base import Session
from mha_deploy.sessions.stages import StagedSession, Stages
from mha_deploy.signature import Array, Feeds, Signature
from mha_deploy.spec import AttentionSpec

# Of so many timings of one shape the least counts: what disturbs a run only adds to it.
TIMINGS = 5


class PackedSession(Session):
    """Runs requests of different lengths over `inner`, a session of a packed graph of `spec`.

    Takes tokens [tokens, width] and lengths [requests] (`q_lengths` and `kv_lengths` in cross
    attention), each at least 1, and answers `y` [tokens, d_model] in their order. There may be any
    number of requests: they go through in runs of near length. What a run costs is measured on `inner`
    when requests of different lengths first come; a session that has measured groups equal lengths
    equally from then on. `cost` given, that counts and nothing is measured.

    Raises:
        SpecError: the block has a full mask.
    """

    def __init__(self, inner: Session, spec: AttentionSpec, *, cost: RunCost = UNMEASURED) -> None:
        signature = request_signature(spec)
        data = next(tensor for tensor in inner.signature.inputs if tensor.is_float)
        if data.dtype != signature.inputs[0].dtype:
            signature = signature.at(inner.precision)
        super().__init__(inner.name, signature, inner.precision, inner.provider)
        self.spec, self.graph = spec, inner
        self._cost = cost

    @property
    def padded_signature(self) -> Signature:
        """The block's own signature, in the dtypes of this artifact."""
        signature = self.spec.signature
        same = self.signature.inputs[0].dtype == signature.inputs[0].dtype
        return signature if same else signature.at(self.precision)

    def answers(self, pieces: Sequence[Piece]) -> list[Array]:
        """`y` [query length, d_model] for each piece, in their order."""
        found: dict[int, Array] = {}
        for members, feeds in self.graph_runs(pieces):
            y = self.graph.run(feeds)["y"]
            chosen = [pieces[i] for i in members]
            ends = np.cumsum([_lengths(piece)[0] for piece in chosen])[:-1]
            found |= dict(zip(members, np.split(y, ends), strict=True))
        return [found[i] for i in range(len(pieces))]

    def graph_runs(self, pieces: Sequence[Piece]) -> Iterator[tuple[tuple[int, ...], Feeds]]:
        """The runs of the graph that answer `pieces`: which of them, by index, and what it is fed.

        Raises:
            FeedError: a length is beyond what the block takes.
        """
        for members in self.runs([_lengths(piece) for piece in pieces]):
            yield members, graph_feeds(self.spec, [pieces[i] for i in members])

    def runs(self, lengths: Sequence[tuple[int, int]]) -> list[tuple[int, ...]]:
        """Which requests, by index, share a run of the graph, given (query, key) lengths.

        Raises:
            FeedError: a length is beyond what the block takes.
        """
        self._check_lengths(lengths)
        if self._cost == UNMEASURED and len(set(lengths)) > 1:
            self._cost = self._measured()
        return plan_runs(lengths, self.graph.signature.dim("rows").max, self._cost)

    def for_another_thread(self) -> PackedSession | None:
        graph = self.graph.for_another_thread()
        return PackedSession(graph, self.spec, cost=self._cost) if graph else None

    def _execute(self, feeds: Feeds) -> dict[str, Array]:
        requests = unpack(self.spec, feeds)
        pieces = [Piece(request.tensors, np.ones(request.kv_len, bool)) for request in requests]
        return {"y": pack(self.answers(pieces))}

    def _check_lengths(self, lengths: Sequence[tuple[int, int]]) -> None:
        axes = (self.spec.query_axis, self.spec.key_axis)
        for index, pair in enumerate(lengths):
            for axis, length in zip(axes, pair, strict=True):
                most = self.spec.signature.dim(axis).max
                if length > most:
                    raise FeedError(
                        f"request {index} has {axis} = {length}; this block takes {axis} 1..{most}"
                    )

    def _measured(self) -> RunCost:
        """What runs of `inner` take, from three shapes of one row with one token to project.

        The least shape gives what any run costs. Two more, at the lengths to tune for and at half of
        them, tell what grows with positions from what grows with their pairs. One row, since a short
        run has the best chance of not being disturbed.
        """
        spec = self.spec
        dims = [spec.signature.dim(axis) for axis in (spec.query_axis, spec.key_axis)]
        tuned = [min(max(2, dim.opt), dim.max) for dim in dims]
        run_us = self._timed_us(1, 1)
        grows, took = [], []
        for queries, keys in (tuned, [max(1, length // 2) for length in tuned]):
            grows.append([(queries + keys) / 2, queries * keys])
            took.append(self._timed_us(queries, keys) - run_us)
        (position_us, pair_us), *_ = np.linalg.lstsq(np.array(grows), np.array(took))
        return RunCost(run_us, max(0.0, float(position_us)), max(0.0, float(pair_us)))

    def _timed_us(self, queries: int, keys: int) -> float:
        signature = self.graph.signature
        sizes = dict.fromkeys((dim.name for dim in signature.dims), 1)
        for tensor in signature.inputs:
            if tensor.name.endswith("index"):
                sizes[str(tensor.shape[1])] = keys if tensor.name.startswith("kv_") else queries
        feeds = {
            tensor.name: np.full(signature.shape(tensor, sizes), tensor.dtype == "bool", tensor.dtype)
            for tensor in signature.inputs
        }
        times = []
        for _ in range(TIMINGS):
            start = time.perf_counter()
            self.graph.run(feeds)
            times.append((time.perf_counter() - start) * 1e6)
        return min(times)

    def _release(self) -> None:
        self.graph.close()


class PaddedView(Session):
    """The block's own padded contract over a packed session: what verification and bench run.

    Tokens are taken and answers set back as `packed.PaddedBatch` says. Over a graph on a device it is a
    `StagedSession`, whose stages are those of all the runs that a batch takes.
    """

    def __init__(self, packed: PackedSession) -> None:
        super().__init__(packed.name, packed.padded_signature, packed.precision, packed.provider)
        self._packed = packed
        if isinstance(packed.graph, StagedSession):
            self.run_in_stages = self._run_in_stages

    def _run_in_stages(self, feeds: Feeds, *, cold: bool) -> Stages:
        self.signature.check(feeds)
        graph, pieces = self._packed.graph, PaddedBatch.of(self._packed.spec, feeds).pieces
        assert isinstance(graph, StagedSession)
        taken = Stages(0.0, 0.0, 0.0)
        for number, (_, given) in enumerate(self._packed.graph_runs(pieces)):
            # Of several runs the first is cold: what one leaves in the cache is there for the next.
            taken += graph.run_in_stages(given, cold=cold and number == 0)
        return taken

    def _execute(self, feeds: Feeds) -> dict[str, Array]:
        batch = PaddedBatch.of(self._packed.spec, feeds)
        return {"y": batch.set_back(self._packed.answers(batch.pieces))}

    def _release(self) -> None:
        self._packed.close()


def _lengths(piece: Piece) -> tuple[int, int]:
    """Query and key length: the first input is the queries'."""
    return len(next(iter(piece.tensors.values()))), len(piece.keep)
