"""The tables of what fuses, what needs decomposing and what is refused, as real builds.

The cells were found with TensorRT for RTX 1.7.1: self attention, 4 heads of 64, batch 1-8, sequence
1-512, for sm89 unless said.
"""

import pytest
from graphs import Mha
from tensorrt_builds import build, verdict

from mha_deploy.errors import MissingError
from mha_deploy.tensorrt.messages import CompilerCrash, NoAttentionKernel, TargetError
from mha_deploy.tensorrt.plan import read_header

MASKS = ("none", "bool", "additive", "causal")
FP32_NEVER = "precision: fp32 attention has no fused kernel, fp16 and bf16 have"


def letter(form, **fields):
    """F built and fused, U built unfused, D built only once TensorRT may decompose, X not built."""
    try:
        built = build(form, **fields)
    except (CompilerCrash, TargetError):
        return "X"
    return "F" if verdict(built).fused else "D" if built.decomposed else "U"


@pytest.mark.parametrize("mask", MASKS)
def test_fp32_at_opset_20_builds_unfused(mask):
    built = build(Mha(opset=20, dtype="fp32", mask=mask))
    assert (built.decomposed, verdict(built).fused) == (False, False)
    assert verdict(built).reason.startswith(FP32_NEVER)


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
    with pytest.raises(MissingError, match=r"needs an NVIDIA GPU with its driver.*--target-sm") as error:
        build(Mha(), targets=("current",))
    assert error.value.exit_code == 3


def test_more_targets_cost_a_plan_next_to_nothing():
    one, four = (build(Mha(), targets=t) for t in (("sm89",), ("sm80", "sm86", "sm89", "sm120")))
    assert 0 <= len(four.plan) - len(one.plan) < 1024
    assert read_header(four.plan).targets == four.targets == ("sm80", "sm86", "sm89", "sm120")


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
