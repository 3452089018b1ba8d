"""prove_same: wrong lowerings are caught, right ones are proved, and what cannot be run is said."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from attention_nodes import BOOL, FLOAT, HALF, INT64, Form
from onnx import TensorProto, helper

from mha_deploy.errors import CheckError, GraphError
from mha_deploy.lowering import lower_for_tensorrt, lower_to_portable
from mha_deploy.proof import prove_same
from mha_deploy.signature import TensorSpec
from mha_deploy.tensorrt.graph import read_graph

FORM = Form(batch=3, q_heads=2, kv_heads=2, queries=5, keys=6)


def value(name, dtype, shape):
    return helper.make_tensor_value_info(name, dtype, shape)


def model_of(nodes, inputs, outputs, constants=()):
    stored = [onnx.numpy_helper.from_array(array, name) for name, array in constants]
    graph = helper.make_graph(nodes, "graph", inputs, outputs, stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=10)


def before_attention(model, nodes, swaps, constants=()):
    """`model` with `nodes` put before its attention, whose inputs are renamed as `swaps` say."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    attention = changed.graph.node[0]
    names = [swaps.get(name, name) for name in attention.input]
    del attention.input[:]
    attention.input.extend(names)
    rest = list(changed.graph.node)
    del changed.graph.node[:]
    changed.graph.node.extend([*nodes, *rest])
    changed.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in constants)
    return changed


@pytest.fixture
def prove(tmp_path):
    def run(original, lowered, sizes=({},), inputs=()):
        for name, model in (("original", original), ("lowered", lowered)):
            onnx.save(model, tmp_path / f"{name}.onnx")
        paths = tmp_path / "original.onnx", tmp_path / "lowered.onnx"
        return prove_same(*paths, inputs or read_graph(paths[0]).inputs, list(sizes))

    return run


def test_the_first_items_length_for_the_whole_batch_is_caught(prove):
    right = replace(FORM, lengths=(3, 6, 1)).model()
    nodes = [
        helper.make_node("Gather", ["lengths", "zero"], ["first"]),
        helper.make_node("Expand", ["first", "three"], ["all"]),
    ]
    constants = [("zero", np.array([0])), ("three", np.array([3]))]
    with pytest.raises(CheckError, match=r"differs from the original at .* in 'y'"):
        prove(right, before_attention(right, nodes, {"lengths": "all"}, constants))


def test_lengths_ignored_for_the_first_key_alone_is_caught(prove):
    right = replace(FORM, lengths=(3, 6, 1)).model()
    wrong = before_attention(right, [], {"lengths": "ones"}, [("ones", np.array([1, 1, 1]))])
    with pytest.raises(CheckError, match="in 'y'"):
        prove(right, wrong)


@pytest.mark.parametrize("mask_type", [BOOL, FLOAT])
def test_a_mean_of_the_values_for_a_fully_masked_row_is_caught(mask_type, prove):
    right = replace(FORM, mask=(3, 1, 5, 6), mask_type=mask_type).model()
    node = (
        helper.make_node("Where", ["mask", "none", "lowest"], ["bias"])
        if mask_type == BOOL
        else helper.make_node("Max", ["mask", "lowest"], ["bias"])
    )
    constants = [("none", np.array(0, np.float32)), ("lowest", np.array(-1e30, np.float32))]
    with pytest.raises(CheckError, match="in 'y'"):
        prove(right, before_attention(right, [node], {"mask": "bias"}, constants))


@pytest.mark.parametrize("rows", [(3, 1, 5, 6), (5, 6), (1, 1, 1, 6)])
def test_an_additive_mask_clipped_at_minus_8_is_caught(rows, prove):
    right = replace(FORM, queries=rows[-2], mask=rows, mask_type=FLOAT).model()
    node = helper.make_node("Max", ["mask", "low"], ["clipped"])
    wrong = before_attention(right, [node], {"mask": "clipped"}, [("low", np.array(-8, np.float32))])
    with pytest.raises(CheckError, match="in 'y'"):
        prove(right, wrong)


def arg(op):
    return model_of(
        [helper.make_node(op, ["x"], ["best"], axis=-1)],
        [value("x", FLOAT, [4, 9])],
        [value("best", INT64, [4, 1])],
    )


