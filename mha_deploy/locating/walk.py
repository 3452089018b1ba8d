"""Down a graph in its own order, to the first value that is out of its budget."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import onnx
from onnx import NodeProto

from mha_deploy.locating.budgets import Budget, Deviation
from mha_deploy.locating.differences import differences
from mha_deploy.locating.expected import Expected
from mha_deploy.locating.pairing import paired, producers, unjudged_above
from mha_deploy.locating.report import OVERFLOW, VALUE, Located, Place
from mha_deploy.lowering.graph_edit import label
from mha_deploy.precision import Precision
from mha_deploy.signature import Array


@dataclass(slots=True)
class Walk:
    """One suspect against what it should be. `judged` are the values that were compared, with the
    value of the reference that each is; `unmatched` those that have none.

    `max_relative_error` is the budget of an integer precision.
    """

    suspect: onnx.ModelProto
    expected: Expected
    budgets: Mapping[str, Budget]
    precision: Precision
    max_relative_error: float
    pairs: dict[str, str] = field(init=False)
    judged: dict[str, str] = field(default_factory=dict)
    unmatched: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pairs = paired(self.suspect, self.expected.model)

    def first_out_of_budget(
        self, found: Located, nodes: Iterable[NodeProto], values: Mapping[str, Array]
    ) -> Located:
        """`found` with the place filled in; as it was, but for the counts, where every value holds."""
        for node in nodes:
            for name in filter(None, node.output):
                twin = self._twin(node, name, values[name])
                if not twin:
                    self.unmatched.append(name)
                    continue
                self.judged[name] = twin
                deviation = self.deviation(self.budgets[twin], values[name])
                if not deviation.held:
                    return self._counted(self.at(found, node, name, deviation))
        return self._counted(found)

    def first_overflow(
        self, found: Located, nodes: Iterable[NodeProto], values: Mapping[str, Array]
    ) -> Located:
        """The first value that is not finite where the reference's in fp64 is."""
        for node in nodes:
            for name in filter(None, node.output):
                budget = self.budgets.get(self._twin(node, name, values[name]))
                if budget is None or budget.truth.dtype.kind != "f":
                    continue
                lost = np.isfinite(budget.truth) & ~np.isfinite(values[name].astype(np.float64))
                if lost.any():
                    largest = float(np.abs(budget.truth[lost]).max())
                    how = f"{self.precision.value} does not hold it: {largest:.3g} in fp64"
                    place = tuple(int(index) for index in np.argwhere(lost)[0])
                    return replace(
                        self.at(found, node, name, Deviation(np.inf, np.nan, place, how)), kind=OVERFLOW
                    )
        return found

    def at(self, found: Located, node: NodeProto, name: str, deviation: Deviation) -> Located:
        """`found` with what is known of `node`, whose value `name` is off as `deviation` says."""
        pairs = {**self.pairs, **self.judged}
        stored = {tensor.name for tensor in self.suspect.graph.initializer}
        above = unjudged_above(node, producers(self.suspect), pairs, stored)
        return replace(
            found,
            kind=VALUE,
            place=place_of(node, name),
            error=deviation.error,
            allowed=deviation.allowed,
            worst=deviation.worst,
            because=differences(node, self.suspect, self.expected.model, pairs, self.expected.weights),
            between=tuple(f"{label(each)} ({each.op_type})" for each in above),
            note=deviation.how,
        )

    def deviation(self, budget: Budget, value: Array) -> Deviation:
        return budget.deviation(value, self.precision, self.max_relative_error)

    def _counted(self, found: Located) -> Located:
        count = len(self.judged) + len(self.unmatched)
        return replace(found, values=count, unmatched=tuple(self.unmatched))

    def _twin(self, node: NodeProto, name: str, value: Array) -> str:
        """The value of the reference that `name` is: by name or structure, past a cast, or by its
        numbers; "" for none."""
        if self.pairs.get(name, "") in self.budgets:
            return self.pairs[name]
        if value.dtype.kind != "f" or value.ndim < 2:
            return ""
        if node.op_type == "Cast" and self.judged.get(node.input[0]):
            return self.judged[node.input[0]]
        alike = (
            other
            for other, budget in self.budgets.items()
            if budget.truth.shape == value.shape and budget.truth.dtype.kind == "f"
        )
        return next((other for other in alike if self.deviation(self.budgets[other], value).held), "")


def place_of(node: NodeProto, value: str) -> Place:
    source = next((prop.value for prop in node.metadata_props if prop.key == "source"), "")
    return Place(label(node), node.op_type, value, source)
