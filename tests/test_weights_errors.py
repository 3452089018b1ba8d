"""What is said about a checkpoint whose tensors are not those of the block."""

from dataclasses import replace

import pytest
import torch
from attention_modules import BERT_NAMES, SPEC, Separate, own_tensors, said, saved, torch_mha
from safetensors.torch import save_file
from torch import nn

from mha_deploy.spec import AttentionSpec
from mha_deploy.weights import read_weights


def bert_state(spec=SPEC):
    return Separate(spec, *BERT_NAMES).state_dict()


def bert_model(folder, layers=12):
    state = {
        f"encoder.layer.{layer}.attention.{name}": tensor.clone()
        for layer in range(layers)
        for name, tensor in bert_state().items()
    }
    return saved(
        folder / "bert.safetensors", state | {"embeddings.word_embeddings.weight": torch.ones(9, 24)}
    )


@pytest.mark.parametrize(
    "prefix",
    [
        "encoder.layer.7.attention.self.",
        "encoder.layer.7.",
        "encoder.layer.7",
        "layer.7.attention",
        "bert.encoder.layer.7.attention.",
    ],
)
def test_a_prefix_near_a_layer_is_answered_with_that_layers_prefix(tmp_path, prefix):
    message = said(SPEC, bert_model(tmp_path), prefix)
    assert "did you mean --prefix 'encoder.layer.7.attention.'" in message
    assert f"prefix {prefix!r}" in message


def test_a_whole_model_without_a_prefix_is_answered_with_its_first_layers(tmp_path):
    message = said(SPEC, bert_model(tmp_path))
    assert "no known attention layout; it holds embeddings.word_embeddings.weight" in message
    assert "and 85 more" in message
    assert message.endswith(
        "did you mean --prefix 'encoder.layer.0.attention.' or --prefix 'encoder.layer.1.attention.' "
        "or --prefix 'encoder.layer.2.attention.' (or 9 more)?"
    )


def test_a_prefix_that_no_tensor_has_is_answered_with_what_the_file_holds(tmp_path):
    file = saved(tmp_path / "m", {"conv.weight": torch.ones(2, 2)})
    message = said(SPEC, file, "attn.")
    assert message.endswith("prefix 'attn.': no tensor has this prefix; the file holds conv.weight")


def test_names_of_no_layout_are_listed_in_full(tmp_path):
    file = saved(tmp_path / "m", {"x.conv.weight": torch.ones(2, 2), "x.bn.weight": torch.ones(2)})
    assert said(SPEC, file, "x").endswith("no known attention layout; it holds x.bn.weight, x.conv.weight")


def test_wrong_missing_and_left_over_tensors_come_in_one_message_with_both_shapes(tmp_path):
    state = bert_state() | {
        "self.query.weight": torch.ones(30, 24),
        "self.distance_embedding.weight": torch.ones(7, 6),
    }
    del state["output.dense.weight"]
    lines = said(SPEC, saved(tmp_path / "m", state, "a."), "a.").splitlines()
    assert "read as BERT (self.query, output.dense), does not fit the spec" in lines[0]
    assert [line.strip() for line in lines[1:]] == [
        "self.query.weight is [30, 24]; the spec needs [24, 24]",
        "output.dense.weight is missing; the spec needs [24, 24]",
        "self.distance_embedding.weight [7, 6] is left over: the block has no place for it",
    ]


def test_a_wrong_shape_under_a_whole_layer_suggests_no_other_layer(tmp_path):
    message = said(AttentionSpec(d_model=48, num_heads=4), bert_model(tmp_path), "encoder.layer.7.attention.")
    assert "self.query.weight is [24, 24]; the spec needs [48, 48]" in message
    assert "did you mean" not in message


def test_one_matrix_of_four_makes_no_layout(tmp_path):
    file = saved(tmp_path / "m", {"proj.weight": torch.ones(24, 24), "proj.bias": torch.ones(24)})
    assert "no known attention layout; it holds proj.bias, proj.weight" in said(SPEC, file)


def test_a_packed_matrix_of_the_wrong_shape_says_what_it_stacks(tmp_path):
    spec = AttentionSpec(d_model=24, num_heads=4, num_kv_heads=2)
    message = said(spec, saved(tmp_path / "m", torch_mha(SPEC).state_dict()))
    assert (
        "in_proj_weight is [72, 24]; the spec needs [48, 24] (query.weight, key.weight, value.weight stacked)"
    ) in message


def test_a_packed_matrix_cannot_serve_a_spec_of_other_key_and_value_widths(tmp_path):
    spec = AttentionSpec(d_model=24, num_heads=4, kind="cross", kdim=20, vdim=16)
    message = said(spec, saved(tmp_path / "m", torch_mha(SPEC).state_dict()))
    assert (
        "stacks matrices of one input width, but the spec has d_model = 24, kdim = 20, vdim = 16" in message
    )


def test_a_transposed_matrix_is_named_as_the_file_has_it(tmp_path):
    state = {"c_attn.weight": torch.ones(20, 72), "c_proj.weight": torch.ones(24, 24)}
    message = said(replace(SPEC, bias=()), saved(tmp_path / "m", state))
    assert "read as GPT-2" in message
    assert "c_attn.weight is [20, 72]; the spec needs [24, 72]" in message


def test_many_left_over_tensors_are_counted_and_not_all_listed(tmp_path):
    more = {f"mlp.{i}.weight": torch.ones(2, 2) for i in range(40)}
    message = said(SPEC, saved(tmp_path / "m", own_tensors(SPEC) | more))
    assert message.endswith("and 28 more")
    assert len(message.splitlines()) == 14