def test_an_integer_output_that_differs_is_caught_and_named(prove):
    with pytest.raises(CheckError, match=r"in 'best': . of 4 elements are not equal"):
        prove(arg("ArgMax"), arg("ArgMin"))
    assert prove(arg("ArgMax"), arg("ArgMax")).proved


def test_a_boolean_output_that_differs_is_caught(prove):
    def sign(op):
        nodes = [helper.make_node(op, ["x", "zero"], ["sign"])]
        zero = [("zero", np.array(0, np.float32))]
        return model_of(nodes, [value("x", FLOAT, [4, 9])], [value("sign", BOOL, [4, 9])], zero)

    with pytest.raises(CheckError, match="in 'sign'"):
        prove(sign("Greater"), sign("Less"))


RIGHT = {
    "causal and a boolean mask": {"mask": (3, 1, 5, 6), "attributes": {"is_causal": 1}},
    "causal and an additive mask": {
        "mask": (3, 1, 5, 6),
        "mask_type": FLOAT,
        "attributes": {"is_causal": 1},
    },
    "lengths": {"lengths": (3, 6, 1)},
    "causal and lengths": {"lengths": (5, 6, 5), "attributes": {"is_causal": 1}},
    "a cache": {"past": 4, "outputs": ("y", "present_key", "present_value")},
    "narrow values": {"value_size": 4},
    "a softcap": {"attributes": {"softcap": 2.0}},
    "a short boolean mask": {"mask": (3, 1, 5, 4)},
    "a short additive mask": {"mask": (3, 1, 5, 4), "mask_type": FLOAT},
    "half precision": {"mask": (3, 1, 5, 6), "dtype": HALF, "attributes": {"is_causal": 1}},
}


@pytest.mark.parametrize("lower", [lower_for_tensorrt, lower_to_portable])
@pytest.mark.parametrize("changes", RIGHT.values(), ids=RIGHT)
def test_right_lowerings_are_proved(changes, lower, prove):
    right = replace(FORM, **changes).model()
    lowered = lower(right)
    assert lowered.steps
    proof = prove(right, lowered.model)
    assert proof.proved, proof.note
    assert proof.note.startswith("equal to the original in ")
    assert "in ONNX Runtime, largest difference " in proof.note


@pytest.mark.parametrize("mask", [(3, 1, 1, 6), (1, 6), (6,)])
@pytest.mark.parametrize("attributes", [{}, {"is_causal": 1}], ids=["plain", "causal"])
def test_a_mask_without_its_query_axis_is_proved_through_the_reference(mask, attributes, prove):
    right = replace(FORM, mask=mask, attributes=attributes).model()
    proof = prove(right, lower_to_portable(right).model)
    assert proof.proved, proof.note
    assert "in onnx.reference" in proof.note


def test_a_wrong_lowering_is_caught_through_the_reference_too(prove):
    right = replace(FORM, mask=(3, 1, 1, 6), attributes={"is_causal": 1}).model()
    wrong = replace(FORM, mask=(3, 1, 1, 6)).model()
    with pytest.raises(CheckError, match="in 'y'"):
        prove(right, lower_to_portable(wrong).model)


def test_one_causal_query_over_a_cache_is_judged_by_the_reference(prove):
    cache = {"past": 4, "outputs": ("y", "present_key", "present_value")}
    right = replace(FORM, queries=1, attributes={"is_causal": 1}, **cache).model()
    proof = prove(right, lower_to_portable(right).model)
    assert proof.proved, proof.note
    assert "in onnx.reference" in proof.note
    wrong = replace(FORM, queries=1, attributes={"is_causal": 1, "scale": 0.3}, **cache).model()
    with pytest.raises(CheckError, match="in 'y'"):
        prove(right, lower_to_portable(wrong).model)


def test_masked_scores_may_be_the_lowest_number_or_infinite(prove):
    scores = {"outputs": ("y", "", "", "scores"), "attributes": {"qk_matmul_output_mode": 2}}
    right = replace(FORM, mask=(3, 1, 5, 6), **scores).model()
    proof = prove(right, lower_to_portable(right).model)
    assert proof.proved, proof.note
    assert "but not" not in proof.note


