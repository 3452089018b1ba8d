"""What is found in an ONNX file before TensorRT sees it."""

import copy
from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import PROFILE, GraphWriter, Mha, mha_model, model, save
from onnx import TensorProto, helper
from tensorrt_builds import bare_errors, options, written

from mha_deploy.errors import GraphError
from mha_deploy.tensorrt import build as builds
from mha_deploy.tensorrt.attentions import Wiring, find_attentions
from mha_deploy.tensorrt.backend import load_backend
from mha_deploy.tensorrt.build import build_plan
from mha_deploy.tensorrt.graph import read_graph
from mha_deploy.tensorrt.lint import LintError, _node_problems, lint, parser_findings

HALF, INT64 = TensorProto.FLOAT16, TensorProto.INT64
value = helper.make_tensor_value_info


def attention_model(
    *extra: tuple[str, int, list], heads: tuple[int, int] = (4, 4), dims=(64, 64), opset=24, **attributes
) -> onnx.ModelProto:
    """One Attention over 4D query, key, value; `extra` are further inputs, "" leaves one out."""
    writer = GraphWriter("fp16")
    query = value("q", HALF, ["batch", heads[0], "seq", dims[0]])
    key = value("k", HALF, ["batch", heads[1], "seq", dims[0]])
    val = value("v", HALF, ["batch", heads[1], "seq", dims[1]])
    names = [name for name, _, _ in extra]
    writer.op("Attention", "q", "k", "v", *names, out="y", **attributes)
    inputs = [query, key, val, *(value(*item) for item in extra if item[0])]
    return model(writer, inputs, [value("y", HALF, ["batch", heads[0], "seq", dims[1]])], opset)


MASK = ("mask", TensorProto.BOOL, ["batch", 1, "seq", "seq"])
NO_MASK = ("", 0, [])
PAST = [(name, HALF, ["batch", 4, "past", 64]) for name in ("pk", "pv")]


def with_second_output() -> onnx.ModelProto:
    made = attention_model(NO_MASK, *PAST)
    made.graph.node[0].output.extend(["present_k", "present_v"])
    made.graph.output.extend(value(n, HALF, ["batch", 4, "total", 64]) for n in ("present_k", "present_v"))
    return made


def microsoft(kind: str, *inputs: str, **attributes) -> onnx.ModelProto:
    writer = GraphWriter("fp16")
    writer.op(kind, *inputs, out="y", domain="com.microsoft", **attributes)
    given = [value(name, HALF, ["batch", "seq", 256]) for name in dict.fromkeys(inputs) if name]
    output = value("y", HALF, ["batch", "seq", 256])
    return model(writer, given, [output], 20, domains={"com.microsoft": 1})


def cast_to_double() -> onnx.ModelProto:
    writer = GraphWriter("fp16")
    writer.op("Cast", writer.op("Exp", writer.op("Cast", "x", to=TensorProto.DOUBLE)), to=HALF, out="y")
    return model(writer, [value("x", HALF, ["n"])], [value("y", HALF, ["n"])], 20)


REFUSED = {
    "softcap": attention_model(softcap=20.0),
    "softmax-precision": attention_model(softmax_precision=1),
    "causal-and-mask": attention_model(MASK, is_causal=1),
    "second-output": with_second_output(),
    "cache": with_second_output(),
    "lengths-dropped": attention_model(MASK, NO_MASK, NO_MASK, ("nl", INT64, ["batch"])),
    "window-dropped": attention_model(left_window_size=2, opset=25),
    "head-count": attention_model(heads=(4, 3)),
    "value-head-size": attention_model(dims=(64, 32)),
    "mask-type": attention_model(("mask", TensorProto.FLOAT, ["batch", 1, "seq", "seq"])),
    "fused-elsewhere": microsoft("SkipLayerNormalization", "x", "x", "x"),
    "key-padding-mask": microsoft("MultiHeadAttention", "q", "k", "v", "", "mask", num_heads=4),
    "no-importer": None,
    "float64": cast_to_double(),
}


