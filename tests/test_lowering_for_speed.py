"""Graphs rewritten for speed: the same answers, and rewritten only where they have them."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import pytest
from conftest import small_spec
from exported_blocks import BLOCKS, drawn, exported, rewritten_answers

from mha_deploy.bundle import CANONICAL
from mha_deploy.lowering import (
    flash_attention,
    fuse_projections,
    fusible_attention,
    lean_attention,
    whole_attention,
)
from mha_deploy.lowering.flat_heads import flatten_heads
from mha_deploy.lowering.gathered_padding import gather_padding

LOWERINGS = (
    fuse_projections,
    gather_padding,
    flatten_heads,
    lean_attention,
    whole_attention,
    flash_attention,
    fusible_attention,
)


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("name", BLOCKS)
def test_the_rewritten_graph_answers_as_its_source(name, lowering, tmp_path, random):
    spec = dataclasses.replace(small_spec(), **BLOCKS[name])
    feeds = drawn(spec, random, {"batch": 3, "seq": 9})
    one, other = rewritten_answers(lowering, tmp_path, spec, feeds)
    np.testing.assert_allclose(other, one, rtol=0, atol=2e-6 * np.abs(one).max())


@pytest.mark.parametrize("lowering", LOWERINGS[1:])
def test_a_row_in_which_nothing_is_kept_and_nan_where_nobody_looks_are_as_in_the_source(
    lowering, tmp_path, random
):
    spec = small_spec()
    feeds = drawn(spec, random, {"batch": 3, "seq": 9})
    feeds["mask"][0] = False
    feeds["x"][~feeds["mask"]] = np.nan
    one, other = rewritten_answers(lowering, tmp_path, spec, feeds)
    assert np.isfinite(other).all()
    np.testing.assert_allclose(other, one, rtol=0, atol=2e-6 * np.abs(one).max())


@pytest.mark.parametrize("name", BLOCKS)
def test_flat_heads_leave_no_transpose(name, tmp_path):
    spec = dataclasses.replace(small_spec(), **BLOCKS[name])
    flat = flatten_heads(exported(tmp_path, spec))
    assert [step.rule for step in flat.steps] == ["flatten-heads"]
    kinds = [node.op_type for node in flat.model.graph.node]
    assert "Transpose" not in kinds
    assert "Reshape" not in kinds


def test_cross_attention_has_flat_heads_too(tmp_path, random):
    spec = small_spec(kind="cross", dims=())
    sizes = {dim.name: 2 + place for place, dim in enumerate(spec.dims)}
    one, other = rewritten_answers(flatten_heads, tmp_path, spec, drawn(spec, random, sizes))
    np.testing.assert_allclose(other, one, rtol=0, atol=2e-6 * np.abs(one).max())
    assert flatten_heads(exported(tmp_path, spec)).steps


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("as the demo's", True),
        ("without bias", True),
        ("bias at query and value", True),
        ("no mask", True),
        ("fewer key/value heads", False),
        ("causal, norm before", False),
        ("full mask", False),
    ],
)
def test_the_whole_attention_is_one_node_where_the_operator_computes_it(name, whole, tmp_path):
    spec = dataclasses.replace(small_spec(), **BLOCKS[name])
    model = exported(tmp_path, spec)
    lowered = whole_attention(model)
    kinds = [(node.domain, node.op_type) for node in lowered.model.graph.node]
    assert (("com.microsoft", "Attention") in kinds) is whole
    assert kinds.count(("", "MatMul")) == (1 if whole else 4)
    if not whole:
        assert lowered.model is model
        assert lowered.steps == ()


def test_three_products_become_one_and_the_step_names_them(small_bundle):
    model = onnx.load(str(small_bundle.artifact(CANONICAL).path(small_bundle.folder)))
    fused = fuse_projections(model)
    count = [sum(node.op_type == "MatMul" for node in each.graph.node) for each in (model, fused.model)]
    assert count == [4, 2]
    (step,) = fused.steps
    assert step.rule == "fuse-projections"
    assert step.why.count("MatMul") == 3
    new = [node for node in fused.model.graph.node if "fused_projections" in node.name]
    assert [node.op_type for node in new] == ["MatMul", "Add", "Split"]
    assert all(prop.key == "source" for node in new for prop in node.metadata_props)
    assert all(node.metadata_props for node in new)
    names = {tensor.name for tensor in fused.model.graph.initializer}
    assert not names & {"query.bias", "key.bias", "value.bias"}


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_the_source_is_left_as_it_was(lowering, small_bundle):
    model = onnx.load(str(small_bundle.artifact(CANONICAL).path(small_bundle.folder)))
    before = model.SerializeToString()
    lowering(model)
    assert model.SerializeToString() == before


def test_cross_attention_shares_no_input_and_comes_back_as_it_is(tmp_path):
    spec = small_spec(kind="cross", dims=())
    model = exported(tmp_path, spec)
    fused = fuse_projections(model)
    assert fused.model is model
    assert fused.steps == ()


def test_a_product_that_others_read_before_its_bias_keeps_its_name(small_bundle, tmp_path):
    model = onnx.load(str(small_bundle.artifact(CANONICAL).path(small_bundle.folder)))
    product = next(node for node in model.graph.node if node.op_type == "MatMul")
    value = onnx.helper.make_tensor_value_info(
        product.output[0], onnx.TensorProto.FLOAT, ["batch", "seq", 32]
    )
    model.graph.output.append(value)
    fused = fuse_projections(model).model
    onnx.checker.check_model(fused, full_check=True)
    assert any(product.output[0] in node.output for node in fused.graph.node)