def test_bfloat16_is_proved(prove):
    right = replace(FORM, dtype=TensorProto.BFLOAT16, value_size=4).model()
    proof = prove(right, lower_to_portable(right).model)
    assert proof.proved, proof.note


def test_ids_out_of_a_small_table_shrink_until_the_graph_takes_them(prove):
    table = [("table", np.arange(6, dtype=np.float32).reshape(2, 3))]
    io = [value("ids", INT64, [4, 9])], [value("y", FLOAT, [4, 9, 3])]
    nodes = [helper.make_node("Gather", ["table", "ids"], ["y"])]
    right = model_of(nodes, *io, table)
    assert prove(right, right).proved
    wrong = model_of(nodes, *io, [("table", np.zeros([2, 3], np.float32))])
    with pytest.raises(CheckError, match="in 'y'"):
        prove(right, wrong)


def test_an_axis_written_as_a_sum_has_the_sum_of_its_sizes(prove):
    nodes = [
        helper.make_node("Concat", ["past", "new"], ["both"], axis=0),
        helper.make_node("Mul", ["both", "bias"], ["y"]),
    ]
    inputs = [
        value("past", FLOAT, ["p"]),
        value("new", FLOAT, ["s"]),
        value("bias", FLOAT, ["p + s"]),
    ]
    right = model_of(nodes, inputs, [value("y", FLOAT, ["p + s"])])
    assert prove(right, right, [{"p": 3, "s": 4, "p + s": 5}, {"p": 2, "s": 6}]).proved


def test_an_axis_without_a_size_is_not_proved(prove):
    right = arg("ArgMax")
    proof = prove(right, right, inputs=[TensorSpec("x", "float32", ("rows // 2", 9))])
    assert not proof.proved
    assert "no size is known for the axis 'rows // 2'" in proof.note


def test_an_original_that_nothing_runs_is_not_proved(prove):
    node = helper.make_node("Nothing", ["x"], ["y"], domain="some.where")
    right = model_of([node], [value("x", FLOAT, [4])], [value("y", FLOAT, [4])])
    right.opset_import.append(helper.make_opsetid("some.where", 1))
    proof = prove(right, right)
    assert not proof.proved
    assert "ONNX Runtime: " in proof.note
    assert "onnx.reference: " in proof.note


def test_a_lowered_graph_that_nothing_runs_is_refused(prove):
    right = model_of(
        [helper.make_node("Neg", ["x"], ["y"])], [value("x", FLOAT, [4])], [value("y", FLOAT, [4])]
    )
    wrong = model_of(
        [helper.make_node("Reshape", ["x", "five"], ["y"])],
        [value("x", FLOAT, [4])],
        [value("y", FLOAT, [5])],
        [("five", np.array([5]))],
    )
    with pytest.raises(GraphError, match="does not run where the original does"):
        prove(right, wrong)


def infinite():
    nodes = [helper.make_node("Abs", ["x"], ["a"]), helper.make_node("Add", ["a", "inf"], ["y"])]
    inf = [("inf", np.array(np.inf, np.float32))]
    return model_of(nodes, [value("x", FLOAT, [4])], [value("y", FLOAT, [4])], inf)


def test_an_output_of_which_nothing_was_compared_is_not_proved(prove):
    proof = prove(infinite(), infinite())
    assert not proof.proved
    assert "y: nothing was comparable" in proof.note


def test_nan_where_the_original_is_infinite_is_caught(prove):
    wrong = infinite()
    wrong.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(np.array(np.nan, np.float32), "inf"))
    with pytest.raises(CheckError, match="in 'y': NaN"):
        prove(infinite(), wrong)


def test_a_mask_by_name_that_is_multiplied_with_is_not_fed_infinities(prove):
    nodes = [
        helper.make_node("Mul", ["zero", "mask"], ["none"]),
        helper.make_node("Add", ["x", "none"], ["y"]),
    ]
    inputs = [value("x", FLOAT, [4, 4]), value("mask", FLOAT, [4, 4])]
    zero = [("zero", np.array(0, np.float32))]
    right = model_of(nodes, inputs, [value("y", FLOAT, [4, 4])], zero)
    assert prove(right, right).proved
