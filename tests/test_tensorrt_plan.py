"""What the bytes of a plan tell without a GPU, and that nothing is guessed."""

import pytest
from graphs import Mha
from tensorrt_builds import build

from mha_deploy.tensorrt.attentions import Attention
from mha_deploy.tensorrt.backend import load_backend
from mha_deploy.tensorrt.plan import HEADER_SIZE, count_fused, fused_layers, has_known_text, read_header
from mha_deploy.tensorrt.verdict import judge


@pytest.fixture(scope="module")
def plan() -> bytes:
    return build(Mha(opset=20)).plan


def test_the_header_holds_version_size_and_targets(plan):
    header = read_header(plan)
    assert (header.known, header.truncated, header.size) == (True, False, len(plan))
    assert (header.version, header.targets) == (load_backend("tensorrt-rtx").version, ("sm89",))
    assert str(header) == f"TensorRT for RTX {header.version}, {len(plan)} bytes, sm89"


@pytest.mark.parametrize("target", ["sm75", "sm80", "sm86", "sm120", "sm121"])
def test_every_target_has_its_bit(target):
    assert read_header(build(Mha(opset=20), targets=(target,)).plan).targets == (target,)


def test_a_plan_without_named_targets_is_for_all_from_sm80_on():
    header = read_header(build(Mha(opset=20), targets=()).plan)
    assert header.targets == ("sm80", "sm86", "sm89", "sm120", "sm121", "later")


def test_a_cut_plan_is_seen_as_truncated(plan):
    header = read_header(plan[:-1])
    assert (header.known, header.truncated, header.size) == (True, True, len(plan))


@pytest.mark.parametrize("place", [0, 8, 28])
def test_a_header_of_another_layout_is_unknown(plan, place):
    other = bytearray(plan)
    other[place] ^= 0xFF
    assert str(read_header(bytes(other))) == "unknown plan layout"


@pytest.mark.parametrize("data", [b"", b"vtrt", b"\0" * 4096])
def test_what_is_no_plan_is_unknown(data):
    assert read_header(data).known is False


def test_the_header_alone_is_enough(plan):
    assert read_header(plan[:HEADER_SIZE]).size == len(plan)


def test_a_fused_kernel_names_the_nodes_that_it_computes(plan):
    assert fused_layers(plan) == (frozenset({"matmul_14", "softmax_15", "matmul_16"}),)


def test_kernels_are_counted_once_per_profile():
    plan = build(Mha(), "batch=1,seq=1:64", "batch=2:8,seq=1:64", "batch=2:8,seq=65:512").plan
    assert (count_fused(plan), len(fused_layers(plan))) == (3, 3)


def test_a_plan_without_attention_kernels_counts_none():
    plan = build(Mha(opset=20, dtype="fp32")).plan
    assert (has_known_text(plan), count_fused(plan), fused_layers(plan)) == (True, 0, ())


OPERATOR = Attention("op", True, "fp16", 64, 64, "none")
CHAIN = Attention("chain", False, "fp16", 64, 64, "unknown")


def test_an_unknown_plan_proves_fusion_only_for_operators_that_may_not_be_decomposed():
    operator, chain = judge([OPERATOR, CHAIN], b"another layout", profiles=1, decomposable=False)
    assert (operator.fused, operator.kernel, chain.fused) == (True, "unknown", False)
    assert chain.reason == "unknown: this plan does not list its kernels"


def test_an_unknown_plan_proves_nothing_once_everything_may_be_decomposed():
    (verdict,) = judge([OPERATOR], b"another layout", profiles=1, decomposable=True)
    assert (verdict.fused, verdict.reason) == (False, "unknown: this plan does not list its kernels")


def test_an_attention_fused_in_part_of_the_profiles_is_not_fused(plan):
    softmax = Attention("softmax_15", False, "fp16", 64, 64, "unknown")
    (verdict,) = judge([softmax], plan, profiles=2, decomposable=False)
    assert (verdict.fused, verdict.reason.endswith("(fused in 1 of 2 places)")) == (False, True)
