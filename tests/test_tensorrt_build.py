"""Real builds: which attentions fuse, which need decomposing, which are refused.

The cells are those of the tables that were found with TensorRT for RTX 1.7.1: self attention, 4
heads of 64, batch 1-8, sequence 1-512, for sm89 unless said.
"""

import pytest
from graphs import PROFILE, Mha, mha_model, save
from tensorrt_builds import build, options, sha256, written

from mha_deploy.errors import CheckError, MissingError
from mha_deploy.tensorrt.build import build_plan
from mha_deploy.tensorrt.messages import CompilerCrash, NoAttentionKernel, TargetError
from mha_deploy.tensorrt.plan import count_fused, read_header

MASKS = ("none", "bool", "additive", "causal")
FP32_NEVER = "precision: fp32 attention has no fused kernel, fp16 and bf16 have"


def verdict(built):
    (one,) = built.attentions
    return one


def letter(form, **fields):
    """F built and fused, U built unfused, D built only once TensorRT may decompose, X not built."""
    try:
        built = build(form, **fields)
    except (CompilerCrash, TargetError):
        return "X"
    return "F" if verdict(built).fused else "D" if built.decomposed else "U"


# --- the build matrix


@pytest.mark.parametrize("mask", MASKS)
def test_fp32_at_opset_20_builds_unfused(mask):
    form = Mha(opset=20, dtype="fp32", mask=mask)
    assert letter(form) == "U"
    assert verdict(build(form)).reason.startswith(FP32_NEVER)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("opset", [20, 23])
def test_fp16_and_bf16_build_fused(opset, dtype, mask):
    assert letter(Mha(opset=opset, dtype=dtype, mask=mask), attention="fused") == "F"


@pytest.mark.parametrize("mask", MASKS)
def test_fp32_at_opset_23_builds_once_tensorrt_may_decompose_it(mask):
    form = Mha(dtype="fp32", mask=mask)
    with pytest.raises(NoAttentionKernel, match=f"--attention fused: .*{FP32_NEVER}") as error:
        build(form, attention="fused")
    assert error.value.exit_code == 1
    built = build(form, attention="auto")
    assert (built.decomposed, verdict(built).fused, verdict(built).reason) == (True, False, FP32_NEVER)
    assert built.warnings[0].startswith("no fused attention kernel, so TensorRT decomposed: attention_")


@pytest.mark.parametrize("opset", [20, 23])
@pytest.mark.parametrize("form", [{"cross": True, "mask": "bool"}, {"kv_heads": 2}], ids=["cross", "grouped"])
def test_cross_attention_and_grouped_heads_fuse_as_self_attention_does(opset, form):
    assert letter(Mha(opset=opset, **form), attention="fused") == "F"


@pytest.mark.parametrize("mask", ["none", "causal"])
def test_opset_24_builds_as_opset_23_does(mask):
    one, other = (build(Mha(opset=opset, mask=mask)) for opset in (23, 24))
    assert (len(one.plan), one.fused, other.fused) == (len(other.plan), 1, 1)


def test_decompose_builds_fp32_at_the_first_attempt_and_says_so_of_no_warning():
    built = build(Mha(dtype="fp32"), attention="decompose")
    assert (built.decomposed, built.fused, built.warnings) == (True, 0, ())


def test_an_attention_that_may_be_decomposed_still_fuses_where_it_can():
    built = build(Mha(), attention="decompose")
    assert (built.decomposed, verdict(built).fused) == (True, True)


# --- head sizes

FUSED_SIZES = (16, 24, 32, 40, 64, 72, 80, 96, 128, 160, 192, 256)
UNFUSED_SIZES = (8, 320, 512)


def sized(head_dim, **fields):
    return Mha(heads=2, head_dim=head_dim, **fields)


@pytest.mark.parametrize("head_dim", [*FUSED_SIZES, 100])
def test_a_head_size_from_16_to_256_fuses_decomposed_or_not(head_dim):
    assert [letter(sized(head_dim, opset=opset), attention="fused") for opset in (20, 23)] == ["F", "F"]


@pytest.mark.parametrize("head_dim", FUSED_SIZES)
def test_a_head_size_of_a_multiple_of_8_fuses_with_a_padding_mask(head_dim):
    assert letter(sized(head_dim, mask="bool"), attention="fused") == "F"


@pytest.mark.parametrize("head_dim", UNFUSED_SIZES)
def test_another_head_size_builds_unfused_at_opset_20(head_dim):
    built = build(sized(head_dim, opset=20))
    assert verdict(built).reason == f"head size: {head_dim}, fused kernels take 16 to 256"


