"""Attention as one chain that a runtime can fuse: the same answers, and one kernel in OpenVINO."""

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

from mha_deploy.lowering import fusible_attention
from mha_deploy.machine import cpu_features, version

TOLERANCE = 2e-6
with_openvino = pytest.mark.skipif(
    not version("openvino") or "avx512f" not in cpu_features(),
    reason="needs openvino, and a CPU for which it fuses attention",
)


def assert_same(one, other):
    assert np.isfinite(other).all()
    np.testing.assert_allclose(other, one, rtol=0, atol=TOLERANCE * np.abs(one).max())


def rules(model):
    return [step.rule for step in fusible_attention(model).steps]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A spec and the folder in which its graph and the rewritten one lie."""
    folder, spec = tmp_path_factory.mktemp("fusible"), small_spec()
    onnx.save(fusible_attention(exported(folder, spec)).model, folder / "lowered.onnx")
    return spec, folder


def both(pair, feeds):
    spec, folder = pair
    return [answers(folder / f"{each}.onnx", spec, feeds) for each in ("model", "lowered")]


@settings(max_examples=30, deadline=None)
@given(
    batch=st.integers(1, 4),
    seq=st.integers(1, 64),
    share=st.floats(0, 1),
    times=st.sampled_from([1e-3, 1.0, 30.0, 1e15]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_mask_and_shape_is_answered_as_by_the_source(pair, batch, seq, share, times, seed):
    random = np.random.default_rng(seed)
    feeds = drawn(pair[0], random, {"batch": batch, "seq": seq})
    feeds["x"] *= np.float32(times)
    feeds["mask"] = random.random((batch, seq)) < share
    assert_same(*both(pair, feeds))


def test_where_nothing_is_kept_only_the_bias_of_the_output_is_left(pair, random):
    feeds = drawn(pair[0], random, {"batch": 2, "seq": 9})
    feeds["mask"][0] = False
    one, other = both(pair, feeds)
    assert np.array_equal(other[0], one[0])
    assert np.array_equal(other[0], np.broadcast_to(other[0, 0], other[0].shape))


def test_nan_in_padding_reaches_no_answer(pair, random):
    feeds = drawn(pair[0], random, {"batch": 3, "seq": 9})
    feeds["mask"][2] = False
    clean = both(pair, feeds)[1]
    feeds["x"][~feeds["mask"]] = np.nan
    assert np.array_equal(both(pair, feeds)[1], clean)


@pytest.mark.parametrize("mask", ["none", "padding"])
def test_cross_attention_is_answered_as_by_its_source(mask, tmp_path, random):
    spec = small_spec(kind="cross", kdim=20, vdim=24, mask=mask, dims=())
    feeds = drawn(spec, random, {dim.name: 3 + place for place, dim in enumerate(spec.dims)})
    if mask == "padding":
        feeds["mask"][0] = False
    assert_same(*rewritten_answers(fusible_attention, tmp_path, spec, feeds))
    assert rules(exported(tmp_path, spec)) == ["fusible-attention"]


@pytest.mark.parametrize(
    ("name", "rewritten"),
    [
        ("as the demo's", True),
        ("fewer key/value heads", True),
        ("without bias", True),
        ("no mask", True),
        ("causal, norm before", False),
        ("full mask", False),
    ],
)
def test_attention_is_spelt_out_where_its_mask_is_one_of_keys(name, rewritten, tmp_path):
    model = exported(tmp_path, dataclasses.replace(small_spec(), **BLOCKS[name]))
    assert rules(model) == (["fusible-attention"] if rewritten else [])
    kinds = [node.op_type for node in fusible_attention(model).model.graph.node]
    assert ("Attention" in kinds) is not rewritten


@pytest.mark.parametrize("rank", [3, 4])
@pytest.mark.parametrize("form", [{}, {"kv_heads": 2}, {"attributes": {"scale": 0.3}}, {"queries": 1}])
def test_a_lone_attention_is_answered_as_by_the_source(form, rank):
    model = Form(rank=rank, dynamic=True, **form).model()
    feeds = Form(rank=rank, dynamic=True, **form).feeds(0)
    assert rules(model) == ["fusible-attention"]
    assert_same(run_ort(model, feeds)["y"], run_ort(fusible_attention(model).model, feeds)["y"])


@pytest.mark.parametrize(
    "more",
    [
        {"attributes": {"is_causal": 1}},
        {"attributes": {"softcap": 2.0}},
        {"dtype": onnx.TensorProto.FLOAT16},
        {"past": 3},
        {"lengths": (5, 2)},
        {"mask": (5, 5)},
        {"outputs": ("y", "present_key", "present_value")},
        {"outputs": ("y", "", "", "scores")},
    ],
)
def test_a_lone_attention_with_more_to_it_stays(more):
    model = Form(**more).model()
    lowered = fusible_attention(model)
    assert lowered.model is model
    assert lowered.steps == ()


def test_the_scale_that_a_node_gives_is_kept(tmp_path, random):
    spec = small_spec()
    model = exported(tmp_path, spec)
    (node,) = [node for node in model.graph.node if node.op_type == "Attention"]
    node.attribute.append(helper.make_attribute("scale", 1.25))
    onnx.save(model, tmp_path / "scaled.onnx")
    onnx.save(fusible_attention(model).model, tmp_path / "lowered.onnx")
    feeds = drawn(spec, random, {"batch": 3, "seq": 9})
    one, other, unscaled = [
        answers(tmp_path / f"{name}.onnx", spec, feeds) for name in ("scaled", "lowered", "model")
    ]
    assert_same(one, other)
    assert np.abs(one - unscaled).max() > 0.01


@with_openvino
def test_openvino_makes_one_kernel_of_it(pair):
    import openvino

    def kernels(name):
        core, hints = openvino.Core(), {"INFERENCE_PRECISION_HINT": "f32"}
        compiled = core.compile_model(str(pair[1] / name), "CPU", hints)
        operations = compiled.get_runtime_model().get_ordered_ops()
        found = [each.get_rt_info()["layerType"].astype(str) for each in operations]
        alone = ("Broadcast", "Eltwise", "MatMul", "Softmax", "Subgraph")
        return sorted(each for each in found if each in alone)

    # The Eltwise that stays takes the padding out of x.
    assert kernels("lowered.onnx") == ["Eltwise", "Subgraph"]
    assert len(kernels("model.onnx")) > 2
