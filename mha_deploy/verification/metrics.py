"""How far an answer is from the truth, and where."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mha_deploy.signature import Array


@dataclass(frozen=True, slots=True)
class Errors:
    """An answer [batch, query, d_model] against the truth, over the rows that are compared.

    `max_abs`: largest absolute error, in the output's own unit. `relative`: Frobenius norm of the
    error over that of the truth. `cosine`: of the row whose direction is furthest off.
    `sqnr_db`: 20 log10 of the inverse of `relative`, signal to quantisation noise. `worst`: batch,
    position and feature of the largest error. NaN or inf in a compared row makes them inf, inf,
    -1 and -inf, and `worst` its place.
    """

    max_abs: float
    relative: float
    cosine: float
    sqnr_db: float
    worst: tuple[int, int, int]

    @classmethod
    def of(cls, answer: Array, truth: Array, rows: Array) -> Errors:
        error = np.where(rows[:, :, None], np.abs(answer - truth), 0.0)
        found = np.unravel_index(int(np.argmax(np.where(np.isfinite(error), error, np.inf))), error.shape)
        worst = (int(found[0]), int(found[1]), int(found[2]))
        ours, right = answer[rows], truth[rows]
        if not np.isfinite(ours - right).all():
            return cls(np.inf, np.inf, -1.0, -np.inf, worst)
        relative = relative_error(ours, right)
        decibels = -20.0 * float(np.log10(relative)) if relative else np.inf
        return cls(float(error.max(initial=0.0)), relative, worst_cosine(ours, right), decibels, worst)


def relative_error(answer: Array, truth: Array) -> float:
    """Frobenius norm of the error over that of the truth."""
    norm = float(np.linalg.norm(truth))
    error = float(np.linalg.norm(answer - truth))
    return error / norm if norm else error


def worst_cosine(answer: Array, truth: Array) -> float:
    """The smallest cosine between a row of `answer` and its row of `truth`, both [rows, features].

    A row of zeros has no direction: it counts as 1 against another one, else as 0.
    """
    lengths = np.linalg.norm(answer, axis=1), np.linalg.norm(truth, axis=1)
    product = lengths[0] * lengths[1]
    both_zero = (lengths[0] == 0) & (lengths[1] == 0)
    dots = (answer * truth).sum(axis=1)
    cosines = np.where(product > 0, dots / np.where(product > 0, product, 1.0), both_zero)
    return float(np.minimum(cosines, 1.0).min(initial=1.0))
