"""verify MODEL.onnx --reference file.py:factory, and --against OTHER.onnx."""

from __future__ import annotations

import importlib.util
import json
import warnings
from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from foreign_files import REFERENCE, edited, replaced, with_tiled_heads
from graphs import Mha, mha_model, save
from onnx import TensorProto, helper, numpy_helper

from mha_deploy.errors import InputError
from mha_deploy.foreign import verify_against_file, verify_against_module
from mha_deploy.foreign.onnx_file import read_foreign

DIMS = ("batch=1:2:4", "seq=1:8:16")
SPELLED_OUT = Mha(opset=17, dtype="fp32", heads=4, head_dim=8)
MASKS = np.stack([np.arange(16) < 10, np.arange(16) >= 6, np.arange(16) % 2 == 0])


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    path = tmp_path_factory.mktemp("reference") / "model.py"
    path.write_text(REFERENCE, encoding="utf-8")
    return path


def token_graph(path):
    """`OfTokens` written by hand."""
    module = load(path.parent / "model.py").tokens()
    stored = {name: t.numpy() for name, t in module.state_dict().items()}
    stored |= {"axis": np.array([1]), "one": np.float32(1), "lowest": np.finfo(np.float32).min}
    stored |= {"scale": np.float32(32**-0.5), "matrix": np.ascontiguousarray(stored["project.weight"].T)}
    op = helper.make_node
    nodes = [
        op("Gather", ["embedding.weight", "input_ids"], ["x"]),
        op("MatMul", ["x", "matrix"], ["q_"]),
        op("Add", ["q_", "project.bias"], ["q"]),
        op("Transpose", ["x"], ["k"], perm=[0, 2, 1]),
        op("MatMul", ["q", "k"], ["scores_"]),
        op("Mul", ["scores_", "scale"], ["scores"]),
        op("Unsqueeze", ["attention_mask", "axis"], ["row"]),
        op("Cast", ["row"], ["kept"], to=TensorProto.FLOAT),
        op("Sub", ["one", "kept"], ["hidden"]),
        op("Mul", ["hidden", "lowest"], ["bias"]),
        op("Add", ["scores", "bias"], ["masked"]),
        op("Softmax", ["masked"], ["weights"]),
        op("MatMul", ["weights", "x"], ["y"]),
    ]
    axes = ["batch", "seq"]
    inputs = [
        helper.make_tensor_value_info(n, TensorProto.INT64, axes) for n in ("input_ids", "attention_mask")
    ]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [*axes, 32])]
    weights = [numpy_helper.from_array(np.asarray(array), name) for name, array in stored.items()]
    graph = helper.make_graph(nodes, "tokens", inputs, outputs, weights)
    return save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), path)


