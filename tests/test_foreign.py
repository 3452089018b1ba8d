"""verify DIR --onnx FILE: files that something else made, against a bundle's reference."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import onnx
import pytest
from conftest import SMALL_DIMS
from foreign_files import aligned_to_the_last_key, edited, foreign_block, with_tiled_heads
from graphs import Mha, save
from onnx import TensorProto, numpy_helper

from mha_deploy.errors import InputError
from mha_deploy.foreign import verify_file
from mha_deploy.foreign.matching import match_inputs
from mha_deploy.foreign.onnx_file import read_foreign
from mha_deploy.precision import Precision
from mha_deploy.signature import Dim, TensorSpec

SPELLED_OUT = Mha(opset=17, dtype="fp32", heads=4, head_dim=8)
PACKED = {
    "x": np.random.default_rng(0).standard_normal((20, 32)).astype(np.float32),
    "lengths": np.array([12, 8]),
}
FEW = ("odd", "ragged-padding", "fully-masked-row", "padding-garbage")


@pytest.fixture(scope="module")
def canonical(small_bundle):
    """A right file, to be edited: the bundle's own."""
    return small_bundle.artifact().path(small_bundle.folder)


def outcomes(report):
    return {case.name: case.outcome for case in report.cases}


def said(report):
    return "\n".join(report.not_checked)


@pytest.mark.parametrize(
    ("mask", "name", "form"),
    [("int64", "attention_mask", ""), ("additive", "bias", ""), ("ignore", "ignored", "ignore")],
)
def test_masks_of_other_forms_are_fed_in_their_own(mask, name, form, canonical, small_bundle, tmp_path):
    path = edited(canonical, tmp_path / "foreign.onnx", mask=mask)
    report = verify_file(small_bundle, path, mask_form=form, names=FEW)
    assert outcomes(report) == dict.fromkeys(FEW, "passed")
    assert f"whether mask '{name}'" in said(report)
    assert "by shape and dtype" in report.notes[0]


def test_an_inverted_mask_fails_where_anything_is_masked(canonical, small_bundle, tmp_path):
    path = edited(canonical, tmp_path / "foreign.onnx", mask="ignore", rename=[("ignored", "mask_")])
    assert set(outcomes(verify_file(small_bundle, path, names=FEW)).values()) == {"failed"}


def test_inputs_and_outputs_of_other_names_are_found_by_shape_or_said(canonical, small_bundle, tmp_path):
    path = edited(canonical, tmp_path / "f.onnx", rename=[("x", "hidden"), ("y", "out")], extra_output=True)
    with pytest.raises(InputError, match=r"2 outputs; name one with --output-name: out .*, again "):
        verify_file(small_bundle, path)
    report = verify_file(small_bundle, path, output_name="out", input_names=["mask=mask"], names=["min"])
    assert report.passed
    assert report.notes[0] == "inputs: mask = mask (as named), hidden = x (by shape and dtype)"
    assert "outputs again: only out is compared" in said(report)


def test_inputs_that_cannot_be_told_apart_are_refused_with_the_option_that_tells(canonical, tmp_path):
    ours = [TensorSpec(name, "float32", ("batch", "q_len", 8)) for name in ("query", "key")]
    theirs = [TensorSpec(name, "float32", ("b", "s", 8)) for name in ("a", "c")]
    with pytest.raises(InputError, match=r"cannot be told; the bundle has query.*--input-name query=a"):
        match_inputs(ours, theirs)
    pairs = match_inputs(ours, theirs, [("query", "c")])
    assert [(pair.ours.name, pair.theirs.name) for pair in pairs] == [("query", "c"), ("key", "a")]
    with pytest.raises(InputError, match="nothing for the bundle's key"):
        match_inputs(ours, theirs[:1], [("query", "a")])
    with pytest.raises(InputError, match=r"does not take the bundle's query .*; it is another block's"):
        match_inputs(ours[:1], [TensorSpec("query", "float32", ("b", "s", 9))])


