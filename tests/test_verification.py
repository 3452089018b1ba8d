"""The verdict: what passes, what fails, what is out of a precision's range. A fault must be seen."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from conftest import small_spec

from mha_deploy.attention import MultiHeadAttention
from mha_deploy.bundle import Bundle
from mha_deploy.cases import Case, standard_cases
from mha_deploy.errors import GraphError
from mha_deploy.precision import Precision
from mha_deploy.sessions.fake import FakeSession
from mha_deploy.sessions.reference import ReferenceSession
from mha_deploy.verification import FAILED, OUT_OF_RANGE, PASSED, Judge, VerifyReport, verify

SPEC = small_spec()


@pytest.fixture(scope="module")
def module():
    import torch

    torch.manual_seed(0)
    return MultiHeadAttention(SPEC).eval()


@pytest.fixture(scope="module")
def judge(module):
    return Judge(module)


def cases(name: str, spec=SPEC) -> Case:
    return next(case for case in standard_cases(spec) if case.name == name)


def altered(module, change, precision=Precision.FP32) -> FakeSession:
    """The reference at `precision` with its answer changed on the way out."""
    inner = ReferenceSession(module, precision)

    def run(feeds):
        y = inner.run(feeds)["y"].astype(np.float32)
        return {"y": change(y)}

    return FakeSession(SPEC.signature, run, precision=precision)


def test_every_standard_case_passes_for_a_sound_engine(small_bundle):
    report = verify(small_bundle)
    assert report.passed
    assert [case.outcome for case in report.cases] == [PASSED] * len(report.cases)
    assert {c.name for c in report.cases} == {
        "ragged-padding",
        "padding-right",
        "padding-left",
        "padding-holes",
        "fully-masked-row",
        "padding-garbage",
        "min",
        "two",
        "odd",
        "sharp-softmax",
        "near-ties",
        "outlier-channels",
        "small-values",
        "large-values",
        "near-overflow",
        "between-1",
        "between-2",
        "between-3",
        "between-4",
        "ragged-batch",
        "batch-max",
        "seq-max",
        "flat-softmax",
        "ragged-long",
        "opt",
        "max",
    }


@pytest.mark.parametrize("fault", ["scale", "mask", "bias", "heads", "transposed weight"])
def test_a_wrong_module_fails(module, judge, fault):
    import torch

    wrong = MultiHeadAttention(SPEC).eval()
    wrong.load_state_dict(module.state_dict())
    with torch.no_grad():
        if fault == "scale":
            wrong.query.weight *= 1.01
            wrong.query.bias *= 1.01
        elif fault == "bias":
            wrong.value.bias *= 0
        elif fault == "heads":
            wrong.spec = replace(SPEC, num_heads=8, num_kv_heads=8, head_dim=4, value_dim=4)
        elif fault == "transposed weight":
            wrong.output.weight.copy_(wrong.output.weight.T.clone())
    inner = ReferenceSession(wrong, Precision.FP32)

    def run(feeds):
        fed = {**feeds, "mask": np.ones_like(feeds["mask"])} if fault == "mask" else feeds
        return {"y": inner.run(fed)["y"].astype(np.float32)}

    result = judge(FakeSession(SPEC.signature, run), "wrong", cases("ragged-padding"))
    assert result.outcome == FAILED
    assert result.max_abs_error > result.allowed


@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf])
def test_one_nan_or_inf_in_a_compared_row_fails_and_is_placed(module, judge, junk):
    def spoil(y):
        y[1, 3, 7] = junk
        return y

    result = judge(altered(module, spoil), "spoilt", cases("opt"))
    assert (result.outcome, result.note) == (FAILED, "NaN or inf in a compared row")
    assert result.worst == (1, 3, 7)


def test_nan_in_a_padded_query_row_is_not_compared(module, judge):
    case = cases("ragged-padding")
    padded = ~case.compared

    def spoil(y):
        y[padded] = np.nan
        return y

    assert padded.any()
    assert judge(altered(module, spoil), "spoilt", case).passed


def test_a_fully_masked_sample_is_compared(module, judge):
    def spoil(y):
        y[0] += 0.01
        return y

    assert judge(altered(module, spoil), "spoilt", cases("fully-masked-row")).outcome == FAILED


def test_an_engine_that_lets_garbage_through_fails(module, judge):
    def leaky(feeds):
        feeds = {**feeds, "x": np.where(feeds["mask"][..., None], feeds["x"], np.float32(0))}
        y = ReferenceSession(module, Precision.FP32).run(feeds)["y"].astype(np.float32)
        return {"y": y * np.float32(1.001)}

    result = judge(FakeSession(SPEC.signature, leaky), "leaky", cases("padding-garbage"))
    assert result.outcome == FAILED


def test_garbage_reaches_the_engine_and_not_the_reference():
    case = cases("padding-garbage")
    assert not np.isfinite(case.feeds["x"]).all()
    assert np.isfinite(case.reference_feeds["x"]).all()


def wrong_mask(spec, change):
    """An engine that is the reference but for its mask, and the outcome of every case."""
    import torch

    torch.manual_seed(0)
    module = MultiHeadAttention(spec).eval()
    inner, name = ReferenceSession(module, Precision.FP32), spec.signature.inputs[-1].name

    def run(feeds):
        return {"y": inner.run({**feeds, name: change(feeds[name])})["y"].astype(np.float32)}

    judge, session = Judge(module), FakeSession(spec.signature, run)
    return {case.name: judge(session, "wrong", case).outcome for case in standard_cases(spec)}


MASK_FAULTS = {
    "transposed": lambda mask: mask.swapaxes(1, 2).copy(),
    "reduced over queries": lambda mask: np.broadcast_to(mask.any(axis=1, keepdims=True), mask.shape).copy(),
    "taken from the first query": lambda mask: np.broadcast_to(mask[:, :1], mask.shape).copy(),
    "empty rows opened": lambda mask: mask | ~mask.any(axis=2, keepdims=True),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("fault", MASK_FAULTS)
def test_a_full_mask_that_is_read_wrongly_fails(fault, causal):
    outcomes = wrong_mask(small_spec(mask="full", causal=causal), MASK_FAULTS[fault])
    assert FAILED in (outcomes["ragged-padding"], outcomes["ragged-long"])


def test_padding_that_is_ignored_beyond_the_first_tile_of_keys_fails():
    from mha_deploy.signature import Dim

    def ignore(mask):
        return np.concatenate([mask[:, :64], np.ones_like(mask[:, 64:])], axis=1)

    spec = small_spec(dims=(Dim("batch", 1, 2, 6), Dim("seq", 1, 8, 256)))
    outcomes = wrong_mask(spec, ignore)
    assert outcomes["ragged-long"] == FAILED


def test_an_artifact_that_cannot_run_a_case_has_failed_it_and_the_others_are_judged(
    small_bundle, monkeypatch
):
    def run(feeds):
        if feeds["x"].shape[0] == 6:
            raise GraphError("it broke")
        return inner.run(feeds)

    with small_bundle.open_session() as inner:
        fake = FakeSession(inner.signature, run)
        monkeypatch.setattr(Bundle, "open_session", lambda *_: fake)
        report = verify(small_bundle)
    outcomes = {case.name: case.outcome for case in report.cases}
    assert (outcomes["max"], outcomes["opt"]) == (FAILED, PASSED)
    assert next(case.note for case in report.cases if case.name == "max") == "it broke"
    json.dumps(report.to_json(), allow_nan=False)


def test_what_fp16_cannot_hold_is_out_of_range_and_neither_passed_nor_failed(module, judge):
    case = cases("large-values")
    huge = replace(case, feeds={**case.feeds, "x": case.feeds["x"] * 100})
    result = judge(altered(module, lambda y: y, Precision.FP16), "fp16", huge)
    assert result.outcome == OUT_OF_RANGE
    assert result.to_json()["passed"] is None
    assert result.note == "PyTorch at fp16 is not finite here"


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.FP16, Precision.BF16])
def test_torch_at_a_precision_passes_its_own_yardstick(module, judge, precision):
    result = judge(ReferenceSession(module, precision), "torch", cases("opt"))
    assert result.passed
    assert result.precision == precision


def test_fp16_accuracy_does_not_pass_as_fp32(module, judge):
    half = ReferenceSession(module, Precision.FP16)
    session = FakeSession(SPEC.signature, lambda feeds: {"y": half.run(feeds)["y"].astype(np.float32)})
    assert judge(session, "half", cases("opt")).outcome == FAILED


def test_inputs_that_hold_nan_in_a_valid_place_are_the_references_fault(module, judge):
    case = cases("opt")
    x = case.feeds["x"].copy()
    x[0, 0, 0] = np.nan
    result = judge(altered(module, lambda y: y), "nan", replace(case, feeds={**case.feeds, "x": x}))
    assert result.outcome == FAILED
    assert "the inputs hold NaN or inf" in result.note


def test_allowed_is_twice_the_yardstick_and_half_an_eps_of_the_largest_truth(module, judge):
    case = cases("opt")
    result = judge(ReferenceSession(module, Precision.FP32), "torch", case)
    largest = np.abs(ReferenceSession(module, Precision.FP64).run(case.feeds)["y"]).max()
    assert result.allowed == pytest.approx(2 * result.yardstick + 2.0**-24 * largest)
    assert result.needed == pytest.approx(result.max_abs_error / result.yardstick)


def test_a_verdict_is_the_same_when_asked_again(module):
    session = ReferenceSession(module, Precision.FP32)
    first, second = (Judge(module)(session, "torch", cases("sharp-softmax")) for _ in range(2))
    assert first == second


def test_a_report_without_a_passed_case_has_not_passed():
    assert not VerifyReport("nothing", (), {}).passed


def test_the_report_is_valid_json_even_where_numbers_are_not_finite(module, judge):
    result = judge(altered(module, lambda y: y * np.nan), "nan", cases("min"))
    text = json.dumps(VerifyReport("x", (result,), {"nan": "fake"}).to_json(), allow_nan=False)
    assert json.loads(text)["passed"] is False


def test_real_inputs_are_a_case_where_the_bundle_carries_some(demo_bundle):
    case = next(
        c for c in standard_cases(demo_bundle.spec, demo_bundle.real_inputs()) if c.name == "real-inputs"
    )
    assert case.sizes == {"batch": 12, "seq": 194}
    assert case.compared.sum() == 591


def test_cases_that_would_not_fit_in_memory_are_split_by_axis():
    from mha_deploy.signature import Dim

    spec = small_spec(dims=(Dim("batch", 1, 8, 512), Dim("seq", 1, 64, 8192)))
    from mha_deploy.cases.sizes import Sizing

    assert dict(Sizing(spec).largest()) == {
        "max-length": {"batch": 1, "seq": 8192},
        "max-batch": {"batch": 512, "seq": 16},
    }


@pytest.mark.parametrize(
    "changes", [{"mask": "none"}, {"mask": "full", "causal": True}, {"kind": "cross", "dims": ()}]
)
def test_cases_fit_the_signature_of_every_kind_of_block(changes):
    spec = small_spec(**{"dims": (), **changes})
    for case in standard_cases(spec):
        assert spec.signature.check(case.feeds) == dict(case.sizes)
        assert case.compared.any()
