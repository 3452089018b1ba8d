"""Which block was timed: two times can be held against each other only where both are of the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from mha_deploy.spec import AttentionSpec

# What two blocks may differ in and compute the same, or at the sizes measured the same.
ALIKE = ("name", "dims", "weights", "inputs_file", "dropout")


def block_of(spec: AttentionSpec) -> dict[str, object]:
    """What decides about a block's work, as JSON has it."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in asdict(spec).items()
        if name not in ALIKE
    }


def differences(a: Mapping[str, object], b: Mapping[str, object]) -> list[str]:
    """The names of what differs."""
    return [name for name in {**a, **b} if a.get(name) != b.get(name)]