@pytest.mark.parametrize("mask", ["none", "bool"])
@pytest.mark.parametrize("head_dim", UNFUSED_SIZES)
def test_another_head_size_is_refused_at_opset_23_unless_decomposed(head_dim, mask):
    form = sized(head_dim, mask=mask)
    with pytest.raises(NoAttentionKernel, match=f"head size: {head_dim}, fused kernels take 16 to 256"):
        build(form, attention="fused")
    assert letter(form, attention="auto") == "D"


@pytest.mark.parametrize("head_dim", [16, 100, 256])
def test_the_head_sizes_hold_for_bf16_and_an_additive_mask_too(head_dim):
    forms = [
        sized(head_dim, opset=20, dtype="bf16"),
        sized(head_dim, dtype="bf16"),
        sized(head_dim, mask="additive"),
    ]
    assert [letter(form) for form in forms] == ["F", "F", "F"]


def test_heads_of_100_with_a_padding_mask_crash_the_compiler_and_pass_decomposed():
    with pytest.raises(CompilerCrash, match=r"failed on this graph \(tactics_tiled_layout\.cpp") as error:
        build(sized(100, mask="bool"))
    assert error.value.exit_code == 2
    assert letter(sized(100, mask="bool", opset=20), attention="fused") == "F"


# --- target GPUs


@pytest.mark.parametrize("targets", ["sm80", "sm86", "sm89", "sm120", "sm121", "sm80,sm86,sm89,sm120", ""])
def test_from_ampere_on_fp16_and_bf16_fuse_and_fp32_builds(targets):
    chosen = tuple(filter(None, targets.split(",")))
    forms = [Mha(opset=20, dtype=dtype, mask="bool") for dtype in ("fp32", "fp16", "bf16")]
    assert [letter(form, targets=chosen) for form in forms] == ["U", "F", "F"]
    assert letter(Mha(dtype="fp32"), targets=chosen) == "D"


@pytest.mark.parametrize("targets", [("sm75",), ("sm75", "sm89")])
def test_turing_takes_fp16_only(targets):
    assert letter(Mha(opset=20, mask="bool"), targets=targets) == "F"
    assert letter(Mha(), targets=targets) == "F"
    with pytest.raises(
        TargetError, match=r"sm75 \(Turing\) cannot run fp32 .*--fp16, or leave sm75"
    ) as error:
        build(Mha(opset=20, dtype="fp32"), targets=targets)
    assert error.value.exit_code == 2
    with pytest.raises(TargetError, match="sm75 cannot run bf16, which the graph uses; build with --fp16"):
        build(Mha(dtype="bf16"), targets=targets)


FP8 = Mha(opset=21, qdq="fp8", fixed_seq=128)


@pytest.mark.parametrize("target", ["sm75", "sm80", "sm86"])
def test_fp8_is_refused_before_ada(target):
    with pytest.raises(TargetError, match=f"{target} cannot run fp8_e4m3.*fp8 needs sm89 or newer"):
        build(FP8, targets=(target,))


@pytest.mark.parametrize("target", ["sm89", "sm120", "sm121"])
def test_fp8_of_fixed_length_fuses_from_ada_on(target):
    assert letter(FP8, targets=(target,), attention="fused") == "F"


def test_fp8_of_dynamic_length_builds_unfused():
    assert letter(Mha(opset=21, qdq="fp8")) == "U"


def test_the_gpu_of_this_machine_as_target_needs_one():
    with pytest.raises(MissingError, match="needs an NVIDIA GPU with its driver.*--target-sm") as error:
        build(Mha(), targets=("current",))
    assert error.value.exit_code == 3


def test_more_targets_cost_a_plan_next_to_nothing():
    one, four = (build(Mha(), targets=t) for t in (("sm89",), ("sm80", "sm86", "sm89", "sm120")))
    assert 0 <= len(four.plan) - len(one.plan) < 1024
    assert read_header(four.plan).targets == four.targets == ("sm80", "sm86", "sm89", "sm120")


# --- fp32 accumulation


@pytest.mark.parametrize("mask", ["none", "bool"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("target", ["sm80", "sm89", "sm120"])
def test_casts_to_fp32_around_the_attention_operator_fuse(target, dtype, mask):
    form = Mha(dtype=dtype, mask=mask, cast=True)
    assert letter(form, targets=(target,), attention="fused") == "F"


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_the_same_casts_around_a_decomposed_attention_do_not_fuse(dtype):
    built = build(Mha(opset=20, dtype=dtype, cast=True))
    assert "casts to fp32 fuse only around the Attention operator" in verdict(built).reason


# --- what a built plan reports


def test_a_plan_is_the_same_bytes_every_time():
    assert len({sha256(build(form)) for form in [Mha(mask="bool")] * 3}) == 1


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


def test_the_written_form_is_the_one_that_was_asked_for():
    assert written(Mha(mask="bool")) != written(Mha(mask="none"))
