"""What is measured: blocks, shapes, inputs, and the answers in float64 that they are held against."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from mha_deploy import AttentionSpec
from mha_deploy.signature import Array
from mha_deploy.verification.metrics import relative_error

NUM_HEADS = {384: 12, 768: 12, 1024: 16}
SHAPES = ((1, 16), (1, 64), (1, 128), (1, 256), (8, 16), (8, 64), (8, 128), (4, 512), (1, 1024))
QUICK_SHAPES = ((1, 16), (1, 128), (8, 64))
# 32 requests, as the serving benchmark draws them: mean 27 tokens, 2 to 160.
REQUESTS, MEAN_LENGTH, SPREAD, SHORTEST, LONGEST = 32, 27, 0.9, 2, 160
FILL = (0.17, 0.25)


@dataclass(frozen=True, slots=True)
class Cell:
    """One size and shape; `lengths` of its requests, right-padded to `seq`."""

    d_model: int
    lengths: tuple[int, ...]
    seq: int
    ragged: bool = False

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def name(self) -> str:
        return f"{'ragged ' if self.ragged else ''}{self.batch} x {self.seq}, d_model {self.d_model}"

    @property
    def fill(self) -> float:
        """The share of the padded batch that is real tokens."""
        return sum(self.lengths) / (self.batch * self.seq)

    @property
    def flops(self) -> int:
        """Of the padded batch."""
        return spec_of(self.d_model).flops({"batch": self.batch, "seq": self.seq})

    @property
    def projection_flops(self) -> int:
        """Of one of the padded batch's projections, d_model to d_model."""
        return 2 * self.batch * self.seq * self.d_model**2

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "d_model": self.d_model,
            "batch": self.batch,
            "seq": self.seq,
            "lengths": list(self.lengths),
            "ragged": self.ragged,
            "fill": self.fill,
            "flops": self.flops,
        }


def cells(d_model: int, shapes: tuple[tuple[int, int], ...]) -> Iterator[Cell]:
    """The shapes, whose first request fills its row and whose others end in the row's second half; a
    ragged batch at the end."""
    random = np.random.default_rng(0)
    for batch, seq in shapes:
        others = random.integers(seq // 2, seq, batch - 1, endpoint=True)
        yield Cell(d_model, (seq, *map(int, others)), seq)
    yield ragged_cell(d_model)


def ragged_cell(d_model: int, seed: int = 0) -> Cell:
    """Log-normal lengths, drawn until their fill lies within FILL; `seq` is the longest of them."""
    random = np.random.default_rng(seed)
    median = MEAN_LENGTH / np.exp(SPREAD**2 / 2)
    while True:
        drawn = np.rint(random.lognormal(np.log(median), SPREAD, REQUESTS)).astype(int)
        lengths = np.clip(drawn, SHORTEST, LONGEST)
        if FILL[0] <= lengths.mean() / lengths.max() <= FILL[1]:
            return Cell(d_model, tuple(map(int, lengths)), int(lengths.max()), ragged=True)


def spec_of(d_model: int) -> AttentionSpec:
    return AttentionSpec(d_model, NUM_HEADS[d_model], name=f"attention-{d_model}")


def inputs_of(cell: Cell) -> tuple[Array, Array]:
    """x [batch, seq, d_model] float32, standard normal, and its mask [batch, seq], True = keep."""
    random = np.random.default_rng(1)
    x = random.standard_normal((cell.batch, cell.seq, cell.d_model), np.float32)
    return x, np.arange(cell.seq) < np.array(cell.lengths)[:, None]


def masked_inputs(d_model: int) -> tuple[Array, Array]:
    """A request of 5 tokens in a row of 8, and a row in which nothing is kept."""
    x = np.random.default_rng(2).standard_normal((2, 8, d_model), np.float32)
    mask = np.zeros((2, 8), bool)
    mask[0, :5] = True
    return x, mask


def write_weights(d_model: int, folder: Path) -> Path:
    """The block's weights, from a seed, in a safetensors file."""
    from safetensors.torch import save_file

    from mha_deploy.weights.reference import seeded_tensors

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"weights-{d_model}.safetensors"
    save_file(seeded_tensors(spec_of(d_model)), path)
    return path


@cache
def _reference(d_model: int) -> Any:
    from mha_deploy.attention import MultiHeadAttention
    from mha_deploy.weights.reference import seeded_tensors

    module = MultiHeadAttention(spec_of(d_model))
    module.load_state_dict(seeded_tensors(spec_of(d_model)))
    return module.double().eval()


def truth(x: Array, mask: Array) -> Array:
    """The block's answer in float64, by the reference module."""
    import torch

    with torch.inference_mode():
        y: Array = _reference(x.shape[-1])(torch.from_numpy(x).double(), torch.from_numpy(mask)).numpy()
    return y


def error_of(answer: Array, right: Array, rows: Array) -> float:
    """Relative Frobenius error over the `rows` that count; inf where the answer has another shape."""
    if answer.shape != right.shape:
        return float("inf")
    error = relative_error(answer[rows].astype(np.float64), right[rows])
    return error if np.isfinite(error) else float("inf")
