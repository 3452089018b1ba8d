"""The packed layout: the real tokens of many requests end to end, and the indices that find them.

A packed graph projects tokens [tokens, width], sets them out in rows [rows, longest] for the attention
core alone, and takes its answers back to [tokens, width]. Where each token goes are inputs, made here
from the lengths, so that no shape within the graph depends on data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mha_deploy.errors import SpecError
from mha_deploy.ragged import length_names
from mha_deploy.signature import LARGEST, Array, Dim, Signature, TensorSpec
from mha_deploy.spec import AttentionSpec

LAYOUTS = ("padded", "packed")


@dataclass(frozen=True, slots=True)
class Piece:
    """One request as a packed graph takes it: arrays [length, width] by input name.

    `keep` [key length] says which keys may be looked at. Each length is at least 1: where there is
    nothing to look at, one key stands there that is not kept.
    """

    tensors: Mapping[str, Array]
    keep: Array


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """A padded batch as pieces, a piece for each of its rows, and their answers set back.

    The tokens that the mask keeps are taken, wherever they stand. `keep` [batch, key] is the mask,
    `used` [batch, key] which keys are handed on. `queries`: how long the padded answer is.
    """

    spec: AttentionSpec
    pieces: tuple[Piece, ...]
    keep: Array
    used: Array
    queries: int

    @classmethod
    def of(cls, spec: AttentionSpec, feeds: Mapping[str, Array]) -> PaddedBatch:
        """`feeds` are those of the block's own padded contract."""
        data = [tensor.name for tensor in spec.signature.inputs if tensor.is_float]
        batch, queries = feeds[data[0]].shape[:2]
        keep = feeds.get("mask", np.ones((batch, feeds[data[-1]].shape[1]), bool))
        used = np.array([_used(spec, row) for row in keep])
        pieces = tuple(_piece(spec, feeds, row, keep[row], used[row]) for row in range(batch))
        return cls(spec, pieces, keep, used, queries)

    def set_back(self, answers: Sequence[Array]) -> Array:
        """`answers` [query length, d_model] by piece as [batch, queries, d_model]; padded query rows of
        self attention, which a packed graph does not compute, are 0."""
        y = np.zeros((len(answers), self.queries, answers[0].shape[1]), answers[0].dtype)
        for row, answer in enumerate(answers):
            # Where nothing is kept, every query's answer is that of a zero token which sees nothing.
            whole = self.spec.kind == "cross" or not self.keep[row].any()
            y[row, slice(None) if whole else self.used[row]] = answer
        return y


@dataclass(frozen=True, slots=True)
class RunCost:
    """What a run costs beside its projections, which are the same however requests are grouped.

    `run_us` once a run, `position_us` for each of the rows x longest positions (the mean of query and
    key positions in cross attention), `pair_us` for each of the rows x queries x keys scores.
    """

    run_us: float
    position_us: float
    pair_us: float

    def of(self, rows: int, queries: int, keys: int) -> float:
        """Microseconds of a run with `rows` requests padded to these lengths."""
        positions = (queries + keys) / 2
        return self.run_us + rows * (self.position_us * positions + self.pair_us * queries * keys)


# Nothing is known yet: as few runs as there can be.
UNMEASURED = RunCost(0.0, 0.0, 0.0)


def check_packable(spec: AttentionSpec) -> None:
    """
    Raises:
        SpecError: the block has a full mask, which speaks of pairs of positions in a padded batch.
    """
    if spec.mask == "full":
        raise SpecError(
            "mask = 'full' has no packed layout: packed requests carry lengths and no mask; set mask = "
            "'padding' or 'none', or export with the layout 'padded'"
        )


def graph_signature(spec: AttentionSpec) -> Signature:
    """The inputs and outputs of the packed graph of `spec`, in fp32.

    Raises:
        SpecError: the block has a full mask.
    """
    check_packable(spec)
    batch = spec.dims[0]
    rows = Dim("rows", 1, batch.opt, batch.max)
    dims = [rows]
    tensors = list[TensorSpec]()
    for prefix, names in _streams(spec).items():
        length = spec.signature.dim(spec.query_axis if "key" not in names else spec.key_axis)
        longest = Dim(f"{prefix}longest", 1, length.opt, length.max)
        most = min(batch.max * length.max, LARGEST)
        dims += [longest, Dim(f"{prefix}tokens", 1, min(batch.opt * length.opt, most), most)]
        tensors += [_tokens(spec, name, f"{prefix}tokens") for name in names]
    for prefix in _streams(spec):
        where = "where each row's tokens are"
        tensors.append(TensorSpec(f"{prefix}index", "int64", ("rows", f"{prefix}longest"), where))
    query, *_, key = (*_streams(spec), *_streams(spec))
    tensors.append(TensorSpec("mask", "bool", ("rows", f"{key}longest"), "True = a key, False = filling"))
    tensors.append(TensorSpec("place", "int64", (f"{query}tokens",), "where each answer is in the rows"))
    output = TensorSpec("y", "float32", (f"{query}tokens", spec.d_model))
    return Signature(tuple(tensors), (output,), tuple(dims))


