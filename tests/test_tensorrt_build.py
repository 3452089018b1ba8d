"""What a built plan reports: verdicts, precision, memory, and the same bytes every time."""

import pytest
from graphs import PROFILE, Mha, mha_model, save
from tensorrt_builds import build, build_anew, options, sha256, verdict

from mha_deploy.errors import CheckError
from mha_deploy.tensorrt.build import build_plan
from mha_deploy.tensorrt.messages import NoAttentionKernel
from mha_deploy.tensorrt.plan import count_fused


def test_a_plan_is_the_same_bytes_every_time():
    assert len({sha256(build_anew(form)) for form in [Mha(mask="bool")] * 3}) == 1


def test_changed_weights_change_the_plan(tmp_path):
    model = mha_model(Mha())
    weight = model.graph.initializer[0]
    weight.raw_data = weight.raw_data[2:] + weight.raw_data[:2]
    path = save(model, tmp_path / "other.onnx")
    assert sha256(build_plan(path, options(path, PROFILE, targets=("sm89",)))) != sha256(build(Mha()))


def test_the_precision_reported_is_that_of_the_weights_and_fp16_halves_the_plan():
    """roboflow/rf-detr#1453: fp16 was asked for, an fp32 engine was written and reported as done."""
    full, half = (build(Mha(opset=20, dtype=d, heads=8, head_dim=128)) for d in ("fp32", "fp16"))
    assert (full.precision, half.precision) == ("fp32", "fp16")
    assert 0.45 < len(half.plan) / len(full.plan) < 0.55


def test_a_graph_of_mixed_precision_is_reported_as_mixed(tmp_path):
    model = mha_model(Mha(opset=20))
    table = mha_model(Mha(opset=20, dtype="fp32", head_dim=16)).graph.initializer[0]
    table.name = "unused_table"
    model.graph.initializer.append(table)
    path = save(model, tmp_path / "mixed.onnx")
    built = build_plan(path, options(path, PROFILE, targets=("sm89",)))
    assert built.precision == "fp16+fp32"
    assert dict(built.weight_bytes)["fp32"] == 64 * 64 * 4


def test_the_activation_memory_is_read_from_the_log():
    short, long = (build(Mha(), f"batch=1:8,seq=1:{top}") for top in (128, 512))
    assert 0 < short.activation_bytes < long.activation_bytes


def test_an_attention_counts_as_fused_when_it_is_in_every_profile():
    built = build(Mha(), "batch=1:8,seq=1:64", "batch=1:8,seq=65:512")
    assert (count_fused(built.plan), built.fused, len(built.attentions)) == (2, 1, 1)


def two_blocks(first, second):
    """Two attentions one after the other; the second's names carry a prefix."""
    one, two = mha_model(first), mha_model(second)
    for tensor in two.graph.initializer:
        tensor.name = f"b_{tensor.name}"
    for node in two.graph.node:
        node.name = f"b_{node.name}"
        inputs = ["middle" if n == "x" else f"b_{n}" for n in node.input]
        outputs = [n if n == "y" else f"b_{n}" for n in node.output]
        del node.input[:], node.output[:]
        node.input.extend(inputs)
        node.output.extend(outputs)
    one.graph.node[-1].output[0] = "middle"
    one.graph.node.extend(two.graph.node)
    one.graph.initializer.extend(two.graph.initializer)
    return one


def test_each_attention_of_a_graph_has_its_own_verdict(tmp_path):
    path = save(two_blocks(Mha(heads=4, head_dim=64), Mha(heads=32, head_dim=8)), tmp_path / "two.onnx")
    built = build_plan(path, options(path, PROFILE, targets=("sm89",)))
    first, second = built.attentions
    assert (first.name, first.fused, first.reason) == ("attention_12", True, "")
    assert (second.name, second.fused) == ("b_attention_12", False)
    assert second.reason.startswith("head size: 8")
    assert built.warnings[0].endswith("b_attention_12 (head size: 8, fused kernels take 16 to 256)")


def test_fused_fails_when_one_of_several_attentions_is_not(tmp_path):
    forms = (Mha(opset=20, heads=4, head_dim=64), Mha(opset=20, heads=32, head_dim=8))
    path = save(two_blocks(*forms), tmp_path / "two.onnx")
    with pytest.raises(CheckError, match=r"not fused: b_softmax_15 \(head size: 8") as error:
        build_plan(path, options(path, PROFILE, attention="fused"))
    assert error.value.exit_code == 1


def test_attentions_without_names_are_judged_by_the_names_that_tensorrt_gives(tmp_path):
    model = mha_model(Mha())
    for node in model.graph.node:
        node.name = ""
    path = save(model, tmp_path / "unnamed.onnx")
    built = build_plan(path, options(path, PROFILE, attention="fused"))
    assert verdict(built).name == "node_of_attention_12_out"


def test_fused_fails_when_there_is_no_attention_at_all(tmp_path):
    model = mha_model(Mha(opset=20))
    del model.graph.node[3:]  # the first projection only
    model.graph.node[2].output[0] = "y"
    path = save(model, tmp_path / "linear.onnx")
    model.graph.output[0].type.tensor_type.shape.dim.add().dim_value = 64
    model.graph.output[0].type.tensor_type.shape.dim[2].dim_value = 4
    save(model, path)
    with pytest.raises(NoAttentionKernel, match=r"no attention was found in linear\.onnx"):
        build_plan(path, options(path, PROFILE, attention="fused"))
    assert build_plan(path, options(path, PROFILE)).attentions == ()


def test_a_plan_for_tf32_differs_from_the_default_without_it():
    form = Mha(opset=20, dtype="fp32")
    assert sha256(build(form, tf32=True)) != sha256(build(form))