def no_importer() -> onnx.ModelProto:
    writer = GraphWriter("fp16")
    writer.op("MatMulInteger", "a", "b", out="y")
    inputs = [value(n, TensorProto.INT8, ["n", "n"]) for n in ("a", "b")]
    return model(writer, inputs, [value("y", TensorProto.INT32, ["n", "n"])], 20)


REFUSED["no-importer"] = no_importer()


@pytest.mark.parametrize("rule", REFUSED)
def test_what_tensorrt_refuses_or_drops_is_found_at_its_node(rule, tmp_path):
    graph = read_graph(save(REFUSED[rule], tmp_path / "refused.onnx"))
    found = {finding.rule: finding for finding in lint(graph)}
    node = graph.model.graph.node[0]
    assert found[rule].node == f"{node.name} ({node.op_type})"


# What the parser takes all the same, to compute something else or to fail later.
DROPPED = {"lengths-dropped", "window-dropped", "mask-type", "float64"}


@pytest.mark.parametrize("rule", sorted(set(REFUSED) - DROPPED))
def test_what_the_lint_refuses_the_parser_refuses_too(rule, tmp_path):
    graph = read_graph(save(REFUSED[rule], tmp_path / "refused.onnx"))
    assert parser_findings(load_backend("tensorrt-rtx"), graph)


@pytest.mark.parametrize("rule", sorted(DROPPED))
def test_what_the_parser_drops_in_silence_the_lint_refuses(rule, tmp_path):
    graph = read_graph(save(REFUSED[rule], tmp_path / "dropped.onnx"))
    assert (parser_findings(load_backend("tensorrt-rtx"), graph), lint(graph) != ()) == ((), True)


def test_a_build_of_a_refused_graph_lists_every_finding(tmp_path):
    made = attention_model(MASK, is_causal=1, softcap=3.0)
    path = save(made, tmp_path / "refused.onnx")
    with pytest.raises(LintError, match="TensorRT cannot take this graph as it is") as error:
        build_plan(path, options(path, "batch=1,seq=1:8"))
    assert [finding.rule for finding in error.value.findings] == ["softcap", "causal-and-mask"]
    assert "attention_0 (Attention): has softcap = 3. TensorRT has no capped attention" in str(error.value)
    assert error.value.exit_code == 2


def test_an_attribute_newer_than_the_lint_is_refused():
    node = attention_model(MASK).graph.node[0]
    node.attribute.append(helper.make_attribute("sink_tokens", 4))
    assert [rule for rule, _, _ in _node_problems(node, Wiring())] == ["attribute-unknown"]


def test_a_node_that_only_the_parser_refuses_is_explained_in_its_words(tmp_path):
    made = microsoft("MultiHeadAttention", "q", "k", "v", num_heads=4, mask_filter_value=-5.0)
    path = save(made, tmp_path / "filtered.onnx")
    with pytest.raises(GraphError, match=r"multiheadattention_0 .*parser refuses it: Unsupported MultiHead"):
        build_plan(path, options(path, "batch=1,seq=1:8"))


def test_fp64_is_refused_where_tensorrt_would_build_fp32(tmp_path):
    form = Mha(opset=20, dtype="fp64")
    findings = lint(read_graph(written(form)))
    assert {finding.rule for finding in findings} == {"float64"}
    assert [finding.node for finding in findings][:2] == ["x", "y"]
    assert findings[2].what == "is an fp64 weight (8 in all)"


def test_a_node_inside_a_body_is_linted_too(tmp_path):
    inner = attention_model(softcap=5.0).graph
    branch = helper.make_graph(inner.node, "branch", [], [value("y", HALF, None)])
    writer = GraphWriter("fp16")
    writer.op("If", "flag", out="z", then_branch=branch, else_branch=branch)
    inputs = [value("flag", TensorProto.BOOL, []), *inner.input]
    made = model(writer, inputs, [value("z", HALF, ["batch", 4, "seq", 64])], 24)
    graph = read_graph(save(made, tmp_path / "branches.onnx"))
    assert [finding.rule for finding in lint(graph)] == ["softcap", "softcap"]


