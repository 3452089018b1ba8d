"""What has no lowering is refused by name, and what is no business of the lowering stays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from attention_nodes import BOOL, FLOAT, HALF, INT64, Form, run_ort
from onnx import TensorProto, helper

from mha_deploy.errors import GraphError
from mha_deploy.lowering import Step, lower_for_tensorrt, lower_to_portable

BOTH = pytest.mark.parametrize("lower", [lower_for_tensorrt, lower_to_portable])


def graph_model(
    nodes: list[onnx.NodeProto],
    inputs: dict[str, list[int | str]],
    output: str,
    *,
    opset: int = 24,
    dtype: int = FLOAT,
) -> onnx.ModelProto:
    """A model over inputs of one type; the output has the first input's shape."""
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(name, dtype, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(output, dtype, next(iter(inputs.values())))],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def altered(form: Form, **attributes: object) -> onnx.ModelProto:
    model = form.model()
    model.graph.node[0].attribute.extend(helper.make_attribute(*item) for item in attributes.items())
    return model


@BOTH
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Form(q_heads=4, kv_heads=3).model(), "4 query heads are no multiple of 3 key/value heads"),
        (Form(attributes={"scale": -1.0}).model(), "scale = -1; its square root"),
        (altered(Form(), TRT_decomposable=1), "attribute 'TRT_decomposable' has no lowering"),
        (altered(Form(opset=25), left_window_size=-2), "window sizes -2 and -1; expected -1 or more"),
        (altered(Form(), qk_matmul_output_mode=4), "qk_matmul_output_mode = 4; expected 0 to 3"),
        (altered(Form(), softmax_precision=INT64), "softmax_precision = 7 is no floating-point type"),
        (Form(mask=(5, 3), opset=23).model(), "3 columns for 5 keys; only opset 24 and later pad it"),
        (Form(mask=(5, 7)).model(), "7 columns for 5 keys"),
    ],
    ids=["heads", "scale", "attribute", "window", "mode", "softmax", "short mask", "long mask"],
)
def test_an_attention_that_the_standard_does_not_allow_is_refused_by_name(lower, model, message):
    with pytest.raises(GraphError, match=f"node 'attention'.*{message}"):
        lower(model)


@BOTH
def test_lengths_beside_a_cache_are_refused(lower):
    with pytest.raises(GraphError, match="nonpad_kv_seqlen excludes past and present"):
        lower(Form(past=2, lengths=(1, 2)).model())


@BOTH
def test_inputs_of_rank_3_without_heads_are_refused(lower):
    model = Form(rank=3).model()
    del model.graph.node[0].attribute[:]
    with pytest.raises(GraphError, match="inputs of rank 3 need q_num_heads and kv_num_heads"):
        lower(model)


@BOTH
def test_an_input_of_unknown_rank_is_refused(lower):
    model = Form().model()
    model.graph.input[0].type.tensor_type.ClearField("shape")
    with pytest.raises(GraphError, match="'attention': input 'q', whose shape cannot be inferred"):
        lower(model)


@BOTH
def test_attention_inside_control_flow_is_refused(lower):
    model = Form().model()
    graph = model.graph
    branch = helper.make_graph([graph.node[0]], "branch", [], [graph.output[0]])
    choose = helper.make_node("If", ["choice"], ["y"], name="choose", then_branch=branch, else_branch=branch)
    graph.node.pop()
    graph.node.append(choose)
    graph.input.append(helper.make_tensor_value_info("choice", BOOL, []))
    with pytest.raises(
        GraphError, match="'attention': Attention inside the If node 'choose' has no lowering"
    ):
        lower(model)


