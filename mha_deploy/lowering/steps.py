"""What a lowering hands back: the model, and every rewrite by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import onnx

from mha_deploy.errors import GraphError


@dataclass(frozen=True, slots=True)
class Step:
    """One rewrite. `node` is the node's name, `rule` a short kebab name, `why` what the target refuses."""

    node: str
    rule: str
    why: str

    def __str__(self) -> str:
        return f"{self.node}: {self.rule} ({self.why})"


@dataclass(frozen=True, slots=True)
class Lowered:
    """The model after all rewrites; `steps` is empty, and the model the one given, if none was needed."""

    model: onnx.ModelProto
    steps: tuple[Step, ...]


Lowering = Callable[[onnx.ModelProto], Lowered]


def in_turn(model: onnx.ModelProto, *lowerings: Lowering) -> Lowered:
    """One after the other; what one has nothing to do with goes on to the next as it is."""
    steps = list[Step]()
    for lowering in lowerings:
        lowered = lowering(model)
        model, steps = lowered.model, [*steps, *lowered.steps]
    return Lowered(model, tuple(steps))


def refusal(node: str, what: str, why: str) -> GraphError:
    """The error for a node that has no lowering: its name, the feature, and why or what to do."""
    return GraphError(f"node {node!r}: {what} has no lowering: {why}")
