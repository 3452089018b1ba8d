"""Attention with less around it: which biases go, which stay, and how padding is taken away."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import onnx
import pytest
from attention_nodes import Form
from conftest import small_spec
from exported_blocks import BLOCKS, answers, drawn, exported
from onnx import helper, numpy_helper

from mha_deploy.lowering import flash_attention, lean_attention, whole_attention
from mha_deploy.lowering.gathered_padding import gather_padding

LOWERINGS = (lean_attention, whole_attention, flash_attention)
CROSS = {"kind": "cross", "dims": ()}
BIASES = ("no-key-bias", "later-value-bias")


def rules(lowered):
    return [step.rule for step in lowered.steps]


def kinds(model):
    return [node.op_type for node in model.graph.node]


def with_attribute(model, name, value):
    (node,) = [node for node in model.graph.node if node.op_type == "Attention"]
    node.attribute.append(helper.make_attribute(name, value))
    return model


def with_large_biases(model, factor=10):
    """`model` with biases that no rounding hides."""
    for tensor in model.graph.initializer:
        if tensor.name.endswith(".bias"):
            array = numpy_helper.to_array(tensor)
            tensor.CopyFrom(numpy_helper.from_array(array * np.float32(factor), tensor.name))
    return model


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("as the demo's", ["flatten-heads", *BIASES, "gather-padding"]),
        ("fewer key/value heads", ["flatten-heads", *BIASES, "gather-padding"]),
        ("without bias", ["flatten-heads", "gather-padding"]),
        ("bias at query and value", ["flatten-heads", "gather-padding"]),
        ("causal, norm before", ["flatten-heads", "no-key-bias", "gather-padding"]),
        ("full mask", ["flatten-heads", "no-key-bias", "gather-padding"]),
        ("no mask", ["flatten-heads", *BIASES]),
    ],
)
def test_each_rewrite_is_named_where_it_can_be_done(name, expected, tmp_path):
    spec = dataclasses.replace(small_spec(), **BLOCKS[name])
    found = rules(lean_attention(exported(tmp_path, spec)))
    assert list(dict.fromkeys(found)) == expected


@pytest.mark.parametrize(
    ("lowering", "changes"),
    [
        *itertools.product(LOWERINGS, [{}, {"norm": "pre"}, {"norm": "post"}]),
        (lean_attention, CROSS),
        (flash_attention, CROSS),
    ],
)
def test_large_biases_count_as_in_the_source_in_rows_with_keys_and_without(
    lowering, changes, tmp_path, random
):
    spec = small_spec(**changes)
    model = with_large_biases(exported(tmp_path, spec))
    lowered = lowering(model)
    for name, each in {"source": model, "lowered": lowered.model}.items():
        onnx.save(each, tmp_path / f"{name}.onnx")
    sizes = {dim.name: size for dim, size in zip(spec.dims, (3, 7, 9), strict=False)}
    feeds = drawn(spec, random, sizes)
    feeds["mask"][0], feeds["mask"][1, 0] = False, True
    one, other = (answers(tmp_path / f"{name}.onnx", spec, feeds) for name in ("source", "lowered"))
    np.testing.assert_allclose(other, one, rtol=0, atol=4e-6 * np.abs(one).max())
    assert set(BIASES) <= set(rules(lowered))


def test_two_additions_are_left_of_four(tmp_path):
    assert kinds(lean_attention(exported(tmp_path, small_spec())).model).count("Add") == 2


def test_a_bias_of_keys_whose_scores_are_capped_stays(tmp_path):
    capped = with_attribute(exported(tmp_path, small_spec()), "softcap", 5.0)
    lowered = lean_attention(capped)
    assert "no-key-bias" not in rules(lowered)
    assert "later-value-bias" in rules(lowered)


def test_a_bias_of_values_whose_context_goes_elsewhere_too_stays(tmp_path):
    model = exported(tmp_path, small_spec())
    flat = lean_attention(model).model
    (node,) = [node for node in flat.graph.node if node.op_type == "Attention"]
    (merged,) = node.output
    value = helper.make_tensor_value_info(merged, onnx.TensorProto.FLOAT, ["batch", "seq", 32])
    model.graph.output.append(value)
    assert "later-value-bias" not in rules(lean_attention(model))


@pytest.mark.parametrize(
    "more",
    [
        {"past": 3},
        {"lengths": (5, 2)},
        {"outputs": ("y", "present_key", "present_value")},
        {"outputs": ("y", "", "", "scores")},
    ],
)
def test_an_attention_without_projections_or_with_more_results_keeps_what_it_has(more):
    model = Form(rank=3, **more).model()
    assert lean_attention(model).model is model


def test_values_that_are_zero_where_masked_need_no_factor(tmp_path):
    lowered = flash_attention(exported(tmp_path, small_spec()))
    assert "Mul" not in kinds(lowered.model)
    lowered = flash_attention(exported(tmp_path, small_spec(norm="pre")))
    assert "Mul" in kinds(lowered.model)


@pytest.mark.parametrize("held", [np.nan, np.inf, -np.inf, 1e38])
def test_what_stands_in_padding_is_not_read(held, tmp_path, random):
    spec = small_spec()
    feeds = drawn(spec, random, {"batch": 3, "seq": 9})
    feeds["mask"][0], feeds["mask"][1] = False, True
    onnx.save(gather_padding(exported(tmp_path, spec)).model, tmp_path / "lowered.onnx")
    paths = [tmp_path / f"{name}.onnx" for name in ("model", "lowered")]
    clean = [answers(path, spec, feeds) for path in paths]
    feeds["x"][~feeds["mask"]] = held
    dirty = [answers(path, spec, feeds) for path in paths]
    assert np.isfinite(clean).all()
    assert all(np.array_equal(clean[0], other) for other in (clean[1], *dirty))


@pytest.mark.parametrize("value", [1.0, -0.5])
def test_a_selection_against_anything_but_zero_stays(value, tmp_path):
    model = exported(tmp_path, small_spec())
    (node,) = [node for node in model.graph.node if node.op_type == "Where"]
    (zero,) = [tensor for tensor in model.graph.initializer if tensor.name == node.input[2]]
    zero.CopyFrom(numpy_helper.from_array(np.array(value, np.float32), zero.name))
    assert gather_padding(model).model is model
