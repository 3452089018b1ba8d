"""Batched inference: every answer equals the one the request gets alone."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from conftest import small_spec

from mha_deploy.bundle import Bundle
from mha_deploy.errors import FeedError
from mha_deploy.inference import infer
from mha_deploy.pipeline import export
from mha_deploy.runner import DEFAULT_OPTIONS
from mha_deploy.runner.calibration import FOLDER, calibrated
from mha_deploy.sessions import DEFAULT_PLACEMENT


@pytest.fixture(scope="module")
def full_bundle(tmp_path_factory):
    return export(small_spec(mask="full"), tmp_path_factory.mktemp("full") / "bundle")


def packed(random, lengths):
    x = random.standard_normal((sum(lengths), 32), dtype=np.float32)
    return {"x": x, "lengths": np.array(lengths)}


def test_packed_answers_are_bit_for_bit_those_of_each_request_alone(small_bundle, random):
    tensors = packed(random, [5, 64, 1, 7, 6, 6, 33, 2, 1, 30, 5, 5])
    answers = infer(small_bundle, tensors)
    start = 0
    for length in tensors["lengths"]:
        alone = {"x": tensors["x"][start : start + length], "lengths": np.array([length])}
        np.testing.assert_array_equal(answers.y[start : start + length], infer(small_bundle, alone).y)
        start += length
    assert (answers.report.requests, answers.report.tokens, answers.report.padded_tokens) == (12, start, 0)


@pytest.fixture
def sharing_bundle(small_bundle, tmp_path):
    """One whose calibration, kept by a runner, says that a run takes 1 ms whatever its rows."""
    without = shutil.ignore_patterns(FOLDER)
    bundle = Bundle.load(shutil.copytree(small_bundle.folder, tmp_path / "bundle", ignore=without))
    calibrated(bundle, "canonical", DEFAULT_PLACEMENT, DEFAULT_OPTIONS)
    (kept,) = (bundle.folder / FOLDER).iterdir()
    found = json.loads(kept.read_text())
    costs = found["cost_model"]
    costs |= {"samples": [[*size, 1e3] for *size, _ in costs["samples"]]}
    kept.write_text(json.dumps(found))
    return bundle


def test_requests_of_one_length_share_batches(sharing_bundle, random):
    report = infer(sharing_bundle, packed(random, [5] * 12)).report
    assert 2 <= report.batches < 12  # the graph's largest batch is 6
    assert len(report.batch_ms) == report.batches


def test_a_request_too_long_is_refused_by_index_and_range_before_anything_runs(small_bundle, random):
    with pytest.raises(FeedError, match=r"request 1 has seq = 65; this block takes seq 1\.\.64"):
        infer(small_bundle, packed(random, [64, 65, 3]))


def test_the_report_as_json_holds_its_counts_and_times(small_bundle, random):
    data = infer(small_bundle, packed(random, [3, 20])).report.to_json()
    assert data["total_ms"] == pytest.approx(sum(data["batch_ms"]))
    del data["total_ms"], data["batch_ms"]
    counts = {"requests": 2, "batches": 2, "tokens": 23, "padded_tokens": 0}
    assert data == {**counts, "provider": "CPUExecutionProvider"}


def test_packed_cross_attention_takes_two_lengths_a_request(cross_bundle, random):
    q_lengths, kv_lengths = [3, 9, 4], [8, 8, 2]
    tensors = {
        "query": random.standard_normal((16, 32), dtype=np.float32),
        "key": random.standard_normal((18, 20), dtype=np.float32),
        "value": random.standard_normal((18, 24), dtype=np.float32),
        "q_lengths": np.array(q_lengths),
        "kv_lengths": np.array(kv_lengths),
    }
    together = infer(cross_bundle, tensors).y
    last = {
        "query": tensors["query"][12:][None],
        "key": tensors["key"][16:][None],
        "value": tensors["value"][16:][None],
        "mask": np.ones((1, 2), bool),
    }
    np.testing.assert_allclose(together[12:], infer(cross_bundle, last).y[0], rtol=0, atol=1e-6)


def test_padded_batches_beyond_the_largest_run_in_slices(small_bundle, random):
    x = random.standard_normal((13, 5, 32), dtype=np.float32)
    mask = np.arange(5)[None, :] < random.integers(1, 6, 13)[:, None]
    answers = infer(small_bundle, {"x": x, "mask": mask})
    assert answers.report.batches == 3
    for i in (0, 6, 12):
        alone = infer(small_bundle, {"x": x[i : i + 1], "mask": mask[i : i + 1]}).y[0]
        np.testing.assert_allclose(answers.y[i], alone, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("mask", "form"),
    [
        ([[True, True, False, False]], "keep"),
        ([[1, 1, 0, 0]], "keep"),
        ([[False, False, True, True]], "ignore"),
        ([[0.0, 0.0, -np.inf, -np.inf]], "additive"),
        ([[[[True, True, False, False]]]], "keep"),
    ],
)
def test_every_accepted_form_of_a_mask_gives_the_same_answer(small_bundle, random, mask, form):
    x = random.standard_normal((1, 4, 32), dtype=np.float32)
    right = infer(small_bundle, {"x": x[:, :2], "mask": np.ones((1, 2), bool)}).y
    y = infer(small_bundle, {"x": x, "mask": np.array(mask)}, mask_form=form).y
    np.testing.assert_allclose(y[:, :2], right, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (np.zeros((1, 4), np.float32), r"shape \[1, 4\] and dtype float32; expected boolean, True = keep"),
        (np.full((1, 4), 2), r"dtype int64; expected boolean, True = keep"),
        (np.ones((2, 4), bool), r"padding mask has shape \[2, 4\]; expected \[1, 4\].*True = keep"),
        (np.ones((1, 4, 4), bool), r"padding mask has shape \[1, 4, 4\]; expected \[1, 4\]"),
    ],
)
def test_every_other_form_is_refused_with_its_shape_and_the_convention(small_bundle, mask, message):
    with pytest.raises(FeedError, match=message):
        infer(small_bundle, {"x": np.zeros((1, 4, 32), np.float32), "mask": mask})


@pytest.mark.parametrize("shape", [(3, 3), (1, 1, 1, 3), (3, 1, 1, 3), (3, 1, 3, 3), (3, 3, 3)])
def test_broadcast_forms_of_a_full_mask_match_the_formula(full_bundle, random, shape):
    """Batch, queries and keys are all 3, so that a wrong alignment would not fail but be wrong."""
    mask = random.random(shape) > 0.4
    x = random.standard_normal((3, 3, 32), dtype=np.float32)
    y = infer(full_bundle, {"x": x, "attn_mask": mask}).y
    per_sample = {2: mask[None], 3: mask}.get(mask.ndim, mask[:, 0] if mask.ndim == 4 else mask)
    keep = np.broadcast_to(per_sample, (3, 3, 3))
    for i in range(3):
        np.testing.assert_allclose(y[i], formula(full_bundle, x[i], keep[i]), rtol=0, atol=1e-5)


def test_a_mask_per_head_is_refused(full_bundle):
    feeds = {"x": np.zeros((3, 3, 32), np.float32), "attn_mask": np.ones((3, 4, 3, 3), bool)}
    with pytest.raises(FeedError, match=r"full mask has shape \[3, 4, 3, 3\].*one mask serves all heads"):
        infer(full_bundle, feeds)


def test_a_packed_request_for_a_full_mask_is_refused(full_bundle, random):
    with pytest.raises(FeedError, match="a full one; give padded arrays"):
        infer(full_bundle, packed(random, [3]))


def formula(bundle, x, keep):
    """softmax(Q K^T / sqrt(d)) V for one sample, in numpy, from the formula."""
    w = {name: tensor.numpy().astype(np.float64) for name, tensor in bundle.reference().state_dict().items()}
    q, k, v = (
        (x @ w[f"{name}.weight"].T + w[f"{name}.bias"]).reshape(len(x), 4, 8).transpose(1, 0, 2)
        for name in ("query", "key", "value")
    )
    weights = np.exp(q @ k.transpose(0, 2, 1) / np.sqrt(8)) * keep
    sums = weights.sum(-1, keepdims=True)
    context = np.divide(weights, sums, out=np.zeros_like(weights), where=sums > 0) @ v
    return context.transpose(1, 0, 2).reshape(len(x), 32) @ w["output.weight"].T + w["output.bias"]


def test_a_form_of_mask_is_refused_where_the_requests_are_packed(demo_bundle, cli, tmp_path):
    inputs, out = demo_bundle.folder / "inputs.safetensors", tmp_path / "y.npz"
    result = cli("infer", demo_bundle.folder, inputs, "-o", out, "--mask-form", "keep")
    assert (result.exit_code, result.stderr.count("\n"), out.exists()) == (2, 1, False)
    assert "--mask-form is for the mask of padded inputs; " in result.stderr


@pytest.mark.parametrize(
    ("x", "mask", "message"),
    [
        (np.float32(3), np.bool_(1), r"inputs without a batch axis: x \[\], mask \[\]"),
        (np.zeros((1, 4, 32), np.float32), np.bool_(1), r"padding mask has shape \[\]; expected \[1, 4\]"),
        (np.float32(3), np.ones((1, 4), bool), r"inputs without a batch axis: x \[\], mask \[1, 4\]"),
    ],
)
def test_numbers_without_axes_are_refused_with_their_shapes(small_bundle, x, mask, message):
    with pytest.raises(FeedError, match=message):
        infer(small_bundle, {"x": np.asarray(x), "mask": np.asarray(mask)})
