"""build-engine on ONNX files made by anything else: lowered, proved against the original, built."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import onnx
import pytest
from attention_nodes import HALF, Form
from graphs import Mha, write_mha

from mha_deploy.errors import CheckError
from mha_deploy.proof import prove_same
from mha_deploy.tensorrt.graph import read_graph

pytest.importorskip("tensorrt_rtx")

FORM = Form(q_heads=4, kv_heads=4, queries=16, keys=16, size=64, value_size=64, dtype=HALF)


def written(form: Form, path):
    onnx.save(form.model(), path)
    return path


def build(cli, path, out, *options):
    result = cli("build-engine", path, "-o", out, "--json", *options)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"mask": (2, 1, 16, 16), "attributes": {"is_causal": 1}}, "fold-causal-into-mask"),
        ({"value_size": 32}, "pad-value-heads"),
        ({"past": 16, "outputs": ("y", "present_key", "present_value")}, "cache-by-concat"),
        ({"lengths": (3, 16)}, "fold-lengths-into-mask"),
        ({"attributes": {"softcap": 2.0}}, "decompose"),
    ],
)
def test_what_tensorrt_refuses_is_lowered_named_and_proved(changes, rule, cli, tmp_path):
    path = written(replace(FORM, **changes), tmp_path / "model.onnx")
    report = build(cli, path, tmp_path / "out")
    assert rule in {step["rule"] for step in report["lowering"]}
    assert "ONNX Runtime" in report["checked"]
    assert (tmp_path / "out" / report["plan"].rsplit("/", 1)[1]).stat().st_size == report["plan_bytes"]


def test_the_same_file_again_is_a_cache_hit_and_a_changed_one_is_not(cli, tmp_path):
    path = write_mha(tmp_path, Mha(opset=23, dtype="fp16", mask="none"))
    profile = ("--profile", "batch=1:2:4,seq=1:8:32")
    assert build(cli, path, tmp_path / "out", *profile)["cached"] is False
    assert build(cli, path, tmp_path / "out", *profile)["cached"] is True
    assert build(cli, path, tmp_path / "out", "--profile", "batch=1:2:4,seq=1:8:16")["cached"] is False


def test_changed_external_weights_never_meet_an_old_engine(cli, tmp_path):
    path = write_mha(tmp_path, Mha(opset=23, dtype="fp16", mask="none"))
    model = onnx.load(path)
    external = tmp_path / "external.onnx"
    onnx.save(model, external, save_as_external_data=True, location="weights.bin", size_threshold=1024)
    profile = ("--profile", "batch=1:2:4,seq=1:8:32")
    first = build(cli, external, tmp_path / "out", *profile)
    data = bytearray((tmp_path / "weights.bin").read_bytes())
    data[:2] = b"\x00\x3c"
    (tmp_path / "weights.bin").write_bytes(data)
    second = build(cli, external, tmp_path / "out", *profile)
    assert second["cached"] is False
    assert second["weights_sha256"] != first["weights_sha256"] != ""


def test_a_mixed_file_is_not_one_of_the_precision_that_was_named(cli, tmp_path):
    path = write_mha(tmp_path, Mha(opset=23, dtype="fp16", mask="none"))
    model = onnx.load(path)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(4, np.float32), "unused"))
    onnx.save(model, path)
    result = cli("build-engine", path, "-o", tmp_path / "out", "--fp16", "--profile", "batch=1:4,seq=1:8")
    assert result.exit_code == 2
    assert "is written in fp16+fp32" in result.stderr


def test_inspect_shows_the_engines_of_a_folder(cli, tmp_path):
    path = write_mha(tmp_path, Mha(opset=23, dtype="fp16", mask="none"))
    build(cli, path, tmp_path / "out", "--profile", "batch=1:2:4,seq=1:8:32", "--name", "mine")
    text = cli("inspect", tmp_path / "out").stdout
    assert "engine mine-" in text
    assert "--name mine" in text
    assert json.loads(cli("inspect", tmp_path / "out", "--json").stdout)


def test_a_lowering_that_changes_the_answer_is_caught_before_the_build(tmp_path):
    path = written(FORM, tmp_path / "model.onnx")
    model = onnx.load(path)
    attention = next(node for node in model.graph.node if node.op_type == "Attention")
    attention.attribute.append(onnx.helper.make_attribute("scale", 0.126))  # 1/8 is right
    onnx.save(model, tmp_path / "wrong.onnx")
    with pytest.raises(CheckError, match=r"differs from the original .* in 'y'"):
        prove_same(path, tmp_path / "wrong.onnx", read_graph(path).inputs, [{}])


def test_a_graph_is_the_same_as_itself(tmp_path):
    path = written(FORM, tmp_path / "model.onnx")
    assert prove_same(path, path, read_graph(path).inputs, [{}]).proved


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "is empty"), (b"garbage" * 99, "does not parse as ONNX"), (None, "there is no file")],
)
def test_a_file_that_is_no_onnx_is_refused_in_one_line(content, message, cli, tmp_path):
    if content is not None:
        (tmp_path / "model.onnx").write_bytes(content)
    result = cli("build-engine", tmp_path / "model.onnx", "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_precision_that_the_file_has_not_is_refused_rather_than_built_otherwise(cli, tmp_path):
    path = write_mha(tmp_path, Mha(opset=23, dtype="fp32", mask="none"))
    result = cli("build-engine", path, "-o", tmp_path / "out", "--fp16", "--profile", "batch=1:4,seq=1:8")
    assert result.exit_code == 2
    assert "fp16 was asked for, but" in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_dynamic_file_without_a_profile_is_refused_with_the_axes_to_give(cli, tmp_path):
    path = write_mha(tmp_path, Mha(opset=23, dtype="fp16", mask="none"))
    result = cli("build-engine", path, "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert "--profile batch=MIN:OPT:MAX,seq=MIN:OPT:MAX" in result.stderr


def test_an_onnx_file_without_a_folder_for_its_engine_is_refused(cli, tmp_path):
    path = write_mha(tmp_path, Mha(opset=23, dtype="fp16", mask="none"))
    result = cli("build-engine", path, "--fp16")
    assert result.exit_code == 2
    assert "give the engine's folder with -o" in result.stderr


def test_a_graph_that_takes_tensorrt_down_is_built_in_the_portable_form_and_the_crash_is_told(cli, tmp_path):
    """One tensor as query, key and value: the library dies of it, in a process of its own."""
    node = onnx.helper.make_node("Attention", ["x", "x", "x"], ["y"], name="a")
    ends = [
        onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT16, [1, 4, 8, 64]) for n in ("x", "y")
    ]
    graph = onnx.helper.make_graph([node], "g", ends[:1], ends[1:])
    opsets = [onnx.helper.make_opsetid("", 23)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=11), tmp_path / "model.onnx")
    report = build(cli, tmp_path / "model.onnx", tmp_path / "out")
    assert "the portable form was built, since TensorRT's compiler failed" in report["warnings"][0]
    assert "decompose" in {step["rule"] for step in report["lowering"]}


def test_a_head_size_that_crashes_the_compiler_is_built_in_the_portable_form(cli, tmp_path):
    path = write_mha(tmp_path, Mha(opset=23, dtype="fp16", mask="bool", heads=2, head_dim=100))
    report = build(cli, path, tmp_path / "out", "--profile", "batch=1:2:4,seq=1:8:32", "--target-sm", "sm89")
    assert "decompose" in {step["rule"] for step in report["lowering"]}
    assert np.all([each["fused"] for each in report["attentions"]])
