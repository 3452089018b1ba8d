"""The ONNX standard's own node tests for Attention and RotaryEmbedding, through both lowerings."""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType
from unittest import mock

import numpy as np
import onnx
import pytest
from attention_nodes import run_ort
from onnx import TensorProto
from onnx.backend.test.case import node as node_cases
from onnx.backend.test.case.test_case import TestCase as NodeCase
from onnx.reference import ReferenceEvaluator
from tensorrt_builds import build_model

from mha_deploy.errors import GraphError
from mha_deploy.lowering import lower_for_tensorrt, lower_to_portable

BF16_EPS = 2.0**-7


def _import_two_operators(package: ModuleType) -> None:
    """Importing the cases of every operator computes them all, which takes ten times as long."""
    for name in ("attention", "rotaryembedding"):
        importlib.import_module(f"{package.__name__}.{name}")


def _collect() -> dict[str, NodeCase]:
    with warnings.catch_warnings(), mock.patch.object(node_cases, "import_recursive", _import_two_operators):
        warnings.simplefilter("ignore")
        cases = node_cases.collect_testcases(None)
    wanted = ("test_attention", "test_rotary_embedding")
    return {case.name: case for case in cases if case.name.startswith(wanted)}


CASES = _collect()
BF16 = sorted(
    name
    for name, case in CASES.items()
    if case.model.graph.input[0].type.tensor_type.elem_type == TensorProto.BFLOAT16
)
FLOATS = sorted(set(CASES) - set(BF16))


def _checked(model: onnx.ModelProto, original: onnx.ModelProto) -> onnx.ModelProto:
    onnx.checker.check_model(model, full_check=True)
    assert list(model.graph.input) == list(original.graph.input)
    assert list(model.graph.output) == list(original.graph.output)
    names = [node.name for node in model.graph.node if node.name]
    assert len(names) == len(set(names))
    return model


def _feeds(case: NodeCase) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    inputs, outputs = case.data_sets[0]
    return {value.name: array for value, array in zip(case.model.graph.input, inputs, strict=True)}, outputs


def _assert_close(got: dict[str, np.ndarray], expected: list[np.ndarray], rtol: float, atol: float) -> None:
    for (name, array), wanted in zip(got.items(), expected, strict=True):
        assert array.dtype == wanted.dtype, name
        np.testing.assert_allclose(
            array.astype(np.float64), wanted.astype(np.float64), rtol=rtol, atol=atol, err_msg=name
        )


def test_the_standard_has_202_cases_of_the_two_operators():
    assert (len(CASES), len(FLOATS), len(BF16)) == (202, 192, 10)


# The cases' own tolerance (rtol 1e-3, atol 1e-7) holds in float16 too: it is one unit in the last place.
@pytest.mark.parametrize("name", FLOATS)
def test_the_portable_form_gives_the_standards_results_in_onnx_runtime(name):
    case = CASES[name]
    model = _checked(lower_to_portable(case.model).model, case.model)
    assert [o.version for o in model.opset_import if not o.domain] == [20]
    assert not {node.op_type for node in model.graph.node} & {"Attention", "RotaryEmbedding"}
    feeds, expected = _feeds(case)
    _assert_close(run_ort(model, feeds), expected, case.rtol, case.atol)


# ONNX Runtime has no bfloat16 kernels on the CPU; onnx's own evaluator runs the lowered graph instead.
@pytest.mark.parametrize("name", [name for name in BF16 if not name.endswith("_expanded")])
def test_the_portable_form_of_a_bfloat16_case_is_within_a_rounding_or_two(name):
    case = CASES[name]
    model = _checked(lower_to_portable(case.model).model, case.model)
    feeds, expected = _feeds(case)
    names = [output.name for output in model.graph.output]
    got = dict(zip(names, ReferenceEvaluator(model).run(None, feeds), strict=True))
    _assert_close(got, expected, 2 * BF16_EPS, 2 * BF16_EPS)


@pytest.mark.parametrize("name", FLOATS)
def test_a_case_that_is_lowered_for_tensorrt_still_gives_the_standards_results(name):
    case = CASES[name]
    lowered = lower_for_tensorrt(case.model)
    if not lowered.steps:
        assert lowered.model == case.model
        return
    model = _checked(lowered.model, case.model)
    assert not lower_for_tensorrt(model).steps
    feeds, expected = _feeds(case)
    _assert_close(run_ort(model, feeds), expected, case.rtol, case.atol)


# The one case that TensorRT does not take: the standard's own expansion casts through float64.
REFUSED = {"test_attention_local_window_gqa_rank4_mask_expanded": "DOUBLE|float64|fp64"}


# bfloat16 too: TensorRT has it. A dropped input would be a RefusedError of the build.
@pytest.mark.parametrize("name", sorted(set(CASES) - set(REFUSED)))
def test_tensorrt_builds_the_lowered_case_and_drops_no_input(name, tmp_path):
    model = _checked(lower_for_tensorrt(CASES[name].model).model, CASES[name].model)
    assert build_model(model, tmp_path, attention="decompose").plan


@pytest.mark.parametrize("name", REFUSED)
def test_what_tensorrt_would_compute_in_another_type_is_refused_by_name(name, tmp_path):
    model = _checked(lower_for_tensorrt(CASES[name].model).model, CASES[name].model)
    with pytest.raises(GraphError, match=REFUSED[name]) as caught:
        build_model(model, tmp_path, attention="decompose")
    assert "(Cast)" in str(caught.value)


def test_lengths_that_are_not_lowered_are_refused_since_tensorrt_would_drop_them(tmp_path):
    case = CASES["test_attention_4d_gqa_causal_nonpad_decode"]
    with pytest.raises(GraphError, match="nonpad_kv_seqlen"):
        build_model(case.model, tmp_path, attention="decompose")
