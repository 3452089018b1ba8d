"""The reference module, against the formula and against torch.nn.MultiheadAttention."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from conftest import small_spec
from hypothesis import given, settings
from hypothesis import strategies as st

from mha_deploy.attention import MultiHeadAttention
from mha_deploy.errors import FeedError
from mha_deploy.signature import Dim
from mha_deploy.spec import AttentionSpec

CROSS_DIMS = (Dim("batch", 1, 2, 6), Dim("q_len", 1, 8, 64), Dim("kv_len", 1, 8, 64))


def block(dtype=torch.float64, path="fused", **changes) -> MultiHeadAttention:
    torch.manual_seed(0)
    return MultiHeadAttention(small_spec(**changes), path).to(dtype).eval()


def identity(num_heads: int, num_kv_heads: int, head_dim: int, **changes) -> MultiHeadAttention:
    """Cross attention whose value and output projections change nothing, and whose scores are all 0."""
    width = num_heads * head_dim
    spec = AttentionSpec(
        d_model=width,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        kind="cross",
        vdim=num_kv_heads * head_dim,
        bias=(),
        **{"mask": "none", **changes},
    )
    module = MultiHeadAttention(spec).eval()
    torch.nn.init.zeros_(module.query.weight)
    torch.nn.init.eye_(module.value.weight)
    torch.nn.init.eye_(module.output.weight)
    return module


@st.composite
def specs(draw):
    kind = draw(st.sampled_from(["self", "cross"]))
    kv_heads, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    cross = {"kdim": draw(st.integers(1, 20)), "vdim": draw(st.integers(1, 20))} if kind == "cross" else {}
    return AttentionSpec(
        d_model=draw(st.integers(1, 24)),
        num_heads=kv_heads * groups,
        num_kv_heads=kv_heads,
        kind=kind,
        head_dim=draw(st.integers(1, 9)),
        value_dim=draw(st.integers(1, 9)),
        causal=draw(st.booleans()),
        mask=draw(st.sampled_from(["none", "padding", "full"])),
        norm=draw(st.sampled_from(["none", "pre", "post"])),
        bias=tuple(draw(st.sets(st.sampled_from(["query", "key", "value", "output"])))),
        dims=(),
        **cross,
    )


def random_inputs(spec, sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(spec.signature.shape(t, sizes), generator=generator, dtype=torch.float64)
        if t.is_float
        else torch.rand(spec.signature.shape(t, sizes), generator=generator) > 0.4
        for t in spec.signature.inputs
    ]


SIZES = {"batch": 3, "seq": 5, "q_len": 5, "kv_len": 7}


@settings(max_examples=60, deadline=None)
@given(specs())
def test_both_paths_give_the_same_answer_for_every_block(spec):
    module = MultiHeadAttention(spec).double().eval()
    inputs = random_inputs(spec, SIZES)
    fused = module(*inputs)
    module.path = "spelled-out"
    torch.testing.assert_close(module(*inputs), fused, rtol=1e-10, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(specs())
def test_attention_weights_sum_to_one_where_a_key_is_kept_and_to_zero_where_none_is(spec):
    module = MultiHeadAttention(spec).double().eval()
    sums = module.attention_weights(*random_inputs(spec, SIZES)).sum(dim=-1)
    ones, zeros = torch.isclose(sums, torch.ones_like(sums)), sums == 0
    assert (ones | zeros).all()
    assert ones.any() or spec.mask != "none"


@settings(max_examples=30, deadline=None)
@given(specs(), st.permutations(range(3)))
def test_permuting_the_batch_permutes_the_answers(spec, order):
    module = MultiHeadAttention(spec).double().eval()
    inputs = random_inputs(spec, SIZES)
    torch.testing.assert_close(module(*(x[list(order)] for x in inputs)), module(*inputs)[list(order)])


@settings(max_examples=30, deadline=None)
@given(st.permutations(range(7)))
def test_permuting_keys_and_values_together_changes_nothing(order):
    module = block(kind="cross", dims=CROSS_DIMS)
    query, key, value, mask = random_inputs(module.spec, SIZES)
    permuted = module(query, key[:, list(order)], value[:, list(order)], mask[:, list(order)])
    torch.testing.assert_close(permuted, module(query, key, value, mask))


def test_it_equals_torch_multihead_attention_with_its_mask_turned_round():
    theirs = torch.nn.MultiheadAttention(32, 4, batch_first=True, dtype=torch.float64).eval()
    ours = block(kind="cross", dims=CROSS_DIMS)
    parts = zip(
        ("query", "key", "value"), theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3), strict=True
    )
    state = {f"{name}.{what}": t for name, w, b in parts for what, t in (("weight", w), ("bias", b))}
    state |= {f"output.{what}": getattr(theirs.out_proj, what) for what in ("weight", "bias")}
    ours.load_state_dict(state)
    query, key, value, keep = random_inputs(ours.spec, SIZES)
    keep[:, 0] = True
    expected, _ = theirs(query, key, value, key_padding_mask=~keep)
    torch.testing.assert_close(ours(query, key, value, keep), expected)


@pytest.mark.parametrize("path", ["fused", "spelled-out"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_row_with_no_allowed_key_gives_the_output_bias_alone(path, dtype):
    module = block(dtype, path)
    x = torch.randn(2, 5, 32, dtype=dtype)
    mask = torch.tensor([[False] * 5, [True] * 5])
    y = module(x, mask)
    assert torch.equal(y[0], module.output.bias.expand(5, 32))
    torch.testing.assert_close(y[1:], module(x[1:], mask[1:]))


@pytest.mark.parametrize("kind", ["self", "cross"])
@pytest.mark.parametrize("mask_kind", ["padding", "full"])
@pytest.mark.parametrize("junk", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_what_stands_in_padding_never_reaches_a_valid_row(kind, mask_kind, junk):
    module = block(torch.float32, kind=kind, mask=mask_kind, dims=CROSS_DIMS if kind == "cross" else ())
    sizes = {"batch": 2, "seq": 5, "q_len": 4, "kv_len": 5}
    inputs = [x.float() if x.is_floating_point() else x for x in random_inputs(module.spec, sizes)]
    keep = torch.tensor([[True] * 3 + [False] * 2, [True] * 5])
    inputs[-1] = keep if mask_kind == "padding" else keep[:, None, :].expand(inputs[-1].shape).clone()
    clean, dirty = [x.clone() for x in inputs], [x.clone() for x in inputs]
    for x in dirty[:-1] if kind == "self" else dirty[1:-1]:
        x[~keep] = junk
    rows = keep if kind == "self" else torch.ones(2, 4, dtype=torch.bool)
    assert torch.equal(module(*dirty)[rows], module(*clean)[rows])


def test_causal_alignment_is_top_left_where_query_and_key_lengths_differ():
    module = identity(1, 1, 1, causal=True)
    value = torch.arange(5.0).reshape(1, 5, 1)
    y = module(torch.zeros(1, 2, 1), torch.zeros(1, 5, 1), value)
    assert y.flatten().tolist() == [0.0, 0.5]  # bottom-right alignment would give 1.5, 2.0
    assert (
        module(torch.zeros(1, 1, 1), torch.zeros(1, 8, 1), torch.arange(8.0).reshape(1, 8, 1)).item() == 0.0
    )


def test_causal_output_does_not_depend_on_the_future():
    module = block(mask="none", causal=True)
    (x,) = random_inputs(module.spec, SIZES)
    changed = x.clone()
    changed[:, 3:] += 1
    torch.testing.assert_close(module(changed)[:, :3], module(x)[:, :3], rtol=0, atol=0)


@pytest.mark.parametrize("path", ["fused", "spelled-out"])
@pytest.mark.parametrize(("kv_heads", "expected"), [(2, [1.0, 1.0, 2.0, 2.0]), (1, [1.0] * 4)])
def test_grouped_heads_repeat_each_key_value_head_in_place(path, kv_heads, expected):
    module = identity(4, kv_heads, 1)
    module.path = path
    value = torch.arange(1.0, kv_heads + 1).expand(1, 3, kv_heads)
    y = module(torch.zeros(1, 1, 4), torch.zeros(1, 3, 4), value)
    assert y.flatten().tolist() == expected


def test_an_inverted_mask_would_be_seen():
    module = identity(1, 1, 1, mask="padding")
    value = torch.tensor([[[1.0], [2.0], [100.0], [100.0]]])
    zeros = torch.zeros(1, 4, 1)
    y = module(zeros[:, :1], zeros, value, torch.tensor([[True, True, False, False]]))
    assert y.item() == 1.5


def test_dropout_acts_in_training_only():
    module = MultiHeadAttention(small_spec(dropout=0.5))
    x, mask = torch.randn(2, 6, 32), torch.ones(2, 6, dtype=torch.bool)
    assert not torch.equal(module(x, mask), module(x, mask))
    module.eval()
    assert torch.equal(module(x, mask), module(x, mask))


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_the_norm_stands_where_the_spec_says_with_its_residual(norm):
    module, plain = block(norm=norm), block()
    plain.load_state_dict({k: v for k, v in module.state_dict().items() if not k.startswith("norm")})
    x, mask = random_inputs(module.spec, SIZES)
    mask[:] = True
    expected = x + plain(module.norm(x), mask) if norm == "pre" else module.norm(x + plain(x, mask))
    torch.testing.assert_close(module(x, mask), expected)


def test_scores_are_divided_by_the_square_root_of_head_dim():
    module = block(mask="none", bias=())
    (x,) = random_inputs(module.spec, SIZES)
    q, k = (p(x).unflatten(-1, (4, 8)).transpose(1, 2).numpy(force=True) for p in (module.query, module.key))
    scores = np.einsum("bhsd,bhtd->bhst", q, k) / math.sqrt(8)
    expected = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    np.testing.assert_allclose(module.attention_weights(x).numpy(force=True), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("mask", "has"),
    [
        (torch.ones(2, 5), r"shape \[2, 5\] and dtype float32"),
        (torch.ones(2, 5, dtype=torch.int64), r"shape \[2, 5\] and dtype int64"),
        (torch.ones(2, 1, 1, 5, dtype=torch.bool), r"shape \[2, 1, 1, 5\] and dtype bool"),
    ],
)
def test_a_mask_of_another_form_is_refused_with_its_shape_and_the_convention(mask, has):
    with pytest.raises(FeedError, match=has + r".*mask \[batch, seq\] bool \(boolean, True = keep"):
        block()(torch.zeros(2, 5, 32, dtype=torch.float64), mask)


def test_a_missing_input_is_refused():
    with pytest.raises(FeedError, match=r"got 1 inputs; expected x .*, mask"):
        block()(torch.zeros(2, 5, 32, dtype=torch.float64))