def request_signature(spec: AttentionSpec) -> Signature:
    """What a user of the packed layout gives and gets, in fp32: tokens, lengths; as many as there are.

    Raises:
        SpecError: the block has a full mask.
    """
    check_packable(spec)
    requests = Dim("requests", 1, spec.dims[0].opt, LARGEST)
    names = tuple(name for group in _streams(spec).values() for name in group)
    prefix_of = {name: prefix for prefix, group in _streams(spec).items() for name in group}
    data = tuple(_tokens(spec, name, f"{prefix_of[name]}tokens") for name in names)
    lengths = tuple(TensorSpec(name, "int64", ("requests",)) for name in length_names(spec))
    dims = {dim.name: dim for dim in graph_signature(spec).dims}
    tokens = tuple(Dim(f"{p}tokens", 1, dims[f"{p}tokens"].opt, LARGEST) for p in _streams(spec))
    output = TensorSpec("y", "float32", (data[0].shape[0], spec.d_model))
    return Signature((*data, *lengths), (output,), (requests, *tokens))


def graph_feeds(spec: AttentionSpec, pieces: Sequence[Piece]) -> dict[str, Array]:
    """The inputs of the packed graph for these requests, a row for each."""
    feeds: dict[str, Array] = {}
    within: list[Array] = []
    for prefix, names in _streams(spec).items():
        for name in names:
            feeds[name] = np.concatenate([piece.tensors[name] for piece in pieces])
        lengths = np.array([len(piece.tensors[names[0]]) for piece in pieces])
        position = np.arange(lengths.max())
        inside = position < lengths[:, None]
        starts = np.cumsum(lengths) - lengths
        # A row is filled up with its own first token: what another request holds, NaN above all, would
        # reach this one through 0 x NaN, and the first is seen by every query, causal ones too.
        feeds[f"{prefix}index"] = starts[:, None] + np.where(inside, position, 0)
        within.append(inside)
    feeds["mask"] = np.zeros(within[-1].shape, bool)
    feeds["mask"][within[-1]] = np.concatenate([piece.keep for piece in pieces])
    feeds["place"] = np.flatnonzero(within[0])
    return feeds


def plan_runs(lengths: Sequence[tuple[int, int]], most_rows: int, cost: RunCost) -> list[tuple[int, ...]]:
    """Which requests, by index, share a run, such that all runs together cost least.

    `lengths` are (query, key) lengths. Requests are sorted by length, and every way to cut that order
    into runs of at most `most_rows` is weighed (dynamic programming over the cuts).
    """
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i][1], lengths[i][0], i))
    best, cuts = [0.0], [0]
    for end in range(1, len(order) + 1):
        queries = keys = 0
        weighed = []
        for start in range(end - 1, max(end - most_rows, 0) - 1, -1):
            q, kv = lengths[order[start]]
            queries, keys = max(queries, q), max(keys, kv)
            weighed.append((best[start] + cost.of(end - start, queries, keys), start))
        total, cut = min(weighed)  # of equal costs the one with fewer runs
        best.append(total)
        cuts.append(cut)
    runs = []
    end = len(order)
    while end:
        runs.append(tuple(order[cuts[end] : end]))
        end = cuts[end]
    return runs[::-1]


def _streams(spec: AttentionSpec) -> dict[str, tuple[str, ...]]:
    """Inputs that share lengths, by the prefix of their dims and indices; the queries' come first."""
    if spec.kind == "self":
        return {"": ("x",)}
    return {"q_": ("query",), "kv_": ("key", "value")}


def _used(spec: AttentionSpec, keep: Array) -> Array:
    """Which keys are handed on. A hole is one where places count: causal over keys of another input."""
    used = keep.copy()
    if spec.kind == "cross" and spec.causal:
        used = np.logical_or.accumulate(keep[::-1])[::-1]
    used[0] |= not used.any()
    return used


def _piece(spec: AttentionSpec, feeds: Mapping[str, Array], row: int, keep: Array, used: Array) -> Piece:
    tensors = {}
    for tensor in spec.signature.inputs:
        if tensor.is_float:
            tokens, of_keys = feeds[tensor.name][row], tensor.shape[1] == spec.key_axis
            tensors[tensor.name] = np.where(keep[:, None], tokens, 0)[used] if of_keys else tokens
    return Piece(tensors, keep[used])


def _tokens(spec: AttentionSpec, name: str, axis: str) -> TensorSpec:
    return TensorSpec(name, "float32", (axis, spec.signature.input(name).shape[-1]))