@BOTH
def test_attention_inside_a_function_is_refused(lower):
    model = Form().model()
    attention = model.graph.node.pop()
    opsets = [helper.make_opsetid("", 24)]
    function = helper.make_function("local", "block", ["q", "k", "v"], ["y"], [attention], opsets)
    model.functions.append(function)
    model.opset_import.append(helper.make_opsetid("local", 1))
    model.graph.node.append(helper.make_node("block", ["q", "k", "v"], ["y"], domain="local"))
    with pytest.raises(GraphError, match=r"inside the function 'block'.*inline_local_functions"):
        lower(model)


def test_tensorrt_has_no_float64():
    with pytest.raises(GraphError, match="'attention': element type float64 has no lowering: TensorRT"):
        lower_for_tensorrt(Form(dtype=TensorProto.DOUBLE).model())


def test_another_domains_attention_is_left_alone():
    model = graph_model(
        [helper.make_node("Attention", ["x"], ["y"], domain="com.microsoft")], {"x": [1, 2, 4]}, "y"
    )
    assert lower_for_tensorrt(model).model == model


@pytest.mark.parametrize(
    ("node", "dtype", "message"),
    [
        (helper.make_node("TensorScatter", ["x", "x"], ["y"], name="n"), FLOAT, "operator TensorScatter"),
        (helper.make_node("CumProd", ["x", "x"], ["y"], name="n"), FLOAT, "operator CumProd"),
        (helper.make_node("Identity", ["x"], ["y"], name="n"), TensorProto.UINT4, "Identity of tensor"),
        (
            helper.make_node("QuantizeLinear", ["x", "x"], ["y"], name="n", block_size=2),
            FLOAT,
            "attribute 'block_size' of QuantizeLinear",
        ),
        (
            helper.make_node("GroupNormalization", ["x", "x", "x"], ["y"], name="n", num_groups=1),
            FLOAT,
            "operator GroupNormalization",
        ),
    ],
    ids=["TensorScatter", "CumProd", "uint4", "block_size", "GroupNormalization"],
)
def test_what_opset_20_cannot_say_is_refused_by_name(node, dtype, message):
    opset = 26 if node.op_type == "CumProd" else 24
    model = graph_model([node], {"x": [2, 2]}, "y", opset=opset, dtype=dtype)
    with pytest.raises(GraphError, match=rf"node 'n': {message}.* has no lowering: opset 20"):
        lower_to_portable(model)