@pytest.mark.parametrize(
    ("in_file", "in_spec", "line"),
    [
        ((), ("query", "key", "value", "output"), "bias = false"),
        (("query", "key", "value", "output"), (), "bias = true"),
        (
            ("query", "value", "output"),
            ("query", "key", "value", "output"),
            'bias = ["query", "value", "output"]',
        ),
        (("output",), ("query",), 'bias = ["output"]'),
    ],
)
def test_another_set_of_biases_is_answered_with_the_line_for_the_spec(tmp_path, in_file, in_spec, line):
    file = saved(tmp_path / "m", bert_state(replace(SPEC, bias=in_file)))
    message = said(replace(SPEC, bias=in_spec), file)
    assert message.endswith(f"set {line} in [attention]")
    assert len(message.splitlines()) == 2
    read_weights(replace(SPEC, bias=in_file).with_weights(file))


def test_a_packed_bias_counts_for_query_key_and_value(tmp_path):
    file = saved(tmp_path / "m", torch_mha(SPEC).state_dict())
    message = said(replace(SPEC, bias=("output",)), file)
    assert "the file has a bias for query, key, value and the spec none: set bias = true" in message


def test_berts_layernorm_is_read_for_post_norm_left_out_by_name_for_none_and_left_over_for_pre(tmp_path):
    norm = {"output.LayerNorm.weight": torch.ones(24), "output.LayerNorm.bias": torch.ones(24)}
    file = saved(tmp_path / "m", bert_state() | norm)
    hint = (
        "output.LayerNorm.weight [24] is left over: the block has no place for it; "
        'a LayerNorm here needs norm = "post" in [attention], which has norm = '
    )
    assert read_weights(SPEC.with_weights(file)).layout == (
        "BERT (self.query, output.dense); output.LayerNorm.weight and output.LayerNorm.bias left out, "
        'since norm = "none"'
    )
    assert hint in said(replace(SPEC, norm="pre"), file)
    assert torch.equal(
        read_weights(replace(SPEC, norm="post").with_weights(file)).tensors["norm.bias"], torch.ones(24)
    )


def test_a_norm_that_the_file_lacks_is_missing(tmp_path):
    message = said(replace(SPEC, norm="post"), saved(tmp_path / "m", bert_state()))
    assert (
        'output.LayerNorm.bias is missing; the spec needs [24] for norm = "post": store it under this name, '
        'or set norm = "none" in [attention]'
    ) in message


def test_query_weights_of_one_head_are_recognised_as_the_articles_slip(tmp_path):
    spec = AttentionSpec(d_model=24, num_heads=4, head_dim=6, value_dim=5)
    one_head = replace(spec, num_heads=1, num_kv_heads=1)
    file = saved(tmp_path / "m", Separate(one_head, "fc_q", "fc_k", "fc_v", "fc_o").state_dict())
    message = said(spec, file)
    assert "fc_q.weight is [6, 24]; the spec needs [24, 24]: this is one head of 6" in message
    assert "Linear(d_model, d_k) without the factor h" in message
    read_weights(one_head.with_weights(file))


def test_a_gpt2_bias_that_is_no_causal_mask_is_left_over(tmp_path):
    state = {"c_attn.weight": torch.ones(24, 72), "c_proj.weight": torch.ones(24, 24), "bias": torch.ones(24)}
    assert "bias [24] is left over" in said(replace(SPEC, bias=()), saved(tmp_path / "m", state))


def test_llama_names_are_refused_for_their_rotary_embedding(tmp_path):
    spec = replace(SPEC, bias=())
    file = saved(tmp_path / "m", Separate(spec, "q_proj", "k_proj", "v_proj", "o_proj").state_dict())
    assert "rotary position embedding; that is not supported yet" in said(spec, file)


def test_learned_extra_key_and_value_are_refused(tmp_path):
    state = nn.MultiheadAttention(24, 4, add_bias_kv=True).state_dict()
    message = said(SPEC, saved(tmp_path / "m", state))
    assert "bias_k is a learned key and value appended to every sequence (add_bias_kv=True)" in message


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_every_tensor_that_is_not_finite_is_named(tmp_path, bad):
    state = bert_state()
    state["self.key.weight"][3, 4] = bad
    state["output.dense.bias"][:2] = bad
    message = said(SPEC, saved(tmp_path / "m", state, "l."), "l")
    assert "l.self.key.weight (1 values), l.output.dense.bias (2 values)" in message


def test_float64_beyond_float32_is_not_finite(tmp_path):
    state = own_tensors(SPEC)
    state["value.weight"] = torch.full((24, 24), 1e300, dtype=torch.float64)
    assert "beyond float32's range: value.weight (576 values)" in said(SPEC, saved(tmp_path / "m", state))


@pytest.mark.parametrize("save", [save_file, torch.save])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.bool, torch.int64])
def test_integer_tensors_are_refused_by_their_dtype(tmp_path, save, dtype):
    save(own_tensors(SPEC) | {"key.weight": torch.ones(24, 24, dtype=dtype)}, tmp_path / "m")
    name = str(dtype).removeprefix("torch.")
    assert f"key.weight is {name}; expected float32, float16" in said(SPEC, tmp_path / "m")


def test_float8_is_refused_as_quantised(tmp_path):
    state = own_tensors(SPEC) | {"key.weight": torch.ones(24, 24).to(torch.float8_e4m3fn)}
    assert "key.weight is F8_E4M3; expected float32" in said(SPEC, saved(tmp_path / "m", state))