def test_one_input_of_ours_may_feed_several_of_theirs():
    ours = [TensorSpec("x", "float32", ("batch", "seq", 8))]
    theirs = [TensorSpec(name, "float32", ("b", "s", 8)) for name in ("query", "key", "value")]
    pairs = match_inputs(ours, theirs, [("x", "query"), ("x", "key"), ("x", "value")])
    assert [pair.theirs.name for pair in pairs] == ["query", "key", "value"]


def test_a_frozen_axis_fails_unless_it_is_declared(canonical, small_bundle, tmp_path):
    path = edited(canonical, tmp_path / "frozen.onnx", sizes=[("seq", 16)])
    report = verify_file(small_bundle, path, names=FEW)
    frozen = report.cases[0]
    assert (frozen.name, frozen.outcome) == ("axis seq", "failed")
    assert "frozen at 16, the bundle has 1..64" in frozen.note
    assert {case.sizes["seq"] for case in report.cases} == {16}
    assert outcomes(report) == {"axis seq": "failed", **dict.fromkeys(FEW, "passed")}
    assert "sizes of seq other than 16" in said(report)
    declared = verify_file(small_bundle, path, dims=["seq=16"], names=FEW)
    assert declared.passed


def test_without_a_mask_input_padding_is_not_checked_and_that_is_said(tmp_path):
    bundle, model = foreign_block(SPELLED_OUT, tmp_path, dims=SMALL_DIMS)
    report = verify_file(bundle, save(model, tmp_path / "unmasked.onnx"), names=(*FEW, "sharp-softmax"))
    assert outcomes(report) == {"odd": "passed", "sharp-softmax": "passed"}
    assert "padding right, left and with holes, fully masked rows" in said(report)


def test_key_value_heads_in_the_wrong_order_are_caught(tmp_path):
    form = replace(SPELLED_OUT, kv_heads=2)
    bundle, model = foreign_block(form, tmp_path, mask="none", dims=SMALL_DIMS)
    names = ("odd", "sharp-softmax")
    assert verify_file(bundle, save(model, tmp_path / "right.onnx"), names=names).passed
    with_tiled_heads(model)
    wrong = verify_file(bundle, save(model, tmp_path / "tiled.onnx"), names=names)
    assert outcomes(wrong) == dict.fromkeys(names, "failed")


def test_causality_from_the_last_key_is_caught_where_lengths_differ(tmp_path):
    form = replace(SPELLED_OUT, cross=True, mask="causal")
    dims = (Dim("batch", 1, 2, 4), Dim("q_len", 8, 8, 16), Dim("kv_len", 8, 8, 24))
    bundle, model = foreign_block(form, tmp_path, kind="cross", causal=True, mask="none", dims=dims)
    names = ("opt", "max")
    assert verify_file(bundle, save(model, tmp_path / "right.onnx"), names=names).passed
    aligned_to_the_last_key(model)
    wrong = verify_file(bundle, save(model, tmp_path / "wrong.onnx"), names=names)
    assert outcomes(wrong) == {"opt": "passed", "max": "failed"}