def test_a_newer_operator_that_is_a_function_is_spelt_out():
    nodes = [
        helper.make_node("RMSNormalization", ["x", "w"], ["t"], name="norm"),
        helper.make_node("Swish", ["t"], ["y"], name="swish"),
    ]
    model = graph_model(nodes, {"x": [2, 4], "w": [4]}, "y")
    lowered = lower_to_portable(model)
    assert [(step.node, step.rule) for step in lowered.steps] == [
        ("norm", "inline"),
        ("swish", "inline"),
        ("model", "retarget-opset"),
    ]
    feeds = {"x": np.array([[1, 2, 3, 4], [-1, 0, 1, 0]], np.float32), "w": np.ones(4, np.float32)}
    normal = feeds["x"] / np.sqrt((feeds["x"] ** 2).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(run_ort(lowered.model, feeds)["y"], normal / (1 + np.exp(-normal)), atol=1e-6)


@pytest.mark.parametrize("heads", [{}, {"num_heads": 4}], ids=["rank 4", "rank 3"])
@pytest.mark.parametrize("part", [0, 4, 8])
@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("positions", [False, True])
def test_a_rotary_embedding_is_the_same_in_its_portable_form(heads, part, interleaved, positions):
    angles = (part or 8) // 2
    shape = ["batch", "length", 32] if heads else ["batch", 4, "length", 8]
    cache = [20, angles] if positions else ["batch", "length", angles]
    inputs = ["x", "cos", "sin", *(["positions"] if positions else [])]
    node = helper.make_node(
        "RotaryEmbedding", inputs, ["y"], interleaved=interleaved, rotary_embedding_dim=part, **heads
    )
    model = graph_model([node], {"x": shape, "cos": cache, "sin": cache}, "y")
    rng = np.random.default_rng(part)
    sizes = {"batch": 2, "length": 5}
    feeds = {
        value.name: rng.standard_normal(
            [sizes.get(dim.dim_param, dim.dim_value) for dim in value.type.tensor_type.shape.dim]
        ).astype(np.float32)
        for value in model.graph.input
    }
    if positions:
        model.graph.input.append(helper.make_tensor_value_info("positions", INT64, ["batch", "length"]))
        feeds["positions"] = rng.integers(0, 20, (2, 5))
    lowered = lower_to_portable(model)
    onnx.checker.check_model(lowered.model, full_check=True)
    assert lowered.steps[0] == Step("RotaryEmbedding_y", "decompose", "opset 20 has no RotaryEmbedding")
    np.testing.assert_allclose(
        run_ort(lowered.model, feeds)["y"], run_ort(model, feeds)["y"], rtol=1e-6, atol=1e-6
    )


def test_a_rotary_embedding_of_rank_3_needs_its_heads():
    node = helper.make_node("RotaryEmbedding", ["x", "c", "c"], ["y"], name="rope")
    model = graph_model([node], {"x": [1, 2, 8], "c": [1, 2, 4]}, "y")
    with pytest.raises(
        GraphError, match="'rope' is no valid RotaryEmbedding: input of rank 3 with num_heads = 0"
    ):
        lower_to_portable(model)


@BOTH
def test_new_names_avoid_those_of_the_graph(lower):
    form = Form(mask=(2, 1, 1, 5), attributes={"is_causal": 1})
    model = form.model()
    model.graph.output[0].name = model.graph.node[0].output[0] = "attention/Less"
    model.graph.input.append(helper.make_tensor_value_info("attention/LessOrEqual", FLOAT, [1]))
    lowered = lower(model).model
    onnx.checker.check_model(lowered, full_check=True)
    made = [output for node in lowered.graph.node for output in node.output]
    assert "attention/LessOrEqual" not in made
    assert made.count("attention/Less") == 1


@BOTH
def test_two_nodes_without_a_name_are_told_apart_by_their_outputs(lower):
    form = Form(attributes={"softcap": 1.0})
    model = form.model()
    first = model.graph.node[0]
    second = onnx.NodeProto()
    second.CopyFrom(first)
    first.name = second.name = ""
    first.output[0] = second.input[0] = "between"
    model.graph.node.append(second)
    lowered = lower(model)
    assert [step.node for step in lowered.steps if step.rule == "decompose"] == [
        "Attention_between",
        "Attention_y",
    ]
    onnx.checker.check_model(lowered.model, full_check=True)


@BOTH
def test_initializers_stay_as_they_are_with_their_data_elsewhere(lower):
    model = Form(attributes={"softcap": 1.0}).model()
    weights = TensorProto(name="w", data_type=FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    weights.external_data.add(key="location", value="weights.bin")
    model.graph.initializer.append(weights)
    assert list(lower(model).model.graph.initializer) == [weights]


@BOTH
def test_the_model_given_is_not_changed(lower):
    model = Form(attributes={"softcap": 1.0}).model()
    before = model.SerializeToString(deterministic=True)
    lower(model)
    assert model.SerializeToString(deterministic=True) == before


def test_a_model_of_opset_20_is_portable_as_it_is():
    model = graph_model([helper.make_node("Softmax", ["x"], ["y"])], {"x": [2, 2]}, "y", opset=20)
    lowered = lower_to_portable(model)
    assert lowered.steps == ()
    assert lowered.model == model


def test_a_step_reads_as_one_line():
    step = lower_for_tensorrt(replace(Form(), dtype=HALF, value_size=6).model()).steps[0]
    assert str(step) == (
        "attention: pad-value-heads (TensorRT wants one head size; "
        "query and key heads have size 8, value heads 6)"
    )