@pytest.mark.parametrize("form", [Mha(), Mha(opset=20), Mha(mask="bool"), Mha(cast=True, mask="bool")])
def test_a_graph_that_builds_has_no_findings(form):
    assert lint(read_graph(written(form))) == ()


def test_the_parser_names_every_node_that_it_refuses(tmp_path):
    made = mha_model(Mha())
    for position in (0, 4):
        made.graph.node[position].op_type = "Frobnicate"
        made.graph.node[position].domain = "my.operators"
    made.opset_import.append(helper.make_opsetid("my.operators", 1))
    path = save(made, tmp_path / "unknown.onnx")
    with pytest.raises(LintError) as error:
        build_plan(path, options(path, PROFILE))
    assert [finding.node for finding in error.value.findings] == [
        "matmul_0 (Frobnicate)",
        "matmul_4 (Frobnicate)",
    ]
    assert "TensorRT knows no such operator and has no plugin of its name" in str(error.value)


def unreadable(path: Path, said: str) -> None:
    with pytest.raises(GraphError, match=said) as error:
        read_graph(path)
    assert error.value.exit_code == 2


def test_a_missing_file_is_named(tmp_path):
    unreadable(tmp_path / "nope.onnx", r"there is no file .*nope\.onnx")


def test_an_empty_file_is_refused_although_tensorrt_parses_it(tmp_path):
    path = tmp_path / "empty.onnx"
    path.write_bytes(b"")
    unreadable(path, "is empty; write or copy the ONNX model again")


@pytest.mark.parametrize("content", [b"\0not a model" * 9, b"PK\3\4 a zip", b"<html></html>"])
def test_another_kind_of_file_is_refused(tmp_path, content):
    path = tmp_path / "other.onnx"
    path.write_bytes(content)
    unreadable(path, "does not parse as ONNX|does not hold an ONNX graph")


@pytest.mark.parametrize("part", [0.5, 0.99])
def test_a_file_cut_short_is_refused(tmp_path, part):
    whole = mha_model(Mha()).SerializeToString()
    path = tmp_path / "cut.onnx"
    path.write_bytes(whole[: int(len(whole) * part)])
    unreadable(path, "cut short or another kind of file")


def changed(tmp_path: Path, change) -> Path:
    made = copy.deepcopy(mha_model(Mha()))
    change(made)
    return save(made, tmp_path / "changed.onnx")


def test_an_opset_from_the_future_is_refused_although_tensorrt_reads_it(tmp_path):
    path = changed(tmp_path, lambda m: setattr(m.opset_import[0], "version", 99))
    assert bare_errors(path)[0].startswith("IBuilder")  # parsed; only the profile is missing
    unreadable(path, "uses opset 99; the onnx package here knows opsets up to")


def test_an_ir_version_from_the_future_is_refused_although_tensorrt_reads_it(tmp_path):
    path = changed(tmp_path, lambda m: setattr(m, "ir_version", 99))
    unreadable(path, "has IR version 99; the onnx package here knows up to")


def test_a_node_that_reads_what_nothing_makes_is_refused(tmp_path):
    path = changed(tmp_path, lambda m: m.graph.node[0].input.__setitem__(0, "nowhere"))
    unreadable(path, "is not a valid ONNX model: .*input 'nowhere'")


def test_an_operator_that_onnx_does_not_know_is_refused(tmp_path):
    path = changed(tmp_path, lambda m: setattr(m.graph.node[0], "op_type", "Frobnicate"))
    unreadable(path, "No Op registered for Frobnicate")


def test_weights_cut_short_are_refused(tmp_path):
    def cut(made):
        made.graph.initializer[1].raw_data = made.graph.initializer[1].raw_data[:-6]

    unreadable(changed(tmp_path, cut), "weight_1.* is too small for the declared shape")


