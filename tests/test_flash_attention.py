"""Attention by blocks of keys: the same answers, with a key mask that the operator does not see."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import pytest
from attention_nodes import Form, run_ort
from conftest import small_spec
from exported_blocks import BLOCKS, answers, drawn, exported, rewritten_answers
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from mha_deploy.lowering import flash_attention, whole_attention
from mha_deploy.onnx_files import check_graph
from mha_deploy.signature import Dim

TOLERANCE = 2e-6


def long_spec(**changes):
    dims = () if changes.get("kind") == "cross" else (Dim("seq", 1, 128, 2048),)
    return small_spec(dims=dims, **changes)


def assert_same(one, other):
    assert np.isfinite(other).all()
    np.testing.assert_allclose(other, one, rtol=0, atol=TOLERANCE * np.abs(one).max())


def attentions(model):
    return [node for node in model.graph.node if node.op_type == "MultiHeadAttention"]


def attributes_of(node):
    return {each.name: helper.get_attribute_value(each) for each in node.attribute}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A spec and the folder in which its graph and the rewritten one lie.

    Its keys have no bias: left out, it would change large scores by their rounding, and softmax by that.
    """
    folder, spec = tmp_path_factory.mktemp("flash"), long_spec(bias=("query", "value", "output"))
    onnx.save(flash_attention(exported(folder, spec)).model, folder / "lowered.onnx")
    return spec, folder


def both(pair, feeds):
    spec, folder = pair
    return [answers(folder / f"{each}.onnx", spec, feeds) for each in ("model", "lowered")]


def ragged(spec, random, lengths, seq):
    feeds = drawn(spec, random, {"batch": len(lengths), "seq": seq})
    feeds["mask"] = np.arange(seq) < np.array(lengths)[:, None]
    return feeds


@pytest.mark.parametrize(
    ("lengths", "seq"), [([1], 1), ([9, 1], 9), ([300], 300), ([700, 513, 1], 700), ([1000, 0], 1025)]
)
def test_ragged_batches_are_answered_as_by_the_source(pair, random, lengths, seq):
    assert_same(*both(pair, ragged(pair[0], random, lengths, seq)))


@pytest.mark.parametrize("times", [1e6, 1e15, 1e17])
def test_what_is_masked_stays_so_beside_very_large_scores(pair, random, times):
    feeds = ragged(pair[0], random, [2, 7], 8)
    feeds["x"] *= np.float32(times)
    assert_same(*both(pair, feeds))


@pytest.mark.parametrize("kept", [slice(-3, None), slice(0, 3), slice(900, 903), slice(0, 0)])
def test_blocks_of_keys_that_are_masked_from_end_to_end_count_for_nothing(kept, tmp_path, random):
    # The operator takes as many keys at a time as its second-level cache has room for: 2 MB make 128.
    spec = long_spec(num_heads=1, head_dim=512, value_dim=512)
    feeds = ragged(spec, random, [0, 2000], 2000)
    feeds["mask"][0, kept] = True
    assert_same(*rewritten_answers(flash_attention, tmp_path, spec, feeds))


