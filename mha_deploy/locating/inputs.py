"""What a graph gets of a case: the padded inputs in its dtypes, or the same packed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mha_deploy.cases import Case
from mha_deploy.manifest import Artifact
from mha_deploy.packed import PaddedBatch, graph_feeds
from mha_deploy.signature import Array, Feeds
from mha_deploy.spec import AttentionSpec
from mha_deploy.verification import as_inputs


def is_float(array: Array) -> bool:
    """bf16, which NumPy takes for no float, included."""
    return array.dtype.kind not in "biu"


@dataclass(frozen=True, slots=True)
class GraphInputs:
    """`feeds` are the graph's, `padded` the same by the block's own contract. `compared` [batch, query]
    marks the rows of the padded answer that count."""

    feeds: Feeds
    padded: Feeds
    compared: Array
    batch: PaddedBatch | None

    def answer(self, y: Array) -> Array:
        """The graph's `y` as [batch, query, d_model]."""
        if self.batch is None:
            return y
        ends = np.cumsum([len(next(iter(piece.tensors.values()))) for piece in self.batch.pieces])[:-1]
        return self.batch.set_back(np.split(y, ends))

    @property
    def size(self) -> int:
        return sum(array.size for array in self.padded.values())


def inputs_of(case: Case, artifact: Artifact, spec: AttentionSpec) -> Iterator[GraphInputs]:
    """One for each draw of the case."""
    for feeds, _ in case.draws:
        if artifact.layout == "packed":
            batch = PaddedBatch.of(spec, feeds)
            packed = as_inputs(graph_feeds(spec, batch.pieces), artifact.signature)
            yield GraphInputs(packed, feeds, case.compared, batch)
        else:
            yield GraphInputs(as_inputs(feeds, artifact.signature), feeds, case.compared, None)
