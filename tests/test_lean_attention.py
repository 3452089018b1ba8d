"""Attention with less around it: which biases go, which stay, and how padding is taken away."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import onnx
import pytest
from attention_nodes import run_ort
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


# Two attentions, one over the other: the first's output projection is the second's value.
STACKED = """
    < ir_version: 10, opset_import: ["" : 23] >
    stacked (float[B, S, 16] x) => (float[B, S, 16] y)
    {
        q = MatMul(x, Wq)
        kp = MatMul(x, Wk)
        k = Add(kp, bk)
        vp = MatMul(x, Wv)
        v = Add(vp, bv)
        a = Attention <q_num_heads = 2, kv_num_heads = 2 ATTRIBUTES> (q, k, v)
        up = MatMul(a, W1)
        u = Add(up, b1)
        a2 = Attention <q_num_heads = 2, kv_num_heads = 2> (q, k, u)
        yp = MatMul(a2, W2)
        y = Add(yp, b2)
    }
"""
WEIGHTS, VECTORS = ("Wq", "Wk", "Wv", "W1", "W2"), ("bk", "bv", "b1", "b2")


def stacked(random, attributes=""):
    """The model with weights that are drawn, and biases as large as they are."""
    model = onnx.parser.parse_model(STACKED.replace("ATTRIBUTES", attributes))
    for name in (*WEIGHTS, *VECTORS):
        array = random.standard_normal((16, 16) if name in WEIGHTS else 16, np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


def floats(name, *shape):
    return helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)


def drawn_x(random):
    return {"x": random.standard_normal((2, 5, 16), np.float32)}


def assert_answers_as(source, lowered, feeds):
    onnx.checker.check_model(lowered)
    for one, other in zip(run_ort(source, feeds).values(), run_ort(lowered, feeds).values(), strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=2e-5 * np.abs(one).max())


@pytest.mark.parametrize("attributes", ["", ", is_causal = 1", ", scale = 0.7"])
def test_an_output_that_is_the_value_of_a_second_attention_is_changed_once(attributes, random):
    model = stacked(random, attributes)
    lowered = lean_attention(model)
    assert rules(lowered) == [*BIASES, "no-key-bias"]
    assert_answers_as(model, lowered.model, drawn_x(random))


def test_a_context_that_a_subgraph_reads_keeps_the_bias_of_its_values(random):
    model = stacked(random)
    identity = helper.make_node("Identity", ["a"], ["seen"])
    inner = helper.make_graph([identity], "inner", [], [floats("seen", "B", "S", 16)])
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "true"))
    model.graph.node.append(helper.make_node("If", ["true"], ["also"], then_branch=inner, else_branch=inner))
    model.graph.output.append(floats("also", "B", "S", 16))
    lowered = lean_attention(model)
    assert rules(lowered) == ["no-key-bias", "no-key-bias", "later-value-bias"]
    assert_answers_as(model, lowered.model, drawn_x(random))


def test_heads_that_a_subgraph_reads_stay_split(tmp_path):
    model = exported(tmp_path, small_spec())
    (attention,) = [node for node in model.graph.node if node.op_type == "Attention"]
    identity = helper.make_node("Identity", [attention.output[0]], ["seen"])
    inner = helper.make_graph([identity], "inner", [], [floats("seen", "batch", 4, "seq", 8)])
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "true"))
    model.graph.node.append(helper.make_node("If", ["true"], ["also"], then_branch=inner, else_branch=inner))
    model.graph.output.append(floats("also", "batch", 4, "seq", 8))
    assert "flatten-heads" not in rules(lean_attention(model))


def test_a_context_that_is_given_out_keeps_the_bias_of_its_values(random):
    model = stacked(random)
    model.graph.output.append(floats("a", "B", "S", 16))
    lowered = lean_attention(model)
    assert rules(lowered) == ["no-key-bias", "no-key-bias", "later-value-bias"]
    assert_answers_as(model, lowered.model, drawn_x(random))


@pytest.mark.parametrize("name", VECTORS)
def test_a_bias_that_a_caller_may_replace_is_replaced_still(name, random):
    model = stacked(random)
    model.graph.input.append(floats(name, 16))
    lowered = lean_attention(model).model
    for feeds in (drawn_x(random), {**drawn_x(random), name: random.standard_normal(16, np.float32)}):
        assert_answers_as(model, lowered, feeds)


def test_a_bias_of_keys_whose_scores_are_capped_stays(random):
    model = stacked(random, ", softcap = 5.0")
    lowered = lean_attention(model)
    assert rules(lowered) == ["later-value-bias", "no-key-bias"]
    assert_answers_as(model, lowered.model, drawn_x(random))


def test_biases_behind_scores_that_are_given_out_stay(random):
    model = stacked(random)
    first = next(node for node in model.graph.node if node.op_type == "Attention")
    first.output.extend(["", "", "scores"])
    model.graph.output.append(floats("scores", "B", 2, "S", "S"))
    lowered = lean_attention(model)
    assert rules(lowered) == ["no-key-bias", "later-value-bias"]  # of the second
    assert_answers_as(model, lowered.model, drawn_x(random))


def test_values_that_another_mask_zeroes_keep_the_factor(tmp_path, random):
    spec = small_spec()
    model = exported(tmp_path, spec)
    (where,) = [node for node in model.graph.node if node.op_type == "Where"]
    raised = next(node for node in model.graph.node if where.input[0] in node.output)
    other = helper.make_tensor_value_info("other", onnx.TensorProto.BOOL, ["batch", "seq"])
    model.graph.input.append(other)
    raised.input[0] = "other"
    feeds = drawn(spec, random, {"batch": 2, "seq": 5})
    feeds |= {"mask": np.zeros((2, 5), bool), "other": np.ones((2, 5), bool)}
    for lowering in (whole_attention, flash_attention):
        lowered = lowering(model).model
        assert "Mul" in kinds(lowered)
        assert_answers_as(model, lowered, feeds)


def test_an_unsqueeze_whose_axes_are_an_attribute_is_left_alone():
    text = """
        < ir_version: 8, opset_import: ["" : 11] >
        old (bool[B, S] mask, float[B, S, 8] x) => (float[B, S, 8] y) < float zero = {0.0} >
        {
            raised = Unsqueeze <axes = [2]> (mask)
            y = Where(raised, x, zero)
        }
    """
    model = onnx.parser.parse_model(text)
    assert lean_attention(model).model is model


@pytest.mark.parametrize("shape", [(3, 0), (0, 4)])
def test_rows_of_nothing_are_looked_up_too(shape):
    text = """
        < ir_version: 10, opset_import: ["" : 23] >
        rows (bool[B, S] mask, float[B, S, 8] x) => (float[B, S, 8] y)
        < float zero = {0.0}, int64[1] axes = {2} >
        {
            raised = Unsqueeze(mask, axes)
            y = Where(raised, x, zero)
        }
    """
    lowered = gather_padding(onnx.parser.parse_model(text))
    assert rules(lowered) == ["gather-padding"]
    feeds = {"mask": np.ones(shape, bool), "x": np.zeros((*shape, 8), np.float32)}
    assert run_ort(lowered.model, feeds)["y"].shape == (*shape, 8)


def test_values_that_are_zero_where_masked_need_no_factor(tmp_path):
    for lowering in (whole_attention, flash_attention):
        assert "Mul" not in kinds(lowering(exported(tmp_path, small_spec())).model)
        assert "Mul" in kinds(lowering(exported(tmp_path, small_spec(norm="pre"))).model)


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
