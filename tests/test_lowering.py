"""Each lowering by itself: what it notes, what it leaves, and that the numbers stay."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from attention_nodes import BOOL, FLOAT, HALF, Form, by_hand, run_ort
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto

from mha_deploy.lowering import lower_for_tensorrt, lower_to_portable

EPS = {FLOAT: 2.0**-23, HALF: 2.0**-10}
# Scores and sums of up to 24 terms of size 1 to 4: some units in the last place of the largest value.
UNITS = 16

CAUSAL = {"is_causal": 1}
FULL_MASK = (2, 1, 5, 5)
ALL_OUTPUTS = ("y", "present_key", "present_value")

KEPT = {
    "a causal flag with a boolean mask": (Form(mask=FULL_MASK, attributes=CAUSAL), ["fold-causal-into-mask"]),
    "a causal flag with an additive mask": (
        Form(mask=FULL_MASK, mask_type=FLOAT, attributes=CAUSAL),
        ["fold-causal-into-mask"],
    ),
    "a causal flag with a mask of keys only": (
        Form(mask=(2, 1, 1, 5), attributes=CAUSAL),
        ["fold-causal-into-mask"],
    ),
    "a mask of keys only": (Form(mask=(2, 1, 1, 5)), ["expand-mask"]),
    "a mask of rank 1": (Form(mask=(5,)), ["expand-mask"]),
    "a mask of queries only": (Form(mask=(2, 1, 5, 1), opset=23), ["expand-mask"]),
    "a mask with too few columns": (Form(mask=(2, 1, 5, 3)), ["pad-mask"]),
    "an additive mask with too few columns": (Form(mask=(5, 3), mask_type=FLOAT), ["pad-mask"]),
    "a mask with one column in opset 24": (Form(mask=(2, 1, 5, 1)), ["pad-mask"]),
    "a float32 mask in a float16 attention": (
        Form(mask=FULL_MASK, mask_type=FLOAT, dtype=HALF),
        ["cast-mask"],
    ),
    "smaller value heads": (Form(value_size=6), ["pad-value-heads"]),
    "larger value heads": (Form(value_size=10), ["pad-query-key-heads"]),
    "larger value heads with a scale": (
        Form(value_size=10, attributes={"scale": 0.3}),
        ["pad-query-key-heads"],
    ),
    "smaller value heads of rank 3": (Form(value_size=6, rank=3, kv_heads=2), ["pad-value-heads"]),
    "a cache": (Form(past=3, outputs=ALL_OUTPUTS), ["cache-by-concat"]),
    "a cache that nobody reads": (Form(past=3), ["cache-by-concat"]),
    "a cache under a causal flag": (
        Form(past=3, outputs=ALL_OUTPUTS, attributes=CAUSAL),
        ["cache-by-concat", "fold-causal-into-mask"],
    ),
    "a cache of rank 3 with shared heads": (
        Form(past=3, rank=3, kv_heads=2, outputs=ALL_OUTPUTS, value_size=6, mask=(5, 8)),
        ["cache-by-concat", "pad-value-heads"],
    ),
    "present outputs without a cache": (Form(rank=3, outputs=ALL_OUTPUTS), ["cache-by-concat"]),
    "lengths": (Form(lengths=(2, 5)), ["fold-lengths-into-mask", "expand-mask"]),
    "lengths with a mask": (Form(lengths=(3, 5), mask=(5, 5)), ["fold-lengths-into-mask"]),
    "lengths under a causal flag": (
        Form(lengths=(3, 5), queries=2, attributes=CAUSAL),
        ["fold-causal-into-mask", "fold-lengths-into-mask"],
    ),
    "fewer keys than queries under a causal flag": (
        Form(lengths=(0, 3), attributes=CAUSAL),
        ["fold-causal-into-mask", "fold-lengths-into-mask"],
    ),
    "a window": (
        Form(opset=25, attributes={"left_window_size": 1, "right_window_size": 2}),
        ["fold-window-into-mask"],
    ),
    "a causal window over a cache": (
        Form(opset=25, past=4, outputs=ALL_OUTPUTS, attributes={"left_window_size": 2, **CAUSAL}),
        ["cache-by-concat", "fold-causal-into-mask", "fold-window-into-mask"],
    ),
    "a float32 softmax in float16": (
        Form(dtype=HALF, mask=FULL_MASK, mask_type=HALF, attributes={"softmax_precision": FLOAT}),
        ["attention-in-float32"],
    ),
    "a float32 softmax in float32": (
        Form(attributes={"softmax_precision": FLOAT}),
        ["drop-softmax-precision"],
    ),
    "an output that is not there": (Form(outputs=("y", "", "")), ["drop-unused-outputs"]),
}

DECOMPOSED = {
    "a softcap": Form(attributes={"softcap": 1.5}, mask=FULL_MASK),
    "a softcap of rank 3 with shared heads": Form(
        rank=3, kv_heads=2, value_size=6, attributes={"softcap": 1.5}
    ),
    "probabilities": Form(
        outputs=("y", "", "", "scores"), mask=FULL_MASK, attributes={"qk_matmul_output_mode": 3}
    ),
    "probabilities of a float64 softmax": Form(
        outputs=("y", "", "", "scores"),
        mask=FULL_MASK,
        attributes={"qk_matmul_output_mode": 3, "softmax_precision": TensorProto.DOUBLE},
    ),
}

UNTOUCHED = {
    "plain": Form(),
    "causal": Form(attributes=CAUSAL),
    "causal with other lengths": Form(queries=3, attributes=CAUSAL),
    "a full boolean mask": Form(mask=FULL_MASK),
    "an additive mask of rank 2": Form(mask=(5, 5), mask_type=FLOAT),
    "shared heads of rank 3": Form(rank=3, kv_heads=2),
    "a scale": Form(attributes={"scale": 0.3}),
    "no window": Form(opset=25, attributes={"left_window_size": -1}),
}


def close(form: Form, model: onnx.ModelProto, seed: int = 0) -> None:
    """The model, run in ONNX Runtime, gives what the operator is defined to give."""
    feeds = form.feeds(seed)
    expected = by_hand(form, feeds)
    expected["scores"] = expected["probabilities"]
    for name, got in run_ort(model, feeds).items():
        atol = UNITS * EPS[form.dtype] * max(1.0, float(np.abs(expected[name]).max()))
        np.testing.assert_allclose(got.astype(np.float64), expected[name], rtol=0, atol=atol, err_msg=name)
        if name == "y":
            assert not got[expected["y"] == 0].any(), "a fully masked row is exactly 0"


def checked(original: onnx.ModelProto, model: onnx.ModelProto) -> onnx.ModelProto:
    onnx.checker.check_model(model, full_check=True)
    assert list(model.graph.input) == list(original.graph.input)
    assert list(model.graph.output) == list(original.graph.output)
    names = [node.name for node in model.graph.node]
    assert len(names) == len(set(names))
    return model


def attentions(model: onnx.ModelProto) -> list[str]:
    return [node.name for node in model.graph.node if node.op_type == "Attention"]


@pytest.mark.parametrize("name", KEPT)
def test_tensorrt_gets_one_attention_node_that_means_the_same(name):
    form, rules = KEPT[name]
    original = form.model()
    lowered = lower_for_tensorrt(original)
    assert [step.rule for step in lowered.steps] == rules
    assert {step.node for step in lowered.steps} == {"attention"}
    assert attentions(checked(original, lowered.model)) == ["attention"]
    assert lower_for_tensorrt(lowered.model).steps == ()
    close(form, lowered.model)


@pytest.mark.parametrize("name", KEPT)
def test_tensorrt_gets_one_attention_node_for_dynamic_shapes_too(name):
    form, rules = KEPT[name]
    form = replace(form, dynamic=True)
    original = form.model()
    lowered = lower_for_tensorrt(original)
    assert [step.rule for step in lowered.steps] == rules
    assert attentions(checked(original, lowered.model)) == ["attention"]
    assert lower_for_tensorrt(lowered.model).steps == ()
    close(form, lowered.model)


def test_a_mask_of_keys_only_is_left_to_a_single_query():
    form = Form(queries=1, mask=(2, 1, 1, 5))
    assert lower_for_tensorrt(form.model()).steps == ()


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", DECOMPOSED)
def test_what_tensorrts_attention_cannot_say_is_spelt_out(name, dynamic):
    form = replace(DECOMPOSED[name], dynamic=dynamic)
    original = form.model()
    lowered = lower_for_tensorrt(original)
    assert [step.rule for step in lowered.steps] == ["decompose"]
    assert attentions(checked(original, lowered.model)) == []
    close(form, lowered.model)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", UNTOUCHED)
def test_what_tensorrt_takes_comes_back_equal(name, dynamic):
    original = replace(UNTOUCHED[name], dynamic=dynamic).model()
    lowered = lower_for_tensorrt(original)
    assert lowered.steps == ()
    assert lowered.model == original


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("form", [form for form, _ in KEPT.values()], ids=list(KEPT))
def test_the_portable_form_means_the_same_in_opset_20(form, dynamic):
    form = replace(form, dynamic=dynamic)
    original = form.model()
    lowered = lower_to_portable(original)
    assert [step.rule for step in lowered.steps] == ["decompose", "retarget-opset"]
    assert attentions(checked(original, lowered.model)) == []
    assert lower_to_portable(lowered.model).steps == ()
    close(form, lowered.model)


NOT_RUN_BY_ONNX_RUNTIME = {
    "a cache that nobody reads",
    "a causal flag with a mask of keys only",
    "a mask of keys only",
    "a mask of queries only",
    "a mask of rank 1",
    "a mask with one column in opset 24",
    "a mask with too few columns",
    "an additive mask with too few columns",
}


@pytest.mark.parametrize("name", sorted(set(KEPT) - NOT_RUN_BY_ONNX_RUNTIME))
def test_onnx_runtime_gives_the_same_before_and_after(name):
    form, _ = KEPT[name]
    feeds = form.feeds(3)
    before = run_ort(form.model(), feeds)
    after = run_ort(lower_for_tensorrt(form.model()).model, feeds)
    for output, array in before.items():
        np.testing.assert_allclose(after[output], array, rtol=0, atol=UNITS * EPS[form.dtype] * 4)


@st.composite
def forms(draw: st.DrawFn) -> Form:
    queries, keys, past = draw(st.integers(1, 6)), draw(st.integers(1, 7)), draw(st.sampled_from([0, 0, 3]))
    opset = draw(st.sampled_from([23, 24, 25]))
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    q_heads, batch = kv_heads * draw(st.sampled_from([1, 1, 2])), draw(st.integers(1, 3))
    lengths = ()
    if opset > 23 and not past and draw(st.booleans()):
        lengths = tuple(draw(st.lists(st.integers(0, keys), min_size=batch, max_size=batch)))
    dtype = draw(st.sampled_from([FLOAT, HALF]))
    columns = past + keys
    if opset > 23 and not lengths:
        columns -= draw(st.integers(0, 1)) if columns > 1 else 0
    full = [batch, q_heads, queries]
    full = [size if draw(st.booleans()) else 1 for size in full]
    mask = tuple([*full, columns][4 - draw(st.integers(1, 4)) :]) if draw(st.booleans()) else ()
    attributes: dict[str, float] = {"is_causal": int(draw(st.booleans()))}
    if draw(st.booleans()):
        attributes["scale"] = draw(st.sampled_from([0.1, 0.5]))
    if draw(st.integers(0, 3)) == 0:
        attributes["softcap"] = 2.0
    if opset == 25:
        attributes["left_window_size"] = draw(st.integers(-1, 2))
        attributes["right_window_size"] = draw(st.integers(-1, 2))
    return Form(
        batch=batch,
        q_heads=q_heads,
        kv_heads=kv_heads,
        queries=queries,
        keys=keys,
        size=draw(st.sampled_from([2, 4])),
        value_size=draw(st.sampled_from([2, 4, 5])),
        past=past,
        rank=draw(st.sampled_from([3, 4])),
        dtype=dtype,
        mask=mask,
        mask_type=draw(st.sampled_from([BOOL, dtype])),
        lengths=lengths,
        opset=opset,
        outputs=ALL_OUTPUTS if past else ("y",),
        dynamic=draw(st.booleans()),
        attributes=attributes,
    )


@settings(max_examples=150, deadline=None, derandomize=True)
@given(forms(), st.integers(0, 2**16))
def test_any_attention_is_the_same_in_its_portable_form(form, seed):
    close(form, checked(form.model(), lower_to_portable(form.model()).model), seed)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(forms(), st.integers(0, 2**16))
def test_any_attention_is_the_same_lowered_for_tensorrt(form, seed):
    lowered = lower_for_tensorrt(form.model())
    assert lower_for_tensorrt(lowered.model).steps == ()
    close(form, checked(form.model(), lowered.model), seed)


# Not of the TensorRT form: ONNX Runtime's own Attention takes the lowest number for an infinity.
def test_the_lowest_number_in_a_mask_is_no_infinity_in_the_portable_form():
    """A row of nothing but the lowest number attends evenly to the keys that the causal flag leaves."""
    form = Form(mask=(5, 5), mask_type=FLOAT, attributes=CAUSAL)
    feeds = form.feeds(0)
    feeds["mask"] = np.full((5, 5), np.finfo(np.float32).min)
    got = run_ort(lower_to_portable(form.model()).model, feeds)["y"]
    means = np.cumsum(feeds["v"], axis=2) / np.arange(1, 6)[:, None]
    np.testing.assert_allclose(got, means, rtol=0, atol=1e-6)


@pytest.mark.parametrize("mask_type", [BOOL, FLOAT])
def test_a_fully_masked_row_makes_no_nan_on_the_way(mask_type):
    form = Form(mask=FULL_MASK, mask_type=mask_type, attributes=CAUSAL)
    model = lower_to_portable(form.model()).model
    shown = onnx.shape_inference.infer_shapes(model)
    shown.graph.output.extend(shown.graph.value_info)
    feeds = form.feeds(0)
    feeds["mask"][0, 0, 2] = False if mask_type == BOOL else -np.inf
    found = run_ort(shown, feeds)
    assert not found["y"][0, :, 2].any()
    assert not [name for name, array in found.items() if np.isnan(array).any()]