def load(path):
    spec = importlib.util.spec_from_file_location("reference", path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture(scope="module")
def exported(reference):
    """torch.nn.MultiheadAttention with a key padding mask, as torch.onnx.export leaves it by default."""
    loaded = load(reference)
    path = reference.with_name("exported.onnx")
    axes = dict(enumerate(torch.export.Dim(name) for name in ("batch", "seq")))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # the exporter's own
        torch.onnx.export(
            loaded.right().eval(),
            (torch.randn(3, 7, 32), torch.zeros(3, 7, dtype=torch.bool)),
            path,
            input_names=["x", "key_padding_mask"],
            output_names=["y", "weights"],
            dynamic_shapes=(axes, axes),
            dynamo=True,
            verbose=False,
        )
    return path


def verified(path, reference, factory="right", **options):
    return verify_against_module(path, f"{reference}:{factory}", **{"dims": DIMS, **options})


def failed(report):
    return [case.name for case in report.cases if case.outcome == "failed"]


def test_torchs_own_export_of_its_own_attention_passes(exported, reference, cli):
    dims = [part for text in DIMS for part in ("--dim", text)]
    result = cli("verify", exported, "--reference", f"{reference}:right", *dims, "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 0, result.stdout
    assert {"min", "opt", "max", "odd", "padding", "sharp-softmax"} <= {c["name"] for c in report["cases"]}
    assert "outputs weights: only y is compared" in report["not_checked"]
    assert report["against"] == "model.py:right in PyTorch fp64"


def test_rows_where_the_module_itself_is_nan_are_counted_and_not_compared(exported, reference):
    (hidden,) = verified(exported, reference, names=["fully-masked-row"]).cases
    assert hidden.passed
    assert "rows not compared: the module is not finite there" in hidden.note


def test_another_output_is_compared_where_it_is_named(exported, reference):
    report = verified(exported, reference, output_name="weights", names=["odd"])
    assert report.passed
    assert "outputs y: only weights is compared" in report.not_checked


def test_one_weight_row_off_by_a_thousandth_fails(exported, reference):
    assert failed(verified(exported, reference, "other_weights", names=["odd"]))


def test_an_inverted_mask_fails(exported, reference, tmp_path):
    model = onnx.load(exported)
    for node in model.graph.node:
        node.input[:] = ["not" if name == "key_padding_mask" else name for name in node.input]
    inverted = helper.make_node("Not", ["key_padding_mask"], ["not"])
    replaced(model.graph.node, [inverted, *model.graph.node])
    onnx.save(model, tmp_path / "inverted.onnx")
    names = ["odd", "padding"]
    assert failed(verified(tmp_path / "inverted.onnx", reference, names=names)) == names


def test_a_file_that_onnx_runtime_optimised_is_read_and_passes(exported, reference):
    path = exported.with_name("optimised.onnx")  # it refers to the weights beside it
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(path)
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.log_severity_level = 4
    onnxruntime.InferenceSession(str(exported), options, providers=["CPUExecutionProvider"])
    assert "com.microsoft" in {node.domain for node in onnx.load(path, load_external_data=False).graph.node}
    assert verified(path, reference, names=["odd", "padding"]).passed


def test_right_left_and_hole_padding_are_among_the_cases(exported, reference):
    """Fusions that take a length for the mask are right on the first only (microsoft/onnxruntime#18945)."""
    from mha_deploy.foreign.drawing import Drawing
    from mha_deploy.foreign.onnx_file import dims_of

    file = read_foreign(exported)
    dims = dims_of(file, ("batch=3", "seq=16"))
    (case,) = Drawing(file, dims, lambda _: None, 0).cases(["padding"])
    rows = case.feeds["key_padding_mask"]
    right, left, holes = rows[:3]
    assert right.argmin() == right.sum() < 16
    assert left[::-1].argmin() == left.sum() < 16
    assert np.array_equal(holes, MASKS[2])


def test_a_length_in_place_of_a_mask_fails(exported, reference, tmp_path):
    """The fusion's fault itself: what is ignored is counted, and that many keys at the end are left out."""
    model = onnx.load(exported)
    for node in model.graph.node:
        node.input[:] = ["by_length" if name == "key_padding_mask" else name for name in node.input]
    front = [
        helper.make_node("Cast", ["key_padding_mask"], ["as_int"], to=TensorProto.INT64),
        helper.make_node("ReduceSum", ["as_int", "last"], ["ignored"], keepdims=1),
        helper.make_node("Shape", ["key_padding_mask"], ["length"], start=1, end=2),
        helper.make_node("Squeeze", ["length"], ["many"]),
        helper.make_node("Range", ["zero", "many", "one"], ["position"]),
        helper.make_node("Sub", ["many", "ignored"], ["kept"]),
        helper.make_node("GreaterOrEqual", ["position", "kept"], ["by_length"]),
    ]
    for name, value in (("last", [1]), ("zero", 0), ("one", 1)):
        model.graph.initializer.append(numpy_helper.from_array(np.array(value, np.int64), name))
    replaced(model.graph.node, [*front, *model.graph.node])
    onnx.save(model, tmp_path / "length.onnx")
    assert failed(verified(tmp_path / "length.onnx", reference, names=["padding"])) == ["padding"]


def test_a_module_of_integers_gets_indices_it_takes_and_a_mask_of_zeros_and_ones(reference):
    path = token_graph(reference.with_name("tokens.onnx"))
    report = verified(path, reference, "tokens", dims=("batch=1:2:4", "seq=1:8:40"))
    assert report.passed, report.cases
    assert all(case.yardstick > 0 for case in report.cases)
    assert any("attention_mask beyond a name: drawn as a mask" in line for line in report.not_checked)
    assert any("integer inputs input_ids" in line for line in report.not_checked)
    with pytest.raises(InputError, match=r"tokens\.onnx has no floating-point input to move"):
        verify_against_file(path, path)
    assert verify_against_file(path, path, max_relative_error=1e-5).passed


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("absent", "AttributeError"),
        ("raises", r"failed: KeyError: 'weights.pt'"),
        ("no_module", r"returned a int; expected a torch\.nn\.Module"),
        ("", r"expected a Python file and a function in it, as file\.py:factory"),
    ],
)
def test_a_reference_that_cannot_be_had_is_one_line(factory, message, exported, reference):
    with pytest.raises(InputError, match=message):
        verified(exported, reference, factory)


