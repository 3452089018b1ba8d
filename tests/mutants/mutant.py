"""One way to damage the ONNX of an attention block: what it is, what it edits, which nodes it hits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import onnx

from mutants.graph import Graph

DEMO, CAUSAL, PORTABLE = "demo", "causal", "portable"
FORMS = (DEMO, CAUSAL, PORTABLE)
CANONICAL = (DEMO, CAUSAL)
Damage = Callable[[Graph], list[str]]


def _unread(data: bytes) -> bytes:
    return data


@dataclass(frozen=True, slots=True)
class Mutant:
    """`damage` edits the graph and returns the names of the nodes that it damaged; none where the
    fault is no node's. `on_bytes` damages the written file. `runs`: the damaged file loads and runs
    at some size."""

    name: str
    what: str
    damage: Damage
    forms: tuple[str, ...] = FORMS
    runs: bool = True
    on_bytes: Callable[[bytes], bytes] = _unread

    def applied(self, model: onnx.ModelProto) -> tuple[bytes, onnx.ModelProto, list[str]]:
        """The damaged file, its model, and the damaged nodes; `model` stays as it is."""
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        nodes = self.damage(Graph(copy))
        return self.on_bytes(copy.SerializeToString()), copy, nodes


MUTANTS: list[Mutant] = []


def mutant(
    what: str,
    *,
    forms: tuple[str, ...] = FORMS,
    runs: bool = True,
    on_bytes: Callable[[bytes], bytes] = _unread,
) -> Callable[[Damage], Damage]:
    def register(damage: Damage) -> Damage:
        name = damage.__name__.replace("_", "-")
        MUTANTS.append(Mutant(name, what, damage, forms, runs, on_bytes))
        return damage

    return register
