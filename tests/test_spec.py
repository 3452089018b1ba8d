"""AttentionSpec: defaults, refusals, the signature it makes, FLOPs counted by hand, JSON."""

import itertools
import json
import math
from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mha_deploy.errors import SpecError
from mha_deploy.signature import Dim
from mha_deploy.spec import PROJECTIONS, AttentionSpec, WeightsSource


def refusal(**given):
    with pytest.raises(SpecError) as caught:
        AttentionSpec(**{"d_model": 24, "num_heads": 4, **given})
    return str(caught.value)


def test_sizes_left_out_take_their_usual_values():
    spec = AttentionSpec(24, 4)
    sizes = (spec.num_kv_heads, spec.head_dim, spec.value_dim, spec.kdim, spec.vdim)
    assert sizes == (4, 6, 6, 24, 24)
    assert [str(dim) for dim in spec.dims] == ["batch 1..8..32", "seq 1..128..512"]


def test_value_dim_follows_a_head_dim_that_was_given():
    spec = AttentionSpec(10, 4, head_dim=3)
    assert (spec.head_dim, spec.value_dim) == (3, 3)


def test_the_order_in_which_biases_are_named_makes_no_other_spec():
    assert AttentionSpec(24, 4, bias=("output", "query")) == AttentionSpec(24, 4, bias=("query", "output"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"d_model": 25},
            "d_model = 25 does not divide by num_heads = 4; change one of them or set head_dim",
        ),
        ({"d_model": 0}, "d_model = 0; expected a whole number from 1 to 2147483647"),
        ({"d_model": True}, "d_model = True; expected a whole number from 1 to 2147483647"),
        ({"num_heads": -4}, "num_heads = -4; expected a whole number from 1 to 2147483647"),
        ({"num_heads": 4.0}, "num_heads = 4.0; expected a whole number from 1 to 2147483647"),
        ({"head_dim": -1}, "head_dim = -1; expected a whole number from 1 to 2147483647"),
        ({"num_kv_heads": 3}, "num_heads = 4 does not divide by num_kv_heads = 3; every key/value head"),
        ({"num_kv_heads": 8}, "num_heads = 4 does not divide by num_kv_heads = 8; every key/value head"),
        ({"kdim": 12}, "kdim = 12, vdim = 24 with kind = 'self', where key and value are the input itself"),
        ({"kind": "both"}, "kind = 'both'; expected one of 'self', 'cross'"),
        ({"mask": "causal"}, "mask = 'causal'; expected one of 'none', 'padding', 'full'"),
        ({"norm": "layer"}, "norm = 'layer'; expected one of 'none', 'pre', 'post'"),
        ({"causal": 1}, "causal = 1; expected true or false"),
        (
            {"bias": ("q",)},
            "bias names 'q'; expected true, false or a list of 'query', 'key', 'value', 'output'",
        ),
        ({"dropout": 1.0}, "dropout = 1.0; expected 0 <= dropout < 1"),
        ({"dropout": math.nan}, "dropout = nan; expected 0 <= dropout < 1"),
        ({"norm_eps": 0.0}, "norm_eps = 0.0; expected a number above 0"),
        ({"norm_eps": math.nan}, "norm_eps = nan; expected a number above 0"),
        ({"dims": (Dim("q_len", 1, 2, 3),)}, "dims 'q_len'; kind = 'self' has batch, seq"),
        ({"kind": "cross", "dims": (Dim("seq", 1, 2, 3),)}, "kind = 'cross' has batch, q_len, kv_len"),
    ],
)
def test_a_wrong_field_is_refused_with_its_value_and_what_was_expected(given, said):
    assert said in refusal(**given)


def test_an_infinite_norm_eps_is_refused():
    assert "norm_eps = inf" in refusal(norm_eps=math.inf)


@pytest.mark.parametrize("value", [True, False, "query"])
def test_a_bias_that_is_no_tuple_of_names_is_a_spec_error(value):
    assert f"bias = {value!r}" in refusal(bias=value)


@pytest.mark.parametrize("field", ["dropout", "norm_eps"])
def test_a_text_where_a_number_belongs_is_a_spec_error(field):
    assert f"{field} = '0.1'" in refusal(**{field: "0.1"})


def test_self_attention_takes_x_and_a_padding_mask():
    signature = AttentionSpec(24, 4).signature
    assert [str(t) for t in (*signature.inputs, *signature.outputs)] == [
        "x [batch, seq, 24] float32",
        "mask [batch, seq] bool (boolean, True = keep, False = ignore)",
        "y [batch, seq, 24] float32",
    ]


def test_cross_attention_takes_three_inputs_of_their_own_widths_and_a_mask_over_keys():
    spec = AttentionSpec(24, 4, kind="cross", kdim=10, vdim=12)
    assert [str(t) for t in (*spec.signature.inputs, *spec.signature.outputs)] == [
        "query [batch, q_len, 24] float32",
        "key [batch, kv_len, 10] float32",
        "value [batch, kv_len, 12] float32",
        "mask [batch, kv_len] bool (boolean, True = keep, False = ignore)",
        "y [batch, q_len, 24] float32",
    ]


