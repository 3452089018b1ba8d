"""int8 on the demo's layer: what random inputs hide is seen, what passes is kept, what does not is named."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest

from mha_deploy.bundle import Bundle
from mha_deploy.cases import masked_real_cases, real_case, sized_case
from mha_deploy.errors import InputError
from mha_deploy.precision import Precision
from mha_deploy.quantization import Candidate, Wanted, quantize
from mha_deploy.ragged import packed, unpack
from mha_deploy.sessions import Placement
from mha_deploy.tensor_files import write_tensors
from mha_deploy.verification import INFORMS, PASSED, Judge, verify

# Threads that wait by spinning take the cores from tests beside these.
ONE_THREAD = Placement(threads=1)


@pytest.fixture(scope="module")
def too_strict(demo_bundle):
    """The search at 1 %, which nothing passes: every candidate was tried and the bundle left alone."""
    before = {path: path.read_bytes() for path in demo_bundle.folder.rglob("*") if path.is_file()}
    report = quantize(demo_bundle, Wanted(0.01, speed_seconds=0, placement=ONE_THREAD))
    after = {path: path.read_bytes() for path in demo_bundle.folder.rglob("*") if path.is_file()}
    assert after == before
    return report


@pytest.fixture(scope="module")
def kept(demo_bundle, tmp_path_factory):
    """A copy of the demo's bundle with the int8 form that 2.5 % allows, and the report."""
    folder = tmp_path_factory.mktemp("int8") / "bundle"
    shutil.copytree(demo_bundle.folder, folder)
    bundle = Bundle.load(folder)
    report = quantize(bundle, Wanted(0.025, speed_seconds=0.01, placement=ONE_THREAD))
    return bundle, report.to_json()


def tried(report, name):
    return next(each for each in report.tried if str(each.candidate) == name)


def test_plain_dynamic_int8_is_refused_for_what_random_inputs_do_not_show(too_strict):
    plain = tried(too_strict, "dynamic")
    assert plain.errors.relative > 0.025
    assert plain.errors.cosine < 0.95
    assert plain.random_errors.relative < plain.errors.relative
    assert plain.random_errors.cosine > 0.995


def test_some_candidates_pass_at_two_and_a_half_percent(too_strict):
    within = [each for each in too_strict.tried if each.errors.relative <= 0.025]
    assert {"per-token, smoothed", "per-token, smoothed, value and output in fp32"} <= {
        str(each.candidate) for each in within
    }
    assert all(each.errors.cosine > 0.97 for each in within)


def test_none_passes_at_one_percent_and_the_nearest_is_named_with_its_error(too_strict):
    assert not too_strict.passed
    assert too_strict.nearest.candidate.keep == ("value", "output")
    assert 0.01 < too_strict.nearest.errors.relative < 0.015
    assert "none of 15 candidates is within 1.00%" in too_strict.conclusion
    assert str(too_strict.nearest.candidate) in too_strict.conclusion


def test_smoothing_brings_each_scheme_nearer(too_strict):
    for scheme in ("static", "dynamic", "per-token"):
        smoothed, plain = tried(too_strict, f"{scheme}, smoothed"), tried(too_strict, scheme)
        assert smoothed.errors.relative < 0.7 * plain.errors.relative


def test_only_one_scale_for_the_whole_batch_depends_on_batch_mates(too_strict):
    for each in too_strict.tried:
        assert each.batch_dependent == (each.candidate.scheme == "dynamic")
    assert tried(too_strict, "dynamic").batch_drift > 0.1


def test_what_passes_is_kept_with_what_it_was_made_of(kept):
    bundle, report = kept
    artifact = bundle.artifact("int8")
    assert report["passed"]
    assert report["artifact"] == "int8"
    assert artifact.precision is Precision.INT8
    assert artifact.details["max_relative_error"] == 0.025
    assert artifact.details["scheme"] == "per-token"
    assert artifact.details["batch_dependent"] is False
    assert artifact.details["kept_fp32"] == []
    assert artifact.details["calibration"] == "6 requests from the bundle, judged on 6 others"
    assert artifact.files[0].bytes < 0.3 * bundle.artifact().files[0].bytes


def test_the_report_says_what_the_speed_stands_on(kept):
    _, report = kept
    assert report["speed_conditions"]["sizes"] == "batch=8, seq=128"
    assert all(each["speed_against_fp32"] > 0 for each in report["candidates"])
    assert report["inputs"] == {"from": "the bundle", "calibration_requests": 6, "held_out_requests": 6}


def test_the_search_ends_at_the_first_that_passes(kept):
    _, report = kept
    verdicts = [each["verdict"] for each in report["candidates"]]
    assert verdicts == ["too far off"] * (len(verdicts) - 1) + ["kept"]
    assert len(report["candidates"]) + len(report["not_tried"]) == 15


def test_verify_holds_the_kept_artifact_to_its_own_budget_on_real_inputs(kept):
    bundle, _ = kept
    requests = bundle.real_inputs()
    spec = bundle.spec
    real = real_case(spec, "real-inputs", requests)
    cases = [real, *masked_real_cases(spec, real)]
    report = verify(bundle, ["int8"], cases=cases)
    assert [case.outcome for case in report.cases] == [PASSED] * 4
    assert {case.max_relative_error for case in report.cases} == {0.025}