def test_a_module_that_takes_other_inputs_is_the_users_error_in_one_line(reference, tmp_path):
    model = save(mha_model(SPELLED_OUT), tmp_path / "unmasked.onnx")
    with pytest.raises(InputError, match=r"the reference module does not run in fp64 on x .* float32"):
        verified(model, reference)


def test_axes_without_names_get_some(tmp_path):
    model = mha_model(SPELLED_OUT)
    for axis in model.graph.input[0].type.tensor_type.shape.dim:
        axis.ClearField("dim_param")
    assert read_foreign(save(model, tmp_path / "unnamed.onnx")).axes == ("x_axis0", "x_axis1")


def test_a_file_equals_itself_and_not_one_with_its_heads_in_another_order(tmp_path, cli):
    model = mha_model(replace(SPELLED_OUT, kv_heads=2))
    right = save(model, tmp_path / "right.onnx")
    with_tiled_heads(model)
    wrong = save(model, tmp_path / "wrong.onnx")
    assert verify_against_file(right, right, dims=DIMS).passed
    result = cli("verify", wrong, "--against", right, "--dim", DIMS[0], "--dim", DIMS[1], "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 1
    assert {case["outcome"] for case in report["cases"] if case["sizes"]["seq"] > 1} == {"failed"}
    assert "whether right.onnx itself is right" in report["not_checked"]


def test_files_with_masks_of_two_kinds_are_held_together(tmp_path):
    form = replace(SPELLED_OUT, mask="bool")
    right = save(mha_model(form), tmp_path / "right.onnx")
    integer = edited(right, tmp_path / "integer.onnx", mask="int64", rename=[("attention_mask", "mask_")])
    report = verify_against_file(integer, right, dims=DIMS)
    assert "mask_ = mask (by shape and dtype)" in report.notes[0]
    assert not failed(report)


def test_files_in_two_precisions_need_a_budget(tmp_path):
    full = save(mha_model(SPELLED_OUT), tmp_path / "full.onnx")
    half = save(mha_model(replace(SPELLED_OUT, dtype="fp16")), tmp_path / "half.onnx")
    with pytest.raises(InputError, match=r"fp16, full\.onnx in fp32: two files alone do not tell"):
        verify_against_file(half, full, dims=DIMS)
    report = verify_against_file(half, full, dims=DIMS, max_relative_error=0.01)
    assert report.passed
    assert 0 < max(case.relative_error for case in report.cases) < 0.01
    assert not verify_against_file(half, full, dims=DIMS, max_relative_error=1e-6).passed
