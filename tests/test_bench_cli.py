"""bench on the command line: what it prints, how candidates are named, and its exit codes."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace

import pytest
from conftest import small_spec

from mha_deploy.benchmark import Candidate, candidate, contest
from mha_deploy.bundle import Bundle
from mha_deploy.errors import BenchError, BundleError, FeedError
from mha_deploy.pipeline import export
from mha_deploy.sessions import Placement
from mha_deploy.sessions.fake import FakeSession
from mha_deploy.signature import Dim

SIZES = ("--grid", "batch=1", "--grid", "seq=8", "--seconds", "0.05", "--threads", "1")


def unfolded(text):
    """A table's title is folded to the table's width, which depends on the figures in it."""
    return " ".join(text.split())


def test_bench_prints_figures_with_their_conditions_a_profile_a_picture_and_a_gate(
    cli, small_bundle, bench_report, tmp_path
):
    out, picture = tmp_path / "bench.json", tmp_path / "roofline.png"
    baseline = slowed(bench_report, tmp_path / "baseline.json", 100)
    asked = ("--profile", "--roofline", picture, "-o", out, "--baseline", baseline, "--max-regression", "7%")
    result = cli("bench", small_bundle.folder, *SIZES, *asked)
    assert result.exit_code == 0
    for word in ("p50 ms", "99% interval", "p99 ms", "of ceiling", "nearest rank", "CPUExecutionProvider"):
        assert word in unfolded(result.stdout)
    for word in (
        "at most 7% slower",
        "PASSED: 0 of 1",
        "onnxruntime",
        "GB/s",
        "operators at 1 x 8",
        "Attention",
        "between nodes",
        "warm-up",
    ):
        assert word in unfolded(result.stdout)
    report = json.loads(out.read_text())
    (cell,) = report["cells"]
    assert cell["sizes"] == {"batch": 1, "seq": 8}
    assert any(cell["p50_ms"] in taken for taken in cell["rounds_ms"])
    assert report["profiles"][0]["sizes"] == cell["sizes"]
    assert picture.stat().st_size > 10_000


def test_a_picture_that_cannot_be_written_costs_no_measurement(cli, small_bundle, tmp_path):
    out, picture = tmp_path / "bench.json", tmp_path / f"{'x' * 240}.png"
    for json_too in ((), ("--json",)):
        result = cli("bench", small_bundle.folder, *SIZES, "--roofline", picture, "-o", out, *json_too)
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
        assert "File name too long" in result.stderr
        assert json.loads(out.read_text())["cells"]
        out.unlink()
        assert json.loads(result.stdout)["cells"] if json_too else "p50 ms" in result.stdout


def test_a_profile_of_another_runtime_is_refused_before_anything_is_measured(cli, small_bundle, monkeypatch):
    elsewhere = replace(small_bundle.artifacts[0], runtime="openvino")
    manifest = replace(small_bundle.manifest, artifacts=(elsewhere,))
    monkeypatch.setattr(Bundle, "load", lambda folder: Bundle(folder, manifest))
    monkeypatch.setattr("mha_deploy.benchmark.bench", lambda *_, **__: pytest.fail("something was measured"))
    result = cli("bench", small_bundle.folder, *SIZES, "--profile")
    assert result.exit_code == 2
    assert result.stderr == (
        "error: artifact 'canonical' runs in openvino; the profile is ONNX Runtime's: name an artifact that "
        "runs there, as --artifact canonical\n"
    )


def slowed(report, path, factor):
    """The report as a baseline whose sizes took `factor` of their time."""
    data = json.loads(json.dumps(report.to_json()))
    for cell in data["cells"]:
        middle = cell["p50_ms"]
        cell["rounds_ms"] = [[factor * middle] for _ in cell["rounds_ms"]]
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize(
    ("factor", "code", "word"), [(0.001, 1, "FAILED: 2 of 2"), (1000, 0, "PASSED: 0 of 2")]
)
def test_a_regression_ends_with_1_and_an_improvement_with_0(
    cli, small_bundle, bench_report, tmp_path, monkeypatch, factor, code, word
):
    monkeypatch.setattr("mha_deploy.benchmark.baseline.bench", lambda *_, **__: bench_report)
    path = slowed(bench_report, tmp_path / "baseline.json", factor)
    result = cli("bench", small_bundle.folder, "--threads", 1, "--baseline", path)
    assert result.exit_code == code
    assert f"{word} sizes regressed" in result.stdout
    assert "at most 5% slower" in unfolded(result.stdout)


def test_a_regression_ends_with_1_also_where_the_picture_cannot_be_written(
    cli, small_bundle, bench_report, tmp_path, monkeypatch
):
    monkeypatch.setattr("mha_deploy.benchmark.baseline.bench", lambda *_, **__: bench_report)
    path, picture = slowed(bench_report, tmp_path / "baseline.json", 0.001), tmp_path / f"{'x' * 240}.png"
    gate = ("--threads", 1, "--baseline", path, "--roofline", picture)
    result = cli("bench", small_bundle.folder, *gate)
    assert result.exit_code == 1
    assert "FAILED: 2 of 2 sizes regressed" in result.stdout
    assert "error: cannot write" in result.stderr


def test_a_baseline_of_another_shape_ends_with_2_before_anything_is_measured(
    cli, small_bundle, bench_report, tmp_path
):
    path = slowed(bench_report, tmp_path / "baseline.json", 1)
    result = cli("bench", small_bundle.folder, "--grid", "seq=9", "--threads", 1, "--baseline", path)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "has no shape batch=1, seq=9; it has batch=1, seq=8; batch=2, seq=8" in result.stderr


def test_compare_answers_with_a_ratio_and_its_interval_whatever_the_answer(cli, small_bundle, tmp_path):
    out = tmp_path / "compare.json"
    named = ("--compare", "canonical", "canonical@threads=1", "--rounds", 8, "-o", out)
    result = cli("bench", small_bundle.folder, *SIZES, *named)
    assert result.exit_code == 0
    for word in ("A: canonical against B: canonical@threads=1", "B / A", "99% interval", "drawn by chance"):
        assert word in result.stdout
    report = json.loads(out.read_text())
    (found,) = report["comparisons"]
    low, high = found["interval"]
    assert low <= found["ratio"] <= high
    assert found["answer"] in ("different", "no difference", "inconclusive")
    assert [len(found[side]["rounds_ms"]) for side in "ab"] == [8, 8]
    assert report["protocol"]["reopened_each_round"]


def test_two_bundles_are_compared_without_a_third(cli, small_bundle, tmp_path):
    other = shutil.copytree(small_bundle.folder, tmp_path / "other")
    named = ("--compare", small_bundle.folder, f"{other}:canonical", "--rounds", 8, "--json")
    result = cli("bench", *SIZES, *named)
    assert result.exit_code == 0
    found = json.loads(result.stdout)["comparisons"][0]
    assert found["b"]["name"] == f"B: {other}:canonical"


def test_blocks_that_differ_are_noticed_where_they_are_compared(small_bundle, tmp_path):
    wide = export(small_spec(d_model=64, num_heads=8, name="wide"), tmp_path / "wide")
    one, same, other = (
        Candidate("", each, "canonical", Placement()) for each in (small_bundle,) * 2 + (wide,)
    )
    line = "A and B compute different blocks: d_model 32 and 64, num_heads 4 and 8"
    sizes = {"batch": [1], "seq": [1]}
    noticed = contest(one, other, grid=sizes, seconds=0.01, rounds=8).to_json()["notices"]
    assert noticed[0].startswith(line)
    alike = contest(one, same, grid=sizes, seconds=0.01, rounds=8).notices()
    assert not any("different blocks" in notice for notice in alike)


def test_candidates_are_artifacts_bundles_or_either_under_a_placement(small_bundle, tmp_path):
    folder = small_bundle.folder
    for text, artifact, placement in (
        ("canonical", "canonical", Placement()),
        ("canonical@threads=2", "canonical", Placement(threads=2)),
        ("canonical@device=cuda@cuda-graphs", "canonical", Placement("cuda", cuda_graphs=True)),
        (str(folder), "canonical", Placement()),
        (f"{folder}:canonical@threads=1", "canonical", Placement(threads=1)),
    ):
        found = candidate(text, small_bundle, Placement())
        assert (found.bundle.folder, found.artifact, found.placement) == (folder, artifact, placement)
        assert found.name == text


def test_a_folder_further_up_may_have_an_at_sign(small_bundle, tmp_path):
    folder = shutil.copytree(small_bundle.folder, tmp_path / "me@home" / "bundle")
    found = candidate(f"{folder}@threads=1", None, Placement())
    assert (found.bundle.folder, found.placement.threads) == (folder, 1)


def test_too_few_rounds_are_refused_before_anything_is_measured(small_bundle):
    one = candidate("canonical", small_bundle, Placement())
    with pytest.raises(BenchError, match="7 rounds; a 99% interval takes 8 or more: ask for more rounds"):
        contest(one, one, seconds=1e6, rounds=7)


def test_drift_at_a_later_size_of_a_comparison_is_noticed(small_bundle, monkeypatch):
    """Sessions that take 1 ms at the first size, and at the second 2 % more with every run."""
    runs = []

    def run(feeds):
        if feeds["x"].shape[1] == 16:
            runs.append(feeds)
        time.sleep(0.001 * 1.02 ** len(runs))
        return {"y": feeds["x"]}

    monkeypatch.setattr(
        Bundle, "open_padded_session", lambda *_: FakeSession(small_bundle.spec.signature, run)
    )
    one = candidate("canonical", small_bundle, Placement())
    report = contest(one, one, grid={"batch": [1], "seq": [8, 16]}, seconds=0.02, rounds=8)
    assert report.conditions.drift > 0.05
    assert any(notice.startswith("drift: the machine ended") for notice in report.notices())


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("fp16", BundleError, r"'fp16' is neither an artifact of .* \(canonical\) nor a bundle's folder"),
        (
            "canonical@threads=many",
            BenchError,
            "'canonical@threads=many' has '@threads=many'; expected ARTIFACT",
        ),
        ("canonical@threads=²", BenchError, "has '@threads=²'; expected ARTIFACT"),
        (f"canonical@threads={'9' * 5000}", BenchError, "expected ARTIFACT"),
        ("canonical@fast", BenchError, "has '@fast'; expected ARTIFACT, DIR or DIR:ARTIFACT"),
        ("", BundleError, "'' is neither an artifact"),
    ],
)
def test_a_candidate_that_is_none_is_refused_with_what_would_be(small_bundle, text, error, message):
    with pytest.raises(error, match=message):
        candidate(text, small_bundle, Placement())


def test_bundles_of_other_sizes_are_not_compared(small_bundle):
    spec = small_spec(dims=(Dim("batch", 1, 2, 6), Dim("seq", 1, 2, 4)))
    short = replace(small_bundle, manifest=replace(small_bundle.manifest, spec=spec))
    a, b = (Candidate("", each, "canonical", Placement()) for each in (small_bundle, short))
    with pytest.raises(FeedError, match=r"grid has seq = 8; this block takes seq 1\.\.4"):
        contest(a, b)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "bench was given no bundle; name one, or two with --compare"),
        (("--compare", "a", "b"), "'a' is neither given without a bundle nor a bundle's folder"),
        (("--max-regression", "5%"), "--max-regression was given without --baseline, the report to hold"),
        (("--grid", "batch"), "--grid 'batch'; expected a dim and its sizes, as batch=1,8"),
        (("--grid", "batch=1", "--grid", "batch=2"), "--grid names one dim twice"),
    ],
)
def test_what_bench_cannot_use_is_one_line(cli, arguments, message):
    result = cli("bench", *arguments)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert message in result.stderr


@pytest.mark.parametrize("seconds", ["inf", "nan"])
def test_seconds_without_an_end_are_refused(cli, small_bundle, seconds):
    for compared in ((), ("--compare", "canonical", "canonical")):
        result = cli("bench", small_bundle.folder, "--seconds", seconds, *compared)
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
        assert f"--seconds {seconds}; expected a finite number" in result.stderr


@pytest.mark.parametrize("share", ["5", "-1%", "five%", "5%5", "%", "nan%", "inf%"])
def test_a_regression_is_allowed_as_a_share(cli, small_bundle, share):
    result = cli("bench", small_bundle.folder, "--baseline", "x.json", "--max-regression", share)
    assert result.exit_code == 2
    assert "expected a share as 5%" in result.stderr


@pytest.mark.parametrize(
    "option",
    [
        ("--artifact", "x"),
        ("--baseline", "x"),
        ("--profile",),
        ("--roofline", "x"),
        ("--max-regression", "5%"),
    ],
)
def test_what_compare_does_not_take_is_refused(cli, small_bundle, option):
    result = cli("bench", small_bundle.folder, "--compare", "canonical", "canonical", *option)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert f"--compare was given with {option[0]}; it goes with --grid" in result.stderr
