"""What a peer is given and what it gives back.

A peer is a module with `PACKAGES`, the distributions that its figures depend on, and
`build(Task) -> Model`. It uses what its own environment holds and nothing of this project, except
those that are this project.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Task:
    """The block to bring up: self attention with a key padding mask (True = keep), biases, no norm.

    `weights`: safetensors with query, key, value and output `.weight` [out, in] and `.bias`, fp32.
    `folder` is the contestant's own to write to; `shared` is for contestants that are one project's.
    """

    d_model: int
    num_heads: int
    weights: Path
    threads: int
    folder: Path
    shared: Path
    options: Mapping[str, Any]


def as_it_is(answer: Array, _mask: Array) -> Array:
    return answer


@dataclass(frozen=True)
class Model:
    """`bind` takes x [batch, seq, d_model] float32 and mask [batch, seq] bool into the form that the
    peer's users hold their inputs in, and gives what is timed: a run, whose result numpy understands.

    `padded` makes [batch, seq, d_model] of a result for whom it is of another layout. `notes`: what a
    reader should know of how it was made, a sentence each.
    """

    bind: Callable[[Array, Array], Callable[[], Any]]
    notes: tuple[str, ...] = ()
    padded: Callable[[Array, Array], Array] = as_it_is
