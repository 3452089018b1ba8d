"""Masks: every accepted form gives the right keep mask, every other is refused."""

import re

import numpy as np
import pytest

from mha_deploy.errors import FeedError
from mha_deploy.masks import keep_mask
from mha_deploy.spec import MASK_CONVENTION, AttentionSpec

PADDING, FULL = AttentionSpec(8, 2), AttentionSpec(8, 2, kind="cross", mask="full")
# As many samples as heads: a guess between the two would show.
B, H, Q, K = 3, 3, 4, 5
SHAPE = (B, Q, K)


def random_keep(shape, seed=0):
    return np.random.default_rng(seed).random(shape) < 0.6


def attend(q, k, v, keep):
    """softmax(Q K^T / sqrt(d)) V in float64 over [B, H, S, T]; a row that keeps nothing gives 0."""
    scores = np.where(keep, q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5, -np.inf)
    weights = np.exp(scores - np.where(keep.any(-1, keepdims=True), scores.max(-1, keepdims=True), 0.0))
    return weights @ v / np.maximum(weights.sum(-1, keepdims=True), 1e-300)


def refusal(mask, spec, form="keep"):
    with pytest.raises(FeedError) as caught:
        keep_mask(np.asarray(mask), spec, SHAPE, form)
    return str(caught.value)


KEPT = np.array([[True, True, False, False]])
LOWEST16, LOWEST32 = np.finfo(np.float16).min, np.finfo(np.float32).min


@pytest.mark.parametrize(
    ("mask", "form"),
    [
        (KEPT, "keep"),
        (KEPT.astype(np.int64), "keep"),
        (KEPT.astype(np.uint8), "keep"),
        (~KEPT, "ignore"),
        ((~KEPT).astype(np.int32), "ignore"),
        (np.where(KEPT, 0.0, -np.inf), "additive"),
        (np.where(KEPT, np.float32(0), np.float32(LOWEST32)), "additive"),
        (np.where(KEPT, np.float16(0), np.float16(LOWEST16)), "additive"),
    ],
)
def test_the_same_mask_in_every_form_averages_the_two_kept_values(mask, form):
    # The case of a padding mask read the wrong way round: 1.5 is right, 100 is the inverted mask.
    keep = keep_mask(mask, PADDING, (1, 4, 4), form)
    zeros, values = np.zeros((1, 1, 4, 2)), np.array([1.0, 2, 100, 100]).reshape(1, 1, 4, 1)
    np.testing.assert_array_equal(
        attend(zeros, zeros, values, keep[:, None, None, :]), np.full((1, 1, 4, 1), 1.5)
    )


@pytest.mark.parametrize("shape", [(Q, K), (1, 1, 1, K), (B, 1, 1, K), (1, 1, Q, K), (B, 1, Q, K), (B, Q, K)])
def test_every_accepted_shape_of_a_full_mask_means_what_numpy_says(shape):
    mask = random_keep(shape)
    keep = keep_mask(mask, FULL, SHAPE)
    assert (keep.shape, keep.dtype, keep.flags.c_contiguous) == (SHAPE, bool, True)
    by_numpy = mask[:, None] if mask.ndim == 3 else mask  # rank 3 is per sample, for every head
    random = np.random.default_rng(1)
    q, k, v = (random.standard_normal((B, H, length, 2)) for length in (Q, K, K))
    np.testing.assert_allclose(
        attend(q, k, v, keep[:, None]), attend(q, k, v, np.broadcast_to(by_numpy, (B, H, Q, K))), atol=1e-5
    )


@pytest.mark.parametrize("shape", [(B, K), (B, 1, 1, K), (1, 1, 1, K)])
def test_every_accepted_shape_of_a_padding_mask_gives_one_row_a_sample(shape):
    mask = random_keep(shape)
    keep = keep_mask(mask, PADDING, SHAPE)
    assert (keep.dtype, keep.flags.c_contiguous) == (bool, True)
    np.testing.assert_array_equal(keep, np.broadcast_to(mask.reshape(-1, K), (B, K)))


def test_a_rank_three_mask_is_per_sample_where_samples_and_heads_are_as_many():
    mask = np.zeros((B, Q, K), bool)
    mask[1] = True
    keep = keep_mask(mask, FULL, SHAPE)
    assert [row.all() for row in keep] == [False, True, False]
    assert [row.any() for row in keep] == [False, True, False]


