"""Attention computed with the tensors that are read equals the module they were saved from."""

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from attention_modules import (
    BERT_NAMES,
    SPEC,
    Conv1D,
    Packed,
    Separate,
    attend,
    linear,
    own_tensors,
    saved,
    torch_mha,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from mha_deploy.spec import PROJECTIONS, AttentionSpec, WeightsSource
from mha_deploy.weights import expected_shapes, read_weights
from mha_deploy.weights.layouts import LAYOUTS

CROSS = AttentionSpec(d_model=24, num_heads=4, kind="cross", kdim=20, vdim=16)
PER_HEAD = AttentionSpec(d_model=24, num_heads=3, head_dim=5, value_dim=7)
GROUPED = AttentionSpec(d_model=24, num_heads=4, num_kv_heads=2)


MODULES = {
    "mha-deploy": (SPEC, lambda s: Separate(s, "query", "key", "value", "output")),
    "mha-deploy, grouped": (GROUPED, lambda s: Separate(s, "query", "key", "value", "output")),
    "torch.nn.MultiheadAttention (in_proj": (SPEC, torch_mha),
    "torch.nn.MultiheadAttention (in_proj_weight, no bias": (replace(SPEC, bias=()), torch_mha),
    "torch.nn.MultiheadAttention with kdim": (CROSS, torch_mha),
    "BERT": (SPEC, lambda s: Separate(s, *BERT_NAMES)),
    "ViT": (
        SPEC,
        lambda s: Separate(s, "attention.query", "attention.key", "attention.value", "output.dense"),
    ),
    "timm": (SPEC, lambda s: Packed(s, "qkv", "proj", linear)),
    "GPT-2": (SPEC, lambda s: Packed(s, "c_attn", "c_proj", Conv1D)),
    "nanoGPT": (SPEC, lambda s: Packed(s, "c_attn", "c_proj", linear)),
    "BART": (SPEC, lambda s: Separate(s, "q_proj", "k_proj", "v_proj", "out_proj")),
    "BART, no key bias": (
        replace(SPEC, bias=("query", "value", "output")),
        lambda s: Separate(s, "q_proj", "k_proj", "v_proj", "out_proj"),
    ),
    "DistilBERT": (SPEC, lambda s: Separate(s, "q_lin", "k_lin", "v_lin", "out_lin")),
    "W_q": (SPEC, lambda s: Separate(s, "W_q", "W_k", "W_v", "fc_out")),
    "fc_q": (PER_HEAD, lambda s: Separate(s, "fc_q", "fc_k", "fc_v", "fc_o")),
    "attention.fc_q": (
        PER_HEAD,
        lambda s: Separate(s, "attention.fc_q", "attention.fc_k", "attention.fc_v", "attention.fc_o"),
    ),
}


@pytest.mark.parametrize("title", MODULES)
def test_attention_with_the_tensors_read_equals_the_module_that_was_saved(tmp_path, title):
    torch.manual_seed(5)
    spec, build = MODULES[title]
    module = build(spec)
    file = saved(tmp_path / "model.safetensors", module.state_dict(), "encoder.layer.3.attention.")
    loaded = read_weights(spec.with_weights(file, "encoder.layer.3.attention."))
    q_len, kv_len = (7, 7) if spec.kind == "self" else (7, 9)
    query = torch.randn(2, q_len, spec.d_model, dtype=torch.float64)
    key = query if spec.kind == "self" else torch.randn(2, kv_len, spec.kdim, dtype=torch.float64)
    value = query if spec.kind == "self" else torch.randn(2, kv_len, spec.vdim, dtype=torch.float64)
    with torch.no_grad():
        expected = module.eval().double()(query, key, value)
    actual = attend(spec, loaded.tensors, query, key, value)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)
    assert loaded.layout.startswith(title.partition(",")[0])
    assert {name: tuple(tensor.shape) for name, tensor in loaded.tensors.items()} == expected_shapes(spec)


def stored_as(layout, tensors, kind):
    """What a checkpoint of this layout holds for these tensors."""
    state = {}
    for source in (*layout.sources, *layout.norm_sources(kind)):
        stacked = torch.cat([tensors[target] for target in source.targets])
        state[source.name] = stacked.T if source.transposed else stacked
    return state


@pytest.mark.parametrize(
    "layout", [x for x in LAYOUTS if "o_proj.weight" not in x.refused], ids=lambda x: x.title
)
def test_every_layout_of_the_table_is_told_from_all_others_and_read_with_its_norm(tmp_path, layout):
    spec = replace(SPEC, norm="post")
    tensors = own_tensors(spec)
    file = saved(tmp_path / "model.safetensors", stored_as(layout, tensors, "post"))
    loaded = read_weights(spec.with_weights(file))
    assert loaded.layout == layout.title
    assert list(loaded.tensors) == list(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(loaded.tensors[name], tensor)


@st.composite
def specs(draw):
    kv_heads, sharing = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    size = st.integers(1, 9)
    kind = draw(st.sampled_from(("self", "cross")))
    return AttentionSpec(
        d_model=draw(size),
        num_heads=kv_heads * sharing,
        num_kv_heads=kv_heads,
        head_dim=draw(size),
        value_dim=draw(size),
        kind=kind,
        kdim=draw(size) if kind == "cross" else 0,
        vdim=draw(size) if kind == "cross" else 0,
        bias=tuple(draw(st.sets(st.sampled_from(PROJECTIONS)))),
        norm=draw(st.sampled_from(("none", "pre", "post"))),
        weights=WeightsSource(seed=draw(st.integers(0, 2**31))),
    )


@given(spec=specs(), prefix=st.sampled_from(("", "block.", "encoder.layer.11.attention")))
@settings(deadline=None, max_examples=60)
def test_reading_what_was_written_in_our_own_layout_changes_nothing(spec, prefix):
    tensors = own_tensors(spec)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected_shapes(spec)
    with tempfile.TemporaryDirectory() as folder:
        dot = "." if prefix and not prefix.endswith(".") else ""
        file = saved(Path(folder) / "w.safetensors", tensors, prefix + dot)
        loaded = read_weights(spec.with_weights(file, prefix)).tensors
    assert list(loaded) == list(tensors)
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