def test_verify_fails_an_artifact_that_is_over_the_budget_it_claims(kept):
    bundle, _ = kept
    artifact = bundle.artifact("int8")
    claims = replace(artifact, details={**artifact.details, "max_relative_error": 0.01})
    claiming = replace(bundle, manifest=bundle.manifest.with_artifact(claims))
    report = verify(claiming, ["int8"], cases=[real_case(bundle.spec, "real", bundle.real_inputs())])
    assert not report.passed
    assert report.cases[0].needed > 2


def test_verify_takes_random_inputs_for_information_and_says_so_where_there_are_no_others(kept):
    bundle, _ = kept
    requests = bundle.real_inputs()
    random = sized_case(bundle.spec, {"batch": 3, "seq": 17})
    report = verify(bundle, ["int8"], cases=[random, real_case(bundle.spec, "real", requests[:4])])
    assert [case.outcome for case in report.cases] == [INFORMS, PASSED]
    with pytest.raises(InputError, match="judged on real inputs, and there are none"):
        verify(bundle, ["int8"], cases=[random])


def test_the_kept_graph_follows_its_axes_at_sizes_it_never_saw(kept):
    bundle, _ = kept
    spec, requests = bundle.spec, bundle.real_inputs()
    judge = Judge(bundle.reference(), max_relative_error=0.05)
    with bundle.open_session("int8") as session:
        for chosen in (requests[:1], requests[2:5], requests[5:12]):
            case = real_case(spec, "some", chosen)
            assert judge(session, "int8", case).outcome == PASSED, case.sizes


def test_the_command_names_the_nearest_and_exits_with_1(demo_bundle, cli):
    before = sorted(demo_bundle.folder.rglob("*"))
    keep = "node_MatMul_53,node_MatMul_66"
    result = cli(
        "optimize",
        demo_bundle.folder,
        *("--precision", "int8", "--max-relative-error", "0.001", "--scheme", "static", "--keep-fp32", keep),
    )
    assert result.exit_code == 1
    text = " ".join(result.stdout.split())
    assert re.search(
        r"NOT KEPT: none of 2 candidates is within 0.10%; static, smoothed passes at 1\.\d%", text
    )
    assert "Calibrated on 6 requests of the bundle, judged on the 6 others" in text
    assert sorted(demo_bundle.folder.rglob("*")) == before


def test_inputs_given_are_calibrated_on_and_kept_where_the_bundle_has_none(small_bundle, tmp_path, cli):
    folder, spec = tmp_path / "bundle", small_bundle.spec
    shutil.copytree(small_bundle.folder, folder)
    result = cli("optimize", folder, "--precision", "int8", "--max-relative-error", "2.5%")
    assert result.exit_code == 2
    assert "no real requests; int8 needs at least two" in result.stderr
    lengths = np.array([3, 9, 5, 12])
    x = np.random.default_rng(1).standard_normal((lengths.sum(), spec.d_model)).astype(np.float32)
    write_tensors(tmp_path / "x.npz", {"x": x, "lengths": lengths})
    budget = ("--precision", "int8", "--max-relative-error", "5%")
    result = cli("optimize", folder, *budget, "--inputs", tmp_path / "x.npz", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["inputs"]["from"] == "the inputs given"
    bundle = Bundle.load(folder)
    tensors = packed(spec, bundle.real_inputs())
    assert np.array_equal(tensors["x"], x)
    assert np.array_equal(tensors["lengths"], lengths)
    assert verify(bundle, ["int8"]).passed
    (one,) = unpack(spec, {"x": x[:3], "lengths": lengths[:1]})
    with pytest.raises(InputError, match="one real request; int8 needs at least two"):
        quantize(bundle, Wanted(0.05), [one])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"max_relative_error": 0.0}, "expected a share between 0 and 1"),
        ({"max_relative_error": 2.5}, "expected a share between 0 and 1"),
        ({"max_relative_error": 0.02, "speed_seconds": -1.0}, "expected 0 \\(not measured\\) or more"),
        ({"max_relative_error": 0.02, "scheme": "weights"}, "expected one of auto, dynamic, static"),
        ({"max_relative_error": 0.02, "keep_fp32": ["nope"]}, "no node 'nope' to keep in fp32; int8 takes"),
        (
            {"max_relative_error": 0.02, "keep_fp32": [f"node_MatMul_{n}" for n in (37, 45, 53, 66)]},
            "leaves nothing for int8",
        ),
    ],
)
def test_what_cannot_be_searched_for_is_refused(demo_bundle, given, expected):
    with pytest.raises(InputError, match=expected):
        quantize(demo_bundle, Wanted(**given))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--precision", "int8"], "declare its budget: --max-relative-error 2.5%"),
        (["--precision", "int8", "--portable"], "make two forms; ask for one at a time"),
        (["--portable", "--scheme", "static"], "are for --precision int8"),
        (["--precision", "int8", "--max-relative-error", "0"], "expected a share between 0 and 1"),
        (["--precision", "int8", "--max-relative-error", "250%"], "expected a share below 1"),
        (["--precision", "int8", "--max-relative-error", "much"], "expected a share below 1"),
    ],
)
def test_a_command_that_says_too_little_or_too_much_is_refused(small_bundle, cli, arguments, expected):
    result = cli("optimize", small_bundle.folder, *arguments)
    assert result.exit_code == 2
    assert expected in result.stderr


def test_a_candidate_reads_as_what_it_does():
    assert str(Candidate("static")) == "static"
    assert str(Candidate("per-token", True, ("value",))) == "per-token, smoothed, value in fp32"
