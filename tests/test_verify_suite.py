"""The stress suite, and what picks from it: seed, names, inputs, the first failure."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from conftest import small_spec
from hypothesis import given
from hypothesis import strategies as st

from mha_deploy.attention import MultiHeadAttention
from mha_deploy.bundle import Bundle
from mha_deploy.cases import padded_case, real_cases, standard_cases
from mha_deploy.cases.magnitudes import near_overflow
from mha_deploy.cases.suite import repeated, small_case
from mha_deploy.errors import FeedError, InputError
from mha_deploy.file_record import FileRecord
from mha_deploy.precision import Precision
from mha_deploy.ragged import unpack
from mha_deploy.sessions.fake import FakeSession
from mha_deploy.sessions.reference import ReferenceSession
from mha_deploy.tensor_files import write_tensors
from mha_deploy.verification import FAILED, PASSED, Judge, VerifyReport, verify

SPEC = small_spec()


@pytest.fixture(scope="module")
def module():
    import torch

    torch.manual_seed(0)
    return MultiHeadAttention(SPEC).eval()


@pytest.fixture(scope="module")
def judge(module):
    return Judge(module)


def case(name, spec=SPEC, seed=0):
    (found,) = standard_cases(spec, seed=seed, names=[name])
    return found


def same(one, other):
    return all(np.array_equal(one.feeds[name], other.feeds[name], equal_nan=True) for name in one.feeds)


def wrong(module, change):
    inner = ReferenceSession(module, Precision.FP32)
    return FakeSession(SPEC.signature, lambda feeds: {"y": change(inner.run(feeds)["y"]).astype(np.float32)})


@given(seed=st.integers(0, 2**32 - 1))
def test_every_quarter_of_every_axis_has_a_length_by_chance(seed):
    sizes = [case(f"between-{number}", seed=seed).sizes for number in (1, 2, 3, 4)]
    assert sorted((each["seq"] - 1) // 16 for each in sizes) == [0, 1, 2, 3]


def test_an_engine_that_is_wrong_over_a_range_of_lengths_only_fails(module, judge):
    session = wrong(module, lambda y: y + 0.01 * (34 <= y.shape[1] <= 63))
    cases = [each for each in standard_cases(SPEC) if not each.name.startswith("between")]
    assert all(judge(session, "wrong", each).passed for each in cases)
    between = [judge(session, "wrong", case(f"between-{number}")) for number in (1, 2, 3, 4)]
    assert FAILED in {each.outcome for each in between}


def test_an_engine_that_forgets_the_mask_of_later_rows_fails(module, judge):
    """The rows beyond the fourth, and beyond the first two at the greatest length."""
    inner = ReferenceSession(module, Precision.FP32)

    def run(feeds):
        mask = feeds["mask"].copy()
        mask[4:] = True
        return {"y": inner.run({**feeds, "mask": mask})["y"].astype(np.float32)}

    forgetful = FakeSession(SPEC.signature, run)
    assert judge(forgetful, "wrong", case("ragged-padding")).passed
    assert judge(forgetful, "wrong", case("ragged-batch")).outcome == FAILED


def test_holes_are_masked_at_the_greatest_length_too(module, judge):
    inner = ReferenceSession(module, Precision.FP32)

    def run(feeds):
        position = np.arange(feeds["mask"].shape[1])
        last = np.where(feeds["mask"], position, -1).max(axis=1)
        first = np.where(feeds["mask"], position, len(position)).min(axis=1)
        filled = (position >= first[:, None]) & (position <= last[:, None])
        return {"y": inner.run({**feeds, "mask": filled})["y"].astype(np.float32)}

    assert judge(FakeSession(SPEC.signature, run), "wrong", case("ragged-long")).outcome == FAILED


def test_a_case_is_the_same_for_one_seed_whichever_others_are_made_and_another_for_another_seed():
    everything = {each.name: each for each in standard_cases(SPEC, seed=3)}
    for name, found in everything.items():
        assert same(found, case(name, seed=3))
        assert not same(found, case(name, seed=4))


def test_padding_lies_on_the_side_that_the_case_is_named_after():
    right, left, holes = (case(f"padding-{side}").feeds["mask"] for side in ("right", "left", "holes"))
    assert (np.diff(right.astype(int), axis=1) <= 0).all()
    assert (np.diff(left.astype(int), axis=1) >= 0).all()
    assert not right.all()
    assert not left.all()
    assert (np.diff(holes.astype(int), axis=1) != 0).all()


def test_the_largest_batch_repeats_few_samples_without_a_period_and_the_reference_runs_each_once():
    spec = small_spec()
    found = repeated(spec, "max", {"batch": 6, "seq": 64}, 0)
    assert len(found.feeds["x"]) == 6
    assert len(found.reference_feeds["x"]) == 2
    assert np.array_equal(found.feeds["x"], found.spread(found.reference_feeds["x"]))
    order = list(found.copies)
    assert all(order != order[shift:] + order[:shift] for shift in range(1, 6))


@pytest.mark.parametrize("row", range(6))
def test_a_fault_in_any_row_of_the_largest_batch_is_seen(module, judge, row):
    def spoil(y):
        y[row] *= 1.001
        return y

    result = judge(wrong(module, spoil), "wrong", case("max"))
    assert result.outcome == FAILED
    assert result.worst[0] == row


def test_numbers_near_overflow_are_as_large_as_the_precision_lets_pytorch_answer(judge):
    largest = {}
    for precision in (Precision.FP32, Precision.FP16):
        found = near_overflow(
            small_case(SPEC, "near-overflow", 0),
            precision,
            lambda feeds, at=precision: judge.references.in_range(at, feeds),
        )
        assert judge.references.in_range(precision, found.feeds)
        beyond = {n: a * np.float32(64) if a.dtype != bool else a for n, a in found.feeds.items()}
        assert not judge.references.in_range(precision, beyond)
        largest[precision] = np.abs(found.feeds["x"]).max()
    assert largest[Precision.FP16] < 6e4
    assert largest[Precision.FP32] > 1e15


def test_one_feature_that_is_a_little_off_everywhere_fails_though_no_element_stands_out(module, judge):
    found = case("seq-max")
    truth = judge.references.truth(found).y
    allowed = judge(ReferenceSession(module, Precision.FP32), "torch", found).allowed

    def off(y):
        y[..., 5] = truth[..., 5] + 0.9 * allowed
        return y

    result = judge(wrong(module, off), "off", found)
    assert result.max_abs_error <= result.allowed
    assert result.outcome == FAILED
    assert (result.by_feature.feature, result.note) == (5, "feature 5 is off over many rows")
    assert result.by_feature.error == pytest.approx(0.9 * allowed, rel=0.1)
    assert result.by_feature.error > result.by_feature.allowed


@pytest.mark.parametrize("projection", ["query", "key", "value", "output"])
def test_one_weight_row_that_is_off_by_a_thousandth_fails(module, judge, projection):
    import torch

    damaged = MultiHeadAttention(SPEC).eval()
    damaged.load_state_dict(module.state_dict())
    judge(ReferenceSession(module, Precision.FP32), "torch", case("ragged-padding"))
    for row in (0, 13, 31):
        with torch.no_grad():
            weight = getattr(damaged, projection).weight
            before = weight.clone()
            weight[row] *= 1.001
            session = ReferenceSession(damaged, Precision.FP32)
            weight.copy_(before)
        assert judge(session, "damaged", case("ragged-padding")).outcome == FAILED


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.FP16, Precision.BF16])
def test_pytorch_spelled_out_passes_every_case_at_every_precision(module, judge, precision, seed):
    module.path = "spelled-out"
    session = ReferenceSession(module, precision)
    module.path = "fused"
    for found in standard_cases(SPEC, seed=seed):
        assert judge(session, "torch", found).outcome != FAILED, found.name


def test_named_cases_and_properties_alone_are_run(small_bundle):
    report = verify(small_bundle, names=["key-order", "odd"], seed=7)
    assert [each.name for each in report.cases] == ["odd"]
    assert [each.name for each in report.properties] == ["key-order"]
    assert report.passed
    assert report.to_json()["seed"] == 7


def test_an_unknown_case_is_refused_with_the_known_ones(cli, small_bundle):
    result = cli("verify", small_bundle.folder, "--case", "nothing")
    assert result.exit_code == 2
    assert "no case or property 'nothing'; this block has ragged-padding, " in result.stderr
    assert "near-overflow" in result.stderr
    assert "key-order" in result.stderr
    assert "real-inputs" not in result.stderr


def test_a_property_may_be_asked_for_alone(cli, small_bundle):
    result = cli("verify", small_bundle.folder, "--case", "batch-order", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["properties"][0]["name"] == "batch-order"


def test_fail_fast_stops_at_the_first_failure_and_says_so(small_bundle, monkeypatch, cli):
    inner = small_bundle.open_session()

    def spoilt(*_):
        return FakeSession(inner.signature, lambda feeds: {"y": inner.run(feeds)["y"] * np.float32(1.01)})

    monkeypatch.setattr(Bundle, "open_padded_session", spoilt)
    report = verify(small_bundle, fail_fast=True)
    assert [each.outcome for each in report.cases] == [FAILED]
    assert report.stopped_at == "ragged-padding of canonical"
    assert not report.passed
    result = cli("verify", small_bundle.folder, "--fail-fast")
    assert result.exit_code == 1
    assert "stopped at the first failure: ragged-padding of canonical" in result.stdout


def test_an_artifact_that_does_not_load_has_failed(small_bundle, tmp_path, cli):
    folder = shutil.copytree(small_bundle.folder, tmp_path / "bundle")
    bundle = Bundle.load(folder)
    artifact = bundle.artifact()
    file = folder / artifact.files[0].file
    file.write_bytes(file.read_bytes()[:1000])
    bundle.record(replace(artifact, files=(FileRecord.of(folder, artifact.files[0].file),)))
    result = cli("verify", folder, "--json")
    assert result.exit_code == 1
    (only,) = json.loads(result.stdout)["cases"]
    assert (only["name"], only["outcome"], only["max_abs_error"]) == ("load", FAILED, None)
    assert only["note"]


def test_packed_inputs_that_are_given_stand_in_for_the_bundles_own(small_bundle, tmp_path, random, cli):
    file = tmp_path / "inputs.npz"
    x = random.standard_normal((60, 32), dtype=np.float32)
    write_tensors(file, {"x": x, "lengths": np.array([9, 1, 20, 3, 7, 5, 11, 4])})
    result = cli("verify", small_bundle.folder, "--inputs", file, "--case", "real-inputs-2", "--json")
    assert result.exit_code == 0, result.stderr
    (only,) = json.loads(result.stdout)["cases"]
    assert only["sizes"] == {"batch": 2, "seq": 11}  # six go into the first


def test_padded_inputs_are_a_case_that_compares_what_their_mask_keeps(random):
    mask = np.arange(6)[None, :] < np.array([[6], [2]])
    found = padded_case(SPEC, {"x": random.standard_normal((2, 6, 32)), "mask": mask})
    assert found.name == "real-inputs"
    assert np.array_equal(found.compared, mask)
    assert found.feeds["x"].dtype == np.float32


def test_inputs_that_the_block_does_not_take_are_refused(cli, small_bundle, tmp_path, random):
    with pytest.raises(FeedError, match=r"a request has seq = 65; this block takes seq 1\.\.64"):
        real_cases(SPEC, unpack(SPEC, {"x": np.zeros((65, 32), np.float32), "lengths": np.array([65])}))
    with pytest.raises(FeedError, match="keeps no position"):
        padded_case(SPEC, {"x": np.zeros((1, 2, 32)), "mask": np.zeros((1, 2), bool)})
    file = tmp_path / "inputs.npz"
    write_tensors(file, {"x": random.standard_normal((2, 3, 5)), "mask": np.ones((2, 3), bool)})
    result = cli("verify", small_bundle.folder, "--inputs", file)
    assert result.exit_code == 2
    assert "'x' has shape [2, 3, 5]" in result.stderr


@pytest.mark.parametrize(("text", "share"), [("2.5%", 0.025), ("0.025", 0.025), (" 1 %", 0.01)])
def test_a_budget_reads_the_same_as_percent_and_as_a_share(text, share):
    from mha_deploy.cli.shared import SHARE

    assert SHARE.convert(text, None, None) == pytest.approx(share)


@pytest.mark.parametrize("text", ["25", "-1%", "much", "nan"])
def test_a_budget_that_is_no_share_is_refused(cli, small_bundle, text):
    result = cli("verify", small_bundle.folder, "--max-relative-error", text)
    assert result.exit_code == 2
    assert "expected a share below 1, as 2.5% or 0.025" in result.stderr


def int8_copy(bundle, folder, **details):
    """A bundle whose canonical artifact calls itself int8; it is exact to fp32."""
    shutil.copytree(bundle.folder, folder)
    copy = Bundle.load(folder)
    copy.record(replace(copy.artifact(), name="int8", precision=Precision.INT8, details=details))
    return copy


def test_an_integer_artifact_is_held_to_the_budget_that_it_was_accepted_with(small_bundle, tmp_path):
    bundle = int8_copy(small_bundle, tmp_path / "bundle", max_relative_error=0.02)
    real = {"x": np.random.default_rng(0).standard_normal((9, 32), np.float32), "lengths": np.array([4, 5])}
    (result,) = verify(bundle, ["int8"], names=["real-inputs"], inputs=real).cases
    assert (result.outcome, result.max_relative_error) == (PASSED, 0.02)
    assert result.needed == pytest.approx(result.relative_error / 0.02)
    (given,) = verify(bundle, ["int8"], names=["real-inputs"], inputs=real, max_relative_error=1e-9).cases
    assert (given.outcome, given.max_relative_error) == (FAILED, 1e-9)


def test_an_integer_artifact_without_a_budget_is_refused(small_bundle, tmp_path):
    bundle = int8_copy(small_bundle, tmp_path / "bundle")
    with pytest.raises(InputError, match=r"declare its budget: --max-relative-error 2\.5%"):
        verify(bundle, ["int8"], names=["odd"])


def test_the_case_nearest_to_its_limit_is_so_by_either_gate(module, judge):
    found = [judge(ReferenceSession(module, Precision.FP32), "torch", case(n)) for n in ("odd", "opt")]
    feature = replace(found[1].by_feature, error=0.99 * found[1].by_feature.allowed)
    (hop,) = VerifyReport("x", (found[0], replace(found[1], by_feature=feature)), {}).hops
    assert hop.nearest.name == "opt"
    assert hop.nearest.used == pytest.approx(0.99)


def test_every_hop_is_summed_up_in_one_row(small_bundle, tmp_path, cli):
    bundle = int8_copy(small_bundle, tmp_path / "bundle", max_relative_error=0.02)
    result = cli("verify", bundle.folder, "--case", "odd", "--case", "alone", "--json")
    hops = {hop["artifact"]: hop for hop in json.loads(result.stdout)["artifacts"]}
    assert set(hops) == {"canonical", "int8"}
    assert hops["int8"]["max_relative_error"] == 0.02
    assert hops["canonical"]["cases_passed"] == hops["canonical"]["properties_held"] == 1
    assert hops["canonical"]["sqnr_db"] > 100
    table = cli("verify", bundle.folder, "--case", "odd").stdout
    assert "error by hop" in table
    assert "2.0%" in table


def test_fused_and_spelled_out_attention_agree_on_padding_right_left_and_with_holes(module):
    """Fusions that assume padding on the right give answers that are far off."""
    position = np.arange(16)
    random = np.random.default_rng(0)
    x = random.standard_normal((2, 16, 32), dtype=np.float32)
    for keep in (position < 10, position >= 6, position % 2 == 0):
        answers = []
        for path in ("fused", "spelled-out"):
            module.path = path
            feeds = {"x": x, "mask": np.stack([keep, keep])}
            answers.append(ReferenceSession(module, Precision.FP32).run(feeds)["y"][:, keep])
        module.path = "fused"
        assert np.abs(answers[0] - answers[1]).max() <= 1e-4


def test_onnx_runtime_agrees_with_pytorch_on_padding_right_left_and_with_holes(small_bundle):
    report = verify(small_bundle, names=["padding-right", "padding-left", "padding-holes"])
    assert [each.outcome for each in report.cases] == [PASSED] * 3
    assert max(each.max_abs_error for each in report.cases) <= 1e-4
