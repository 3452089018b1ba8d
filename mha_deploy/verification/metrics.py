"""How far an answer is from the truth, and where."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from mha_deploy.signature import Array


@dataclass(frozen=True, slots=True)
class Errors:
    """An answer [batch, query, d_model] against the truth, over the rows that are compared.

    `max_abs`: largest absolute error, in the output's own unit. `relative`: Frobenius norm of the
    error over that of the truth. `cosine`: of the row whose direction is furthest off.
    `sqnr_db`: 20 log10 of the inverse of `relative`, signal to quantisation noise. `worst`: batch,
    position and feature of the largest error. `features` [d_model]: root mean square of each
    feature's error. NaN or inf in a compared row makes them inf, inf, -1, -inf and inf, and `worst`
    its place.
    """

    max_abs: float
    relative: float
    cosine: float
    sqnr_db: float
    worst: tuple[int, int, int]
    features: Array = field(compare=False)

    @classmethod
    def of(cls, answer: Array, truth: Array, rows: Array) -> Errors:
        ours, right = answer[rows], truth[rows]
        error = np.abs(ours - right)
        finite = bool(np.isfinite(error).all())
        row, feature = divmod(int(np.argmax(error if finite else ~np.isfinite(error))), error.shape[1])
        batch, position = np.argwhere(rows)[row]
        worst = (int(batch), int(position), feature)
        if not finite:
            return cls(np.inf, np.inf, -1.0, -np.inf, worst, np.full(error.shape[1], np.inf))
        relative = relative_error(ours, right)
        decibels = -20.0 * float(np.log10(relative)) if relative else np.inf
        return cls(
            float(error.max()), relative, worst_cosine(ours, right), decibels, worst, root_mean_square(error)
        )


def root_mean_square(rows: Array) -> Array:
    """Of each column of `rows` [rows, features]; scaled first, so that no square overflows."""
    largest = float(np.abs(rows).max(initial=0.0))
    if largest == 0:
        return np.zeros(rows.shape[1])
    scaled = rows / largest
    mean: Array = np.sqrt(np.einsum("nf,nf->f", scaled, scaled) / len(rows)) * largest
    return mean


def independent_rows(error: Array) -> float:
    """How many rows of `error` [rows, features] vary on their own: the participation ratio
    (sum of eigenvalues)^2 / (sum of their squares) of its Gram matrix; 1 where all rows are alike."""
    largest = float(np.abs(error).max(initial=0.0))
    if not 0 < largest < np.inf:
        return 1.0
    scaled = (error / largest).astype(np.float32)
    gram = scaled @ scaled.T if len(scaled) < scaled.shape[1] else scaled.T @ scaled
    return float(np.trace(gram) ** 2 / np.square(gram).sum())


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
    dots = np.einsum("nf,nf->n", answer, truth)
    cosines = np.where(product > 0, dots / np.where(product > 0, product, 1.0), both_zero)
    return float(np.minimum(cosines, 1.0).min(initial=1.0))
