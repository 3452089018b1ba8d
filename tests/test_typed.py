"""Typed graphs: valid, in the precision they claim, right at its edges."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from conftest import small_spec
from onnx import TensorProto, numpy_helper

from mha_deploy.attention import MultiHeadAttention
from mha_deploy.errors import InputError
from mha_deploy.precision import Precision
from mha_deploy.sessions.onnx_runtime import OnnxRuntimeSession
from mha_deploy.twin import write_twin
from mha_deploy.typed import Variant, kept_in_fp32, write_typed

HALF = Variant(Precision.FP16)


def typed(spec, variant, folder):
    torch.manual_seed(0)
    module = MultiHeadAttention(spec).eval()
    path = folder / "model.onnx"
    write_typed(module, variant, path)
    return module, path


@pytest.mark.parametrize("precision", [Precision.FP16, Precision.BF16])
@pytest.mark.parametrize("io", ["fp32", "same"])
def test_weights_and_interface_have_the_types_that_were_asked_for(precision, io, tmp_path):
    _, path = typed(small_spec(), Variant(precision, io), tmp_path)
    model = onnx.load(path)
    kind = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}[precision]
    assert {
        i.data_type for i in model.graph.initializer if len(i.dims) and i.data_type != TensorProto.INT64
    } == {kind}
    ends = {v.type.tensor_type.elem_type for v in (model.graph.input[0], model.graph.output[0])}
    assert ends == {TensorProto.FLOAT if io == "fp32" else kind}


def test_every_cast_says_what_its_output_is_and_none_is_left_over(tmp_path):
    _, path = typed(small_spec(), HALF, tmp_path)
    model = onnx.shape_inference.infer_shapes(onnx.load(path), check_type=True, strict_mode=True)
    onnx.checker.check_model(model, full_check=True)
    types = {v.name: v.type.tensor_type.elem_type for v in (*model.graph.value_info, *model.graph.output)}
    casts = [node for node in model.graph.node if node.op_type == "Cast"]
    assert all(types[cast.output[0]] == cast.attribute[0].i for cast in casts)
    # x in, y out, and query, key, value and context at the attention core.
    assert len(casts) == 6


def test_what_stays_in_fp32_is_the_attention_core_and_the_interface(tmp_path):
    _, path = typed(small_spec(), HALF, tmp_path)
    assert [name.split()[0] for name in kept_in_fp32(path)] == ["Attention", "graph", "graph"]


def test_fp16_keeps_masked_rows_finite_when_scores_are_low_and_two_masks_meet(tmp_path):
    """Causal and padding both mask; in fp16 the sum of two sentinels would be -inf and the row NaN."""
    spec = small_spec(causal=True, bias=("value", "output"))
    module, path = typed(spec, HALF, tmp_path)
    x = np.random.default_rng(0).standard_normal((2, 8, 32), dtype=np.float32) * 20
    mask = np.ones((2, 8), bool)
    mask[0, 0] = mask[1, :] = False
    with OnnxRuntimeSession(path, spec.signature, precision=Precision.FP16) as session:
        y = session.run({"x": x, "mask": mask})["y"]
    assert np.isfinite(y).all()
    bias = module.output.bias.detach().half().float().numpy()
    np.testing.assert_array_equal(y[1], np.broadcast_to(bias, (8, 32)))
    np.testing.assert_array_equal(y[0, 0], bias)


@pytest.mark.parametrize("eps", [1e-8, 1e-12])
def test_a_layer_norm_eps_below_fp16_still_keeps_a_zero_row_finite(eps, tmp_path):
    spec = small_spec(norm="post", norm_eps=eps, bias=())
    module, path = typed(spec, HALF, tmp_path)
    x, mask = np.zeros((1, 4, 32), np.float32), np.zeros((1, 4), bool)
    with OnnxRuntimeSession(path, spec.signature, precision=Precision.FP16) as session:
        y = session.run({"x": x, "mask": mask})["y"]
    np.testing.assert_array_equal(y, np.broadcast_to(module.norm.bias.detach().numpy(), y.shape))


def test_every_value_of_a_twin_is_one_that_bf16_holds(tmp_path):
    import ml_dtypes

    spec = small_spec()
    _, path = typed(spec, Variant(Precision.BF16), tmp_path)
    write_twin(path, tmp_path / "twin.onnx")
    model = onnx.load(tmp_path / "twin.onnx")
    onnx.checker.check_model(model, full_check=True)
    for initializer in model.graph.initializer:
        array = numpy_helper.to_array(initializer)
        if array.dtype == np.float32:
            np.testing.assert_array_equal(array, array.astype(ml_dtypes.bfloat16).astype(np.float32))
    x = np.random.default_rng(0).standard_normal((2, 5, 32), dtype=np.float32)
    with OnnxRuntimeSession(tmp_path / "twin.onnx", spec.signature, precision=Precision.BF16) as session:
        y = session.run({"x": x, "mask": np.ones((2, 5), bool)})["y"]
    np.testing.assert_array_equal(y, y.astype(ml_dtypes.bfloat16).astype(np.float32))


@pytest.mark.parametrize(("precision", "io"), [(Precision.FP64, "fp32"), (Precision.FP16, "both")])
def test_an_unknown_variant_is_refused(precision, io):
    with pytest.raises(InputError, match="expected fp32, fp16 or bf16 with io fp32 or same"):
        Variant(precision, io)
