"""What TensorRT for RTX makes of lowered attention: built, and one fused kernel wherever it can be."""

from __future__ import annotations

from dataclasses import replace

import onnx
import pytest
from attention_nodes import BOOL, FLOAT, HALF, Form
from tensorrt_builds import build_model

from mha_deploy.lowering import lower_for_tensorrt, lower_to_portable

CAUSAL = {"is_causal": 1}
FORM = Form(q_heads=4, kv_heads=4, queries=16, keys=16, size=64, value_size=64, dtype=HALF)
WITH_CACHE = replace(FORM, past=16, outputs=("y", "present_key", "present_value"))

FORMS = {
    "plain": FORM,
    "causal and a boolean mask": replace(FORM, mask=(2, 1, 16, 16), attributes=CAUSAL),
    "causal and a mask of keys": replace(FORM, mask=(2, 1, 1, 16), attributes=CAUSAL),
    "causal and an additive mask": replace(FORM, mask=(2, 1, 16, 16), mask_type=HALF, attributes=CAUSAL),
    "a float32 mask": replace(FORM, mask=(2, 1, 16, 16), mask_type=FLOAT),
    "a mask of keys": replace(FORM, mask=(2, 1, 1, 16), mask_type=BOOL),
    "a short mask": replace(FORM, mask=(2, 1, 16, 8)),
    "shared heads of rank 3": replace(FORM, rank=3, kv_heads=2, mask=(2, 1, 1, 16), attributes=CAUSAL),
    "smaller value heads": replace(FORM, value_size=32),
    "larger value heads": replace(FORM, value_size=96),
    "smaller value heads of rank 3": replace(FORM, value_size=32, rank=3),
    "a cache": WITH_CACHE,
    "a causal cache of rank 3": replace(WITH_CACHE, rank=3, attributes=CAUSAL),
    "lengths": replace(FORM, lengths=(3, 16)),
    "lengths, causal": replace(FORM, lengths=(3, 16), attributes=CAUSAL),
    "a window": replace(FORM, opset=25, attributes={"left_window_size": 4, **CAUSAL}),
    "a float32 softmax": replace(FORM, mask=(2, 1, 16, 16), attributes={"softmax_precision": FLOAT}),
}


def profile_of(model: onnx.ModelProto, form: Form) -> tuple[str, ...]:
    """Every dynamic axis from 1 to twice its length in the form; no profile where nothing moves."""
    ranges = {
        dim.dim_param: f"{dim.dim_param}=1:{size}:{2 * size}"
        for value in model.graph.input
        for dim, size in zip(value.type.tensor_type.shape.dim, form.shapes()[value.name], strict=True)
        if dim.dim_param
    }
    return (",".join(ranges.values()),) if ranges else ()


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", FORMS)
def test_attention_lowered_for_tensorrt_is_one_fused_kernel(name, dynamic, tmp_path):
    form = replace(FORMS[name], dynamic=dynamic)
    model = lower_for_tensorrt(form.model()).model
    built = build_model(model, tmp_path, *profile_of(model, form), attention="fused")
    assert built.fused == len(built.attentions) == 1


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", FORMS)
def test_the_portable_form_builds(name, dynamic, tmp_path):
    form = replace(FORMS[name], dynamic=dynamic)
    model = lower_to_portable(form.model()).model
    built = build_model(model, tmp_path, *profile_of(model, form))
    # The smaller head size is not padded here, so that the form stays the plainest.
    assert built.fused == (1 if form.size == form.value_size else 0)