@settings(max_examples=30, deadline=None)
@given(
    batch=st.integers(1, 4),
    seq=st.integers(1, 400),
    share=st.floats(0, 1),
    scale=st.sampled_from([1e-3, 1.0, 30.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_mask_and_shape_is_answered_as_by_the_source(pair, batch, seq, share, scale, seed):
    random = np.random.default_rng(seed)
    feeds = drawn(pair[0], random, {"batch": batch, "seq": seq})
    feeds["x"] *= np.float32(scale)
    feeds["mask"] = random.random((batch, seq)) < share
    one, other = both(pair, feeds)
    assert np.isfinite(other).all()
    np.testing.assert_allclose(other, one, rtol=0, atol=2 * TOLERANCE * np.abs(one).max())


def test_where_nothing_is_kept_only_the_bias_of_the_output_is_left(pair, random):
    one, other = both(pair, ragged(pair[0], random, [0, 5], 600))
    assert np.array_equal(other[0], one[0])
    assert np.array_equal(other[0], np.broadcast_to(other[0, 0], other[0].shape))


def test_nan_in_padding_reaches_no_answer(pair, random):
    feeds = ragged(pair[0], random, [600, 3, 0], 600)
    clean = both(pair, feeds)[1]
    feeds["x"][~feeds["mask"]] = np.nan
    assert np.array_equal(both(pair, feeds)[1], clean)


@pytest.mark.parametrize(
    "changes", [{"norm": "pre"}, {"norm": "post"}, {"bias": ("value",)}, {"head_dim": 5, "value_dim": 12}]
)
def test_other_blocks_with_a_key_mask_are_answered_as_by_their_source(changes, tmp_path, random):
    spec = long_spec(**changes)
    feeds = ragged(spec, random, [300, 7, 0], 300)
    feeds["x"][~feeds["mask"]] = np.nan
    assert_same(*rewritten_answers(flash_attention, tmp_path, spec, feeds))
    assert flash_attention(exported(tmp_path, spec)).steps


@pytest.mark.parametrize("mask", ["none", "padding"])
def test_cross_attention_is_answered_as_by_its_source(mask, tmp_path, random):
    spec = long_spec(kind="cross", kdim=20, vdim=24, mask=mask)
    sizes = {dim.name: size for dim, size in zip(spec.dims, (3, 7, 300), strict=True)}
    feeds = drawn(spec, random, sizes)
    if mask == "padding":
        feeds["mask"][0] = False
    assert_same(*rewritten_answers(flash_attention, tmp_path, spec, feeds))
    assert flash_attention(exported(tmp_path, spec)).steps


@pytest.mark.parametrize("mask", ["none", "padding"])
def test_the_operator_is_given_no_mask(mask, tmp_path):
    lowered = flash_attention(exported(tmp_path, long_spec(mask=mask)))
    (node,) = attentions(lowered.model)
    assert (node.domain, len(node.input), len(node.output)) == ("com.microsoft", 3, 1)
    assert attributes_of(node) == {"num_heads": 4, "scale": pytest.approx(8**-0.5)}
    lighter, padded = ["no-key-bias", "later-value-bias"], ["gather-padding"] if mask == "padding" else []
    rules = ["flatten-heads", *lighter, "flash-attention", *padded]
    assert [step.rule for step in lowered.steps] == rules
    assert not any(node.op_type in ("Attention", "Transpose", "Expand") for node in lowered.model.graph.node)


def test_the_narrow_weights_of_query_and_key_are_gone(pair):
    shapes = [list(tensor.dims) for tensor in onnx.load(pair[1] / "lowered.onnx").graph.initializer]
    assert sorted(shape for shape in shapes if shape[:1] == [32]) == [[32, 32]] * 2 + [[32, 36]] * 2


@pytest.mark.parametrize("name", ["fewer key/value heads", "causal, norm before", "full mask"])
def test_what_the_operator_does_not_compute_by_blocks_stays(name, tmp_path):
    model = exported(tmp_path, dataclasses.replace(small_spec(), **BLOCKS[name]))
    lowered = flash_attention(model)
    assert lowered.model is model
    assert lowered.steps == ()


def with_scale(model, scale):
    """`model` whose Attention scales its scores by `scale`."""
    (node,) = [node for node in model.graph.node if node.op_type == "Attention"]
    node.attribute.append(helper.make_attribute("scale", scale))
    return model


@pytest.mark.parametrize("mask", ["none", "padding"])
def test_a_scale_of_its_own_is_kept(mask, tmp_path, random):
    spec = long_spec(mask=mask)
    feeds = drawn(spec, random, {"batch": 3, "seq": 300})
    scaled = with_scale(exported(tmp_path, spec), 1.25)
    lowered = flash_attention(scaled)
    for name, model in {"scaled": scaled, "lowered": lowered.model}.items():
        onnx.save(model, tmp_path / f"{name}.onnx")
    check_graph(tmp_path / "lowered.onnx", spec.signature)
    (node,) = attentions(lowered.model)
    assert attributes_of(node)["scale"] == 1.25
    one, other, unscaled = [
        answers(tmp_path / f"{name}.onnx", spec, feeds) for name in ("scaled", "lowered", "model")
    ]
    assert_same(one, other)
    assert np.abs(one - unscaled).max() > 0.01


@pytest.mark.parametrize("scale", [0.0, 1e-9, 1e9])
def test_a_scale_under_which_the_mask_would_be_lost_is_left_alone(scale, tmp_path):
    assert flash_attention(with_scale(exported(tmp_path, long_spec()), scale)).steps == ()


def test_a_lone_attention_of_flat_inputs_is_answered_as_by_the_source():
    form = Form(rank=3, queries=5, keys=300, dynamic=True)
    lowered = flash_attention(form.model())
    feeds = form.feeds(0)
    assert_same(run_ort(form.model(), feeds)["y"], run_ort(lowered.model, feeds)["y"])
    assert len(attentions(lowered.model)) == 1


@pytest.mark.parametrize("lowering", [flash_attention, whole_attention])
@pytest.mark.parametrize(
    "more",
    [
        {"attributes": {"is_causal": 1}},
        {"attributes": {"softcap": 2.0}},
        {"attributes": {"scale": 0.0}},
        {"dtype": onnx.TensorProto.FLOAT16},
        {"kv_heads": 2},
        {"past": 3},
        {"lengths": (5, 2)},
        {"mask": (5, 5)},
        {"outputs": ("y", "present_key", "present_value")},
        {"outputs": ("y", "", "", "scores")},
    ],
)
def test_a_lone_attention_with_more_to_it_stays(lowering, more):
    model = Form(rank=3, **more).model()
    assert lowering(model).model is model