@pytest.mark.parametrize(
    "shape",
    [
        (2, Q, K), (1, Q, K), (B, 1, K), (B, K, Q), (B, K), (K,), (), (Q, 1), (Q, K + 1), (1, Q),
        (B, H, Q, K), (1, H, 1, K), (2, 1, Q, K), (B, 1, 2, K), (B, 1, Q, 1), (B, 1, Q, K - 1),
        (0, 1, Q, K), (1, B, 1, Q, K),
    ],
)  # fmt: skip
def test_any_other_shape_of_a_full_mask_is_refused_with_it_and_the_convention(shape):
    said = refusal(np.ones(shape, bool), FULL)
    assert f"full mask has shape {list(shape)}; expected [3, 4, 5], [4, 5] or [3|1, 1, 4|1, 5]" in said
    assert said.endswith(f"{MASK_CONVENTION}; one mask serves all heads")


@pytest.mark.parametrize(
    "shape",
    [
        (2, K),
        (1, K),
        (K,),
        (),
        (B, K - 1),
        (B, 1),
        (B, Q, K),
        (B, 1, K),
        (B, 1, Q, K),
        (B, H, 1, K),
        (1, 1, 1, 1),
    ],
)
def test_any_other_shape_of_a_padding_mask_is_refused_with_it_and_the_convention(shape):
    said = refusal(np.ones(shape, bool), PADDING)
    assert f"padding mask has shape {list(shape)}; expected [3, 5] or [3|1, 1, 1, 5]" in said
    assert said.endswith(f"{MASK_CONVENTION}; one mask serves all heads")


@pytest.mark.parametrize(
    "mask",
    [
        np.ones((B, K), np.float32),
        np.zeros((B, K), np.float32),
        np.full((B, K), 2),
        np.full((B, K), -1),
        np.ones((B, K), complex),
        np.full((B, K), "1"),
    ],
)
@pytest.mark.parametrize("form", ["keep", "ignore"])
def test_values_that_are_neither_boolean_nor_0_and_1_are_refused_with_shape_and_dtype(mask, form):
    said = refusal(mask, PADDING, form)
    assert f"mask has shape [3, 5] and dtype {mask.dtype.name}; expected " in said
    assert "name the form 'additive'" in said


def test_a_caller_who_named_the_form_ignore_is_not_told_that_true_means_keep():
    assert "True = keep" not in refusal(np.ones((B, K), np.float32), PADDING, "ignore")


@pytest.mark.parametrize("value", [1.0, -1e4, -1e9, np.inf, np.nan, -np.finfo(np.float32).tiny])
def test_an_additive_mask_of_other_values_is_refused(value):
    mask = np.zeros((B, K), np.float32)
    mask[1, 2] = value
    said = refusal(mask, PADDING, "additive")
    assert (
        "additive mask of shape [3, 5] holds other values than 0 (keep) and -inf or -3.4e+38 (ignore)" in said
    )


@pytest.mark.parametrize("dtype", [bool, np.int64])
def test_an_additive_mask_that_is_not_floating_point_is_refused_with_its_shape(dtype):
    said = refusal(np.zeros((B, K), dtype), PADDING, "additive")
    assert (
        f"dtype {np.dtype(dtype).name}; the form 'additive' is floating point, 0 = keep, -inf = ignore"
        in said
    )
    assert "[3, 5]" in said


def test_negative_zero_is_kept_in_an_additive_mask():
    assert keep_mask(np.full((B, K), -0.0), PADDING, SHAPE, "additive").all()


def test_an_unknown_form_is_refused_with_the_known_ones():
    assert refusal(np.ones((B, K), bool), PADDING, "huggingface") == (
        "mask form 'huggingface'; expected one of keep, ignore, additive"
    )


def test_a_block_without_a_mask_refuses_one():
    said = "a mask of shape [3, 5] was given; this block takes none (mask = 'none')"
    with pytest.raises(FeedError, match=re.escape(said)):
        keep_mask(np.ones((B, K), bool), AttentionSpec(8, 2, mask="none"), SHAPE)


def test_the_mask_that_was_given_is_left_as_it_was():
    mask = random_keep((B, K))
    before = mask.copy()
    keep_mask(mask, PADDING, SHAPE, "ignore")
    np.testing.assert_array_equal(mask, before)
