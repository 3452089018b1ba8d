"""Magnitudes on a case: what stretches a softmax, a sum or a precision's range."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from mha_deploy.cases.case import Case
from mha_deploy.cases.draw import generator, scaled
from mha_deploy.precision import Precision
from mha_deploy.signature import Array, Feeds

# The largest finite number of each precision that a graph computes in (IEEE 754; bfloat16 has fp32's
# exponent).
LARGEST = {Precision.FP64: 1.8e308, Precision.FP16: 65504.0}
FP32_LARGEST = 3.4e38
OUTLIER_SHARE, OUTLIER_FACTOR = 1 / 96, 20.0
NEARLY = 2.0**-11
FLATNESS = 2.0**-4
STEP = 4.0


def near_ties(case: Case, seed: int) -> Case:
    """Every second position nearly repeats the one before, and the softmax is sharp: two keys share
    the first place by a difference of about fp16's last bit."""
    random = generator(seed, f"{case.name} ties")

    def tied(array: Array) -> Array:
        near = array.copy()
        pairs = array.shape[1] // 2
        noise = 1 + NEARLY * random.uniform(-1, 1, near[:, : 2 * pairs : 2].shape)
        near[:, 1 : 2 * pairs : 2] = near[:, : 2 * pairs : 2] * noise
        return near

    return scaled(_changed(case, tied), 4.0)


def outlier_channels(case: Case, seed: int) -> Case:
    """One channel in 96 is twenty times the others, the same ones for all tokens, as activations of
    trained transformers have them (Dettmers et al., 2022, LLM.int8(), section 4)."""
    random = generator(seed, f"{case.name} channels")

    def loud(array: Array) -> Array:
        width = array.shape[-1]
        channels = random.choice(width, max(1, round(width * OUTLIER_SHARE)), replace=False)
        factors = np.ones(width, np.float32)
        factors[channels] = OUTLIER_FACTOR
        return array * factors

    return _changed(case, loud)


def flat_softmax(case: Case, seed: int) -> Case:
    """The positions of a sample nearly alike, so that every key weighs the same and all the values
    add up with one sign: a sum in fp16 loses what is below a 2048th of it."""
    random = generator(seed, f"{case.name} direction")

    def alike(array: Array) -> Array:
        direction = random.standard_normal((len(array), 1, array.shape[-1]), dtype=np.float32)
        return direction + np.float32(FLATNESS) * array

    return _changed(case, alike)


def near_overflow(case: Case, precision: Precision, in_range: Callable[[Feeds], bool]) -> Case:
    """`case` as large as PyTorch at `precision` still answers with finite numbers, to a factor of four.

    It starts where a product of two inputs is the precision's largest number.
    """
    factor = float(np.sqrt(LARGEST.get(precision, FP32_LARGEST)))
    while factor > 1 and not in_range(scaled(case, factor).feeds):
        factor /= STEP
    return scaled(case, factor)


def _changed(case: Case, change: Callable[[Array], Array]) -> Case:
    feeds = {
        name: array if array.dtype == bool else change(array).astype(np.float32)
        for name, array in case.feeds.items()
    }
    return replace(case, feeds=feeds)