@pytest.mark.parametrize(("kind", "axes"), [("self", ("seq", "seq")), ("cross", ("q_len", "kv_len"))])
def test_a_full_mask_has_a_query_and_a_key_axis(kind, axes):
    mask = AttentionSpec(24, 4, kind=kind, mask="full").signature.input("attn_mask")
    assert (mask.shape, mask.dtype) == (("batch", *axes), "bool")


def test_a_block_without_a_mask_takes_none():
    assert [t.name for t in AttentionSpec(24, 4, mask="none").signature.inputs] == ["x"]


@pytest.mark.parametrize(
    ("spec", "sizes"),
    [
        (AttentionSpec(6, 2), {"batch": 2, "seq": 3}),
        (AttentionSpec(8, 4, num_kv_heads=2, head_dim=3, value_dim=5), {"batch": 1, "seq": 4}),
        (
            AttentionSpec(4, 2, kind="cross", kdim=3, vdim=5, num_kv_heads=1, value_dim=1),
            {"batch": 2, "q_len": 3, "kv_len": 5},
        ),
    ],
)
def test_flops_are_two_for_every_multiply_add_of_the_six_products(spec, sizes):
    def product(rows, inner, columns):
        return sum(2 for _ in itertools.product(range(rows), range(inner), range(columns)))

    b, s, t = sizes["batch"], sizes[spec.query_axis], sizes[spec.key_axis]
    heads, narrow = spec.num_heads, spec.num_kv_heads
    by_hand = (
        product(s, spec.d_model, heads * spec.head_dim)
        + product(t, spec.kdim, narrow * spec.head_dim)
        + product(t, spec.vdim, narrow * spec.value_dim)
        + heads * product(s, spec.head_dim, t)
        + heads * product(s, t, spec.value_dim)
        + product(s, heads * spec.value_dim, spec.d_model)
    )
    assert spec.flops(sizes) == b * by_hand


def test_other_weights_leave_the_block_as_it_is():
    spec = AttentionSpec(24, 4, causal=True).with_weights("a.bin", "layer.0.")
    assert spec == AttentionSpec(24, 4, causal=True, weights=WeightsSource("a.bin", "layer.0."))
    assert str(spec.weights) == "a.bin (prefix layer.0.)"
    assert str(WeightsSource(seed=3)) == "random, seed 3"


@st.composite
def specs(draw):
    narrow, groups = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    kind = draw(st.sampled_from(["self", "cross"]))
    names = ("batch", "seq") if kind == "self" else ("batch", "q_len", "kv_len")
    dims = []
    for name in draw(st.lists(st.sampled_from(names), unique=True)):
        bounds = sorted(draw(st.lists(st.integers(1, 2048), min_size=3, max_size=3)))
        dims.append(Dim(name, *bounds))
    d_model = draw(st.integers(1, 64))
    own = {} if kind == "self" else {"kdim": draw(st.integers(1, 64)), "vdim": draw(st.integers(1, 64))}
    return AttentionSpec(
        d_model=d_model,
        num_heads=narrow * groups,
        num_kv_heads=narrow,
        head_dim=draw(st.integers(1, 32)),
        value_dim=draw(st.integers(0, 32)),
        name=draw(st.text()),
        kind=kind,
        causal=draw(st.booleans()),
        bias=tuple(draw(st.lists(st.sampled_from(PROJECTIONS)))),
        mask=draw(st.sampled_from(["none", "padding", "full"])),
        norm=draw(st.sampled_from(["none", "pre", "post"])),
        norm_eps=draw(st.floats(1e-12, 1)),
        dropout=draw(st.floats(0, 0.99)),
        dims=tuple(dims),
        weights=WeightsSource(draw(st.text()), draw(st.text()), draw(st.integers(0, 2**31))),
        inputs_file=draw(st.text()),
        **own,
    )


@settings(deadline=None, max_examples=60)
@given(spec=specs())
def test_every_spec_comes_back_from_json_as_it_was(spec):
    assert AttentionSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


@pytest.mark.parametrize("field", [field.name for field in fields(AttentionSpec)])
def test_a_stored_spec_that_lacks_a_field_is_refused_rather_than_completed(field):
    data = AttentionSpec(24, 4, causal=True, mask="none").to_json()
    del data[field]
    with pytest.raises(SpecError, match=f"incomplete or malformed.*{field}"):
        AttentionSpec.from_json(data)


def test_a_stored_spec_with_an_unknown_field_is_refused():
    data = {**AttentionSpec(24, 4).to_json(), "window": 128, "rope": True}
    with pytest.raises(SpecError, match="it has unknown 'rope', 'window'"):
        AttentionSpec.from_json(data)


@pytest.mark.parametrize("damage", [{"dims": [{"name": "seq"}]}, {"dims": 5}, {"weights": {"url": "x"}}])
def test_a_stored_spec_with_malformed_parts_is_refused(damage):
    data = {**AttentionSpec(24, 4).to_json(), **damage}
    with pytest.raises(SpecError, match="incomplete or malformed"):
        AttentionSpec.from_json(data)
