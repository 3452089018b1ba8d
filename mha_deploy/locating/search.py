"""Where one artifact goes wrong on one case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
from onnx import NodeProto

from mha_deploy.bundle import Bundle
from mha_deploy.cases import Case
from mha_deploy.errors import GraphError
from mha_deploy.locating.budgets import Budget, Deviation, budgets
from mha_deploy.locating.expected import Expected
from mha_deploy.locating.exposed import ExposedGraph, first_nodes, first_that_does_not_run, inner_values
from mha_deploy.locating.inputs import GraphInputs, inputs_of
from mha_deploy.locating.pairing import aliases, live_nodes
from mha_deploy.locating.report import CANNOT_RUN, FUSION, NOT_FOUND, UNREADABLE, VALUE, Located
from mha_deploy.locating.walk import Walk, place_of
from mha_deploy.lowering.graph_edit import label
from mha_deploy.manifest import Artifact
from mha_deploy.sessions.onnx_runtime import one_line
from mha_deploy.signature import Array, Feeds


@dataclass(frozen=True, slots=True)
class _Suspect:
    """A graph and what it gets. `key` names these inputs among all."""

    model: onnx.ModelProto
    inputs: GraphInputs
    key: tuple[str, int]

    @property
    def feeds(self) -> Feeds:
        return self.inputs.feeds

    def compared(self, y: Array) -> Array:
        """The rows of the graph's answer that count, [rows, d_model]."""
        return self.inputs.answer(y)[self.inputs.compared]


class Locator:
    """Looks into one artifact. Its graph is made again from the bundle's weights, once.

    `max_relative_error` is the budget of an integer precision; 0 takes the one it was accepted with.

    Raises:
        BundleError: the bundle's weights are not the ones recorded.
    """

    def __init__(self, bundle: Bundle, artifact: Artifact, *, max_relative_error: float = 0.0) -> None:
        self._artifact, self._folder, self._spec = artifact, bundle.folder, bundle.spec
        accepted = float(artifact.details.get("max_relative_error", 0.0))
        self._max_relative_error = max_relative_error or accepted
        self._expected = Expected.of(bundle, artifact)
        self._graph = ExposedGraph(self._expected.model, inner_values(self._expected.model))
        self._known: dict[tuple[str, int], dict[str, Budget]] = {}

    def on(self, case: Case) -> Located:
        """Where the artifact goes wrong on `case`.

        Raises:
            BundleError: the artifact's file is not the one recorded.
            CheckError: the graph made again from the weights does not mean what PyTorch means.
        """
        return self.in_file(self._artifact.path(self._folder), case)

    def in_file(self, path: Path, case: Case) -> Located:
        """As `on`, for the file at `path` in the artifact's place."""
        found = Located(self._artifact.name, case.name, NOT_FOUND)
        try:
            model = onnx.load(str(path))
        except Exception as error:  # protobuf's DecodeError is no public name
            return replace(found, kind=UNREADABLE, note=f"{path.name} is no ONNX file: {one_line(error)}")
        for draw, inputs in enumerate(inputs_of(case, self._artifact, self._spec)):
            looked = self._on(_Suspect(model, inputs, (case.name, draw)), found)
            if looked.kind != NOT_FOUND:
                break
        return looked

    def _on(self, suspect: _Suspect, found: Located) -> Located:
        model, nodes = suspect.model, live_nodes(suspect.model)
        try:
            answer = ExposedGraph(model).run(suspect.feeds)["y"]
            values = ExposedGraph(model, _values_of(nodes)).run(suspect.feeds)
        except GraphError:
            return self._where_it_stops(found, suspect)
        with np.errstate(invalid="ignore", over="ignore"):
            walk = self._walk(suspect)
            found = walk.first_out_of_budget(found, nodes, values)
            finite = np.isfinite(suspect.compared(values["y"]).astype(np.float64)).all()
            if found.kind == NOT_FOUND and not finite:
                found = walk.first_overflow(found, nodes, values)
            if found.kind == NOT_FOUND:
                found = _fused_away(found, suspect, walk, answer)
        return found

    def _walk(self, suspect: _Suspect) -> Walk:
        """What each value may be off by on this case is found out once."""
        if suspect.key not in self._known:
            values = self._expected.values(suspect.inputs)
            truths = {name: values[to] for name, to in aliases(self._expected.model, values).items()}
            precision = self._artifact.precision
            self._known[suspect.key] = budgets(truths, self._graph, suspect.feeds, precision)
        return Walk(
            suspect.model,
            self._expected,
            self._known[suspect.key],
            self._artifact.precision,
            self._max_relative_error,
        )

    def _where_it_stops(self, found: Located, suspect: _Suspect) -> Located:
        """The node at which the runtime stops or, above it, the first value that is out of its budget."""
        node, message = first_that_does_not_run(suspect.model, suspect.feeds)
        found = replace(found, kind=CANNOT_RUN, note=message)
        if node is None:
            return found
        before = first_nodes(suspect.model, list(suspect.model.graph.node).index(node))
        values: Mapping[str, Array] = {}
        if before.graph.node:
            values = ExposedGraph(before, inner_values(before)).run(suspect.feeds)
        with np.errstate(invalid="ignore", over="ignore"):
            walk = self._walk(suspect)
            above = walk.first_out_of_budget(found, before.graph.node, values)
        if above.kind == VALUE:
            return replace(above, kind=CANNOT_RUN, note=f"the runtime stops at {label(node)}: {message}")
        here = walk.at(found, node, node.output[0], Deviation(np.nan, np.nan))
        return replace(here, kind=CANNOT_RUN, note=message)


def _values_of(nodes: Sequence[NodeProto]) -> list[str]:
    return [name for node in nodes for name in node.output if name]


def _fused_away(found: Located, suspect: _Suspect, walk: Walk, answer: Array) -> Located:
    """With every value shown the graph holds. Does it without, and which value's showing cures it?"""
    budget = walk.budgets["y"]
    settled = suspect.compared(np.broadcast_to(budget.settled, budget.truth.shape))
    compared = replace(budget, truth=suspect.compared(budget.truth), settled=settled)

    def off(y: Array) -> Deviation:
        return walk.deviation(compared, suspect.compared(y))

    deviation = off(answer)
    if deviation.held:
        return replace(found, note="every value that has a counterpart is within its budget here")
    cures = [
        place_of(node, name)
        for node in live_nodes(suspect.model)
        for name in filter(None, node.output)
        if name != "y" and off(ExposedGraph(suspect.model, [name]).run(suspect.feeds)["y"]).held
    ]
    return replace(
        found,
        kind=FUSION,
        place=cures[0] if cures else found.place,
        error=deviation.error,
        allowed=deviation.allowed,
        worst=deviation.worst,
        between=tuple(f"{place.node} ({place.op_type})" for place in cures[1:]),
        note="the fault goes away where values are exposed: the runtime's fusion of nodes is at fault",
    )