def test_external_weights_that_are_missing_are_refused(tmp_path):
    path = tmp_path / "external.onnx"
    onnx.save(mha_model(Mha()), path, save_as_external_data=True, location="weights.bin")
    assert read_graph(path).precision == "fp16"
    (tmp_path / "weights.bin").unlink()
    unreadable(path, r"weights\.bin")


def test_external_weights_are_found_beside_the_model_from_any_folder(tmp_path, monkeypatch):
    path = tmp_path / "external.onnx"
    onnx.save(mha_model(Mha()), path, save_as_external_data=True, location="weights.bin")
    monkeypatch.chdir("/")
    built = build_plan(path, options(path, PROFILE, attention="fused"))
    assert (built.fused, built.precision) == (1, "fp16")


def test_operands_of_two_types_are_refused(tmp_path):
    def mix(made):
        array = np.zeros((256, 256), np.float32)
        made.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(array, "weight_0"))

    unreadable(changed(tmp_path, mix), "matmul_0.* inconsistent type")


def test_attentions_are_found_as_operators_and_as_chains():
    operator, chain = (find_attentions(read_graph(written(Mha(opset=o))))[0] for o in (23, 20))
    assert (operator.name, operator.operator, operator.mask) == ("attention_12", True, "none")
    assert (chain.name, chain.operator) == ("softmax_15", False)
    assert {(a.precision, a.head_dim, a.value_dim) for a in (operator, chain)} == {("fp16", 64, 64)}


def test_heads_in_one_axis_are_counted_by_the_operators_own_numbers(tmp_path):
    writer = GraphWriter("fp16")
    writer.op("Attention", "q", "k", "k", out="y", q_num_heads=8, kv_num_heads=2)
    inputs = [value("q", HALF, ["batch", "seq", 512]), value("k", HALF, ["batch", "seq", 128])]
    made = model(writer, inputs, [value("y", HALF, ["batch", "seq", 512])], 23)
    (found,) = find_attentions(read_graph(save(made, tmp_path / "flat.onnx")))
    assert (found.head_dim, found.value_dim) == (64, 64)


def test_a_softmax_that_is_no_attention_is_left_alone(tmp_path):
    writer = GraphWriter("fp16")
    gate = writer.op("Softmax", writer.op("MatMul", "x", writer.weight(8, 8)))
    writer.op("MatMul", gate, writer.weight(8, 8), out="y")
    made = model(writer, [value("x", HALF, ["n", 8])], [value("y", HALF, ["n", 8])], 20)
    assert find_attentions(read_graph(save(made, tmp_path / "gate.onnx"))) == ()


def test_an_input_that_no_output_depends_on_is_refused_by_name(tmp_path):
    def dead_end(made):
        made.graph.input.extend(value(name, HALF, ["batch"]) for name in ("unread", "dead"))
        made.graph.node.append(helper.make_node("Exp", ["dead"], ["nowhere"], name="dead_end"))

    graph = read_graph(changed(tmp_path, dead_end))
    assert [(f.node, f.rule) for f in lint(graph)] == [("unread", "unused-input"), ("dead", "unused-input")]


@pytest.mark.parametrize("form", ["unread", "lengths"])
def test_an_input_that_tensorrt_drops_is_refused_even_if_the_lint_missed_it(form, tmp_path, monkeypatch):
    made = REFUSED["lengths-dropped"]
    if form == "unread":
        made = mha_model(Mha())
        made.graph.input.append(value("nl", INT64, ["batch"]))
    path = save(made, tmp_path / "dropped.onnx")
    monkeypatch.setattr(builds, "lint", lambda _: ())
    said = r"does not use input 'nl': .*ignored without a word"
    with pytest.raises(GraphError, match=said) as error:
        build_plan(path, options(path, PROFILE))
    assert error.value.exit_code == 2