def test_a_file_that_does_not_load_is_a_failed_case_with_the_runtimes_line(
    canonical, small_bundle, tmp_path, cli
):
    path = edited(canonical, tmp_path / "newer.onnx")
    model = onnx.load(path)
    model.graph.node[0].op_type = "NoSuchOperator"
    onnx.save(model, path)
    result = cli("verify", small_bundle.folder, "--onnx", path, "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 1
    assert [case["name"] for case in report["cases"]] == ["load"]
    assert "NoSuchOperator" in report["cases"][0]["note"]
    path.write_bytes(path.read_bytes()[:100])
    assert cli("verify", small_bundle.folder, "--onnx", path).exit_code == 1
    absent = cli("verify", small_bundle.folder, "--onnx", tmp_path / "absent.onnx")
    assert (absent.exit_code, "there is no file" in absent.stderr) == (2, True)


def test_a_file_that_fails_at_some_sizes_fails_those_cases_only(canonical, small_bundle, tmp_path):
    model = onnx.load(canonical)
    model.graph.initializer.append(numpy_helper.from_array(np.zeros((2, 8, 32), np.float32), "traced"))
    (last,) = (node for node in model.graph.node if "y" in node.output)
    last.output[0] = "y_"
    model.graph.node.append(onnx.helper.make_node("Add", ["y_", "traced"], ["y"]))
    onnx.save(model, tmp_path / "baked.onnx")
    report = verify_file(small_bundle, tmp_path / "baked.onnx", names=("opt", "odd"))
    assert outcomes(report) == {"opt": "passed", "odd": "failed"}
    assert "ONNX Runtime failed to run" in next(c.note for c in report.cases if c.name == "odd")


def test_the_precision_is_read_from_products_and_weights(canonical, tmp_path):
    assert read_foreign(canonical).precision is Precision.FP32
    model = onnx.load(canonical)
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT and len(tensor.dims) == 2:
            half = numpy_helper.to_array(tensor).astype(np.float16)
            tensor.CopyFrom(numpy_helper.from_array(half, f"{tensor.name}"))
    onnx.save(model, tmp_path / "half.onnx")
    found = read_foreign(tmp_path / "half.onnx")
    assert (found.precision, found.computes) == (Precision.FP16, "fp16+fp32")


def test_integer_products_need_a_budget_and_are_held_to_it(canonical, small_bundle, tmp_path, cli):
    from onnxruntime.quantization import quantize_dynamic

    path = tmp_path / "int8.onnx"
    quantize_dynamic(canonical, path, op_types_to_quantize=["MatMul"])
    with pytest.raises(InputError, match=r"--max-relative-error 2\.5%"):
        verify_file(small_bundle, path)
    generous = verify_file(small_bundle, path, max_relative_error=0.2, inputs=PACKED, names=["real-inputs"])
    assert (generous.passed, generous.cases[0].max_relative_error) == (True, 0.2)
    inputs = tmp_path / "real.npz"
    np.savez(inputs, **PACKED)
    arguments = ("verify", small_bundle.folder, "--onnx", path, "--max-relative-error", "0.01%", "--json")
    strict = cli(*arguments, "--inputs", inputs)
    assert (strict.exit_code, json.loads(strict.stdout)["cases"][1]["max_relative_error"]) == (1, 0.0001)
    unjudged = cli(*arguments)
    assert (unjudged.exit_code, "judged on real inputs" in unjudged.stderr) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["DIR", "--onnx", "F", "--reference", "a.py:b"], "--onnx and --reference: give one of them"),
        (["F"], "is an ONNX file; say what is right: --reference"),
        (["DIR", "--mask-form", "ignore"], "--mask-form does not go with the artifacts of a bundle"),
        (["DIR", "--onnx", "F", "--dim", "heads=3"], "no such axis; dynamic axes here: batch, seq"),
        (["DIR", "--onnx", "F", "--dim", "seq=9:3"], "expected AXIS=SIZE, AXIS=MIN:MAX or"),
        (["DIR", "--onnx", "F", "--input-name", "x"], "as ours=theirs"),
        (["DIR", "--onnx", "F", "--max-relative-error", "much"], "expected a share below 1, as 2.5%"),
        (["F", "--against", "F", "--heat-map", "a.png"], "--heat-map shows an error against a reference"),
        (["DIR", "--heat-map", "a.jpeg"], "expected a file that ends in .png"),
    ],
)
def test_options_that_do_not_go_together_are_refused_before_any_work(
    arguments, message, canonical, small_bundle, cli
):
    places = {"DIR": str(small_bundle.folder), "F": str(canonical)}
    result = cli("verify", *(places.get(a, a) for a in arguments))
    assert (result.exit_code, message in " ".join(result.stderr.split())) == (2, True), result.stderr
