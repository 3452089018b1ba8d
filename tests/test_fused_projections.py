"""One product for query, key and value: the same answers, and only where they share their input."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import pytest
from conftest import small_spec

from mha_deploy.attention import MultiHeadAttention
from mha_deploy.bundle import CANONICAL
from mha_deploy.graph import check_graph, write_graph
from mha_deploy.lowering import fuse_projections
from mha_deploy.sessions import Placement
from mha_deploy.sessions.onnx_runtime import OnnxRuntimeSession

BLOCKS = {
    "as the demo's": {},
    "fewer key/value heads": {"num_kv_heads": 2},
    "without bias": {"bias": ()},
    "bias at query and value": {"bias": ("query", "value")},
    "causal, norm before": {"causal": True, "norm": "pre"},
    "full mask": {"mask": "full"},
    "no mask": {"mask": "none"},
}


def exported(folder, spec):
    write_graph(MultiHeadAttention(spec), spec.signature, folder / "model.onnx")
    return onnx.load(str(folder / "model.onnx"))


def answers(path, spec, feeds):
    with OnnxRuntimeSession(path, spec.signature, placement=Placement(threads=1)) as session:
        return session.run(feeds)["y"]


@pytest.mark.parametrize("name", BLOCKS)
def test_the_fused_graph_answers_as_its_source(name, tmp_path, random):
    spec = dataclasses.replace(small_spec(), **BLOCKS[name])
    model = exported(tmp_path, spec)
    fused = fuse_projections(model)
    onnx.save(fused.model, tmp_path / "fused.onnx")
    check_graph(tmp_path / "fused.onnx", spec.signature)
    feeds = {
        tensor.name: random.standard_normal(spec.signature.shape(tensor, {"batch": 3, "seq": 9}), np.float32)
        if tensor.is_float
        else random.random(spec.signature.shape(tensor, {"batch": 3, "seq": 9})) < 0.8
        for tensor in spec.signature.inputs
    }
    one, other = (answers(tmp_path / f"{each}.onnx", spec, feeds) for each in ("model", "fused"))
    np.testing.assert_allclose(other, one, rtol=0, atol=2e-6 * np.abs(one).max())


def test_three_products_become_one_and_the_step_names_them(small_bundle):
    model = onnx.load(str(small_bundle.artifact(CANONICAL).path(small_bundle.folder)))
    fused = fuse_projections(model)
    count = [sum(node.op_type == "MatMul" for node in each.graph.node) for each in (model, fused.model)]
    assert count == [4, 2]
    (step,) = fused.steps
    assert step.rule == "fuse-projections"
    assert step.why.count("MatMul") == 3
    new = [node for node in fused.model.graph.node if "fused_projections" in node.name]
    assert [node.op_type for node in new] == ["MatMul", "Add", "Split"]
    assert all(prop.key == "source" for node in new for prop in node.metadata_props)
    assert all(node.metadata_props for node in new)
    names = {tensor.name for tensor in fused.model.graph.initializer}
    assert not names & {"query.bias", "key.bias", "value.bias"}


def test_the_source_is_left_as_it_was(small_bundle):
    model = onnx.load(str(small_bundle.artifact(CANONICAL).path(small_bundle.folder)))
    before = model.SerializeToString()
    fuse_projections(model)
    assert model.SerializeToString() == before


def test_cross_attention_shares_no_input_and_comes_back_as_it_is(tmp_path):
    spec = small_spec(kind="cross", dims=())
    model = exported(tmp_path, spec)
    fused = fuse_projections(model)
    assert fused.model is model
    assert fused.steps == ()


def test_a_product_that_others_read_before_its_bias_keeps_its_name(small_bundle, tmp_path):
    model = onnx.load(str(small_bundle.artifact(CANONICAL).path(small_bundle.folder)))
    product = next(node for node in model.graph.node if node.op_type == "MatMul")
    value = onnx.helper.make_tensor_value_info(
        product.output[0], onnx.TensorProto.FLOAT, ["batch", "seq", 32]
    )
    model.graph.output.append(value)
    fused = fuse_projections(model).model
    onnx.checker.check_model(fused, full_check=True)
    assert any(product.output[0] in node.output for node in fused.graph.node)
