"""The search on a small bundle: gated, chosen, recorded, opened where nothing is named, and resumed."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
from conftest import small_spec

from mha_deploy import machine
from mha_deploy.benchmark import Schedule
from mha_deploy.bundle import CANONICAL, Bundle
from mha_deploy.errors import CheckError, InputError, MissingError
from mha_deploy.manifest import FILE_NAME, Choice
from mha_deploy.precision import Precision
from mha_deploy.search import SECONDS, Candidate, optimize
from mha_deploy.search.candidate import canonical, variant_of
from mha_deploy.search.candidates import all_candidates
from mha_deploy.search.record import FILE_NAME as RECORD
from mha_deploy.search.routing import routed_artifact
from mha_deploy.search.sizes import default_sizes
from mha_deploy.sessions import Placement
from mha_deploy.sessions.fake import FakeSession
from mha_deploy.sessions.onnx_runtime import OnnxRuntimeSession
from mha_deploy.spec_file import load_spec

GRID = {"batch": [1], "seq": [4, 32]}
MADE = (CANONICAL, "no-spinning", "lean-attention", "fused-projections", "whole-attention", "flash-attention")
NAMES = (*MADE, "torch-eager")
CANDIDATES = tuple(each for each in all_candidates() if each.name in NAMES)
TWO_THREADS = Placement(threads=2)


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch):
    """Pauses make timings fair, which no test here looks at."""
    monkeypatch.setattr("mha_deploy.search.measuring.Schedule", functools.partial(Schedule, pause_s=0.0))


@pytest.fixture(scope="module")
def verdicts(small_bundle, tmp_path_factory):
    """A record of the candidates' verdicts without a timing: judging them takes seconds."""
    folder = tmp_path_factory.mktemp("judged") / "bundle"
    shutil.copytree(small_bundle.folder, folder)
    searched(Bundle.load(folder), CANDIDATES, grid={"batch": [1], "seq": [1]})
    data = json.loads((folder / RECORD).read_text())
    kept = {key: entry for key, entry in data["entries"].items() if key.startswith("verdict")}
    assert len(kept) == len(CANDIDATES)
    return json.dumps({**data, "entries": kept})


@pytest.fixture
def bundle(small_bundle, verdicts, tmp_path):
    """A copy to write to."""
    shutil.copytree(small_bundle.folder, tmp_path / "bundle")
    (tmp_path / "bundle" / RECORD).write_text(verdicts)
    return Bundle.load(tmp_path / "bundle")


def searched(bundle, candidates=CANDIDATES[:1], **fields):
    fields = {"grid": GRID, "seconds": 0.02, "placement": TWO_THREADS, **fields}
    return optimize(bundle, candidates=candidates, **fields)


def counting(candidate, opened):
    """`candidate`, whose sessions are noted as they are opened."""

    def open_(*given):
        opened.append(candidate.name)
        return candidate.open(*given)

    return dataclasses.replace(candidate, open=open_)


def wrong(name="wrong", change=lambda y: y * 1.001, precision=Precision.FP32):
    """A candidate that answers other than PyTorch."""

    def open_(bundle, artifact, placement):
        inner = OnnxRuntimeSession(artifact.path(bundle.folder), artifact.signature, placement=placement)
        return FakeSession(artifact.signature, lambda feeds: {"y": change(inner.run(feeds)["y"])})

    def make(bundle, status):
        return variant_of(canonical(bundle, status), name)

    return Candidate(name, precision, make, open=open_)


def lacking(reason):
    return Candidate("elsewhere", Precision.FP32, canonical, lambda *_: reason)


def test_every_candidate_that_passes_is_timed_at_every_size_and_one_is_chosen(bundle):
    report = searched(bundle, CANDIDATES)
    outcomes = {each.name: each.outcome for each in report.tried}
    assert outcomes == {**dict.fromkeys(MADE, "passed"), "torch-eager": "baseline"}
    assert [size.sizes for size in report.measured] == [{"batch": 1, "seq": 4}, {"batch": 1, "seq": 32}]
    for size in report.measured:
        assert set(size.timings) == set(NAMES)
        assert size.timings[CANONICAL].final
        assert size.ceiling_gflops > 0
    assert [each.verdict.passed for each in report.tried] == [True] * len(NAMES)
    assert {report.route.short, report.route.long} <= set(MADE)
    again = Bundle.load(bundle.folder)
    assert again.artifact("", TWO_THREADS).name == report.artifact
    x = np.ones((2, 5, 32), np.float32), np.ones((2, 5), bool)
    with again.open_session(placement=TWO_THREADS) as session:
        assert session.name == report.artifact
        assert session.run(dict(zip(("x", "mask"), x, strict=True)))["y"].shape == (2, 5, 32)
    data = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert data["artifact"] == report.artifact
    assert [each["outcome"] for each in data["candidates"]] == list(outcomes.values())


def test_what_answers_wrong_is_never_timed_and_the_case_is_named(bundle):
    report = searched(bundle, (*CANDIDATES[:1], wrong()))
    failed = report.tried[1]
    assert failed.outcome == "failed"
    assert failed.verdict.error_ratio > 1
    assert failed.why.startswith(failed.verdict.case)
    assert all("wrong" not in size.timings for size in report.measured)


def test_nan_in_one_answer_fails_the_gate(bundle):
    def spoilt(y):
        return np.where(np.arange(y.shape[-1]) == 3, np.nan, y).astype(np.float32)

    assert searched(bundle, (*CANDIDATES[:1], wrong(change=spoilt))).tried[1].outcome == "failed"


def test_where_nothing_passes_nothing_is_chosen(bundle):
    with pytest.raises(CheckError, match="no candidate computes what PyTorch computes: wrong at "):
        searched(bundle, (wrong(),))
    assert Bundle.load(bundle.folder).manifest.choices == ()


def test_where_nothing_runs_each_reason_is_given(bundle):
    with pytest.raises(MissingError, match="no candidate runs here: elsewhere: no abacus"):
        searched(bundle, (lacking("no abacus"),))


def test_a_coarser_precision_is_tried_only_where_it_is_allowed(bundle):
    coarse = dataclasses.replace(CANDIDATES[0], name="coarse", precision=Precision.BF16)
    report = searched(bundle, (*CANDIDATES[:1], coarse))
    assert (report.tried[1].outcome, report.tried[1].why) == ("not allowed", "allow it with --allow bf16")
    allowed = searched(bundle, (*CANDIDATES[:1], coarse), allow=[Precision.BF16])
    assert allowed.tried[1].outcome == "passed"


def test_a_baseline_is_never_chosen(bundle):
    baseline = dataclasses.replace(CANDIDATES[0], baseline=True)
    with pytest.raises(MissingError, match="no candidate runs here"):
        searched(bundle, (baseline,))


def test_a_second_search_opens_nothing_and_a_changed_one_measures_again(bundle):
    opened = []
    candidate = counting(CANDIDATES[0], opened)
    first = searched(bundle, (candidate,))
    assert (opened, first.reused) == ([CANONICAL], 0)
    second = searched(Bundle.load(bundle.folder), (candidate,))
    assert (opened, second.reused) == ([CANONICAL], 2)
    assert second.measured == first.measured
    searched(bundle, (candidate,), placement=Placement(threads=1))
    assert opened == [CANONICAL] * 2


def test_a_search_that_resumes_does_without_pytorch(bundle):
    searched(bundle, CANDIDATES)
    code = f"""
import sys
from mha_deploy.bundle import Bundle
from mha_deploy.search import optimize
from mha_deploy.search.candidates import all_candidates
from mha_deploy.sessions import Placement
chosen = tuple(each for each in all_candidates() if each.name in {NAMES})
found = optimize(Bundle.load({str(bundle.folder)!r}), candidates=chosen, grid={GRID}, seconds=0.02,
                 placement=Placement(threads=2))
print(found.reused, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "False"]


def test_an_interrupted_search_goes_on_where_it_stopped(bundle):
    def stop(text):
        if "seq=32" in text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        searched(bundle, progress=stop)
    assert Bundle.load(bundle.folder).manifest.choices == ()
    opened = []
    report = searched(bundle, (counting(CANDIDATES[0], opened),))
    assert report.reused == 1
    assert len(report.measured) == 2


def chosen_for(**changes):
    artifact_sha256 = changes.pop("artifact_sha256", None)
    return lambda artifact: Choice(
        **{
            "machine": machine.fingerprint(),
            "device": "cpu",
            "threads": 2,
            "artifact": artifact.name,
            "artifact_sha256": artifact_sha256 or tuple(record.sha256 for record in artifact.files),
            **changes,
        }
    )


@pytest.mark.parametrize(
    ("choice", "holds"),
    [
        (chosen_for(), True),
        (chosen_for(machine="another"), False),
        (chosen_for(device="cuda"), False),
        (chosen_for(threads=1), False),
        (chosen_for(artifact_sha256=("0" * 64,)), False),
    ],
    ids=["here", "another machine", "another device", "other threads", "other files"],
)
def test_a_choice_holds_for_its_machine_its_placement_and_its_files(bundle, choice, holds):
    artifact = dataclasses.replace(bundle.artifact(), name="other")
    bundle.choose(artifact, choice(artifact))
    found = Bundle.load(bundle.folder).artifact("", TWO_THREADS).name
    assert found == ("other" if holds else CANONICAL)
    assert Bundle.load(bundle.folder).passed_over(TWO_THREADS) == (() if holds else ("other",))


def test_a_new_choice_takes_the_place_of_the_one_before_it(bundle):
    for name in ("one", "two"):
        artifact = dataclasses.replace(bundle.artifact(), name=name)
        bundle.choose(artifact, chosen_for()(artifact))
    assert [choice.artifact for choice in bundle.manifest.choices] == ["two"]


def test_a_manifest_from_before_there_was_a_search_opens_its_canonical_artifact(bundle):
    path = bundle.folder / FILE_NAME
    data = json.loads(path.read_text())
    del data["choices"]
    path.write_text(json.dumps(data))
    assert Bundle.load(bundle.folder).artifact().name == CANONICAL


def test_a_routed_artifact_runs_both_its_members_and_carries_the_coarser_budget(bundle):
    short = bundle.artifact()
    coarse = {"details": {"max_relative_error": 0.02}, "precision": Precision.INT8}
    long = dataclasses.replace(short, name="long", **coarse)
    artifact = routed_artifact(short, long, 8)
    assert (artifact.name, artifact.precision) == ("canonical-to-8-then-long", Precision.INT8)
    assert artifact.details["max_relative_error"] == 0.02
    assert artifact.files == short.files
    bundle.choose(artifact, chosen_for()(artifact))
    with Bundle.load(bundle.folder).open_session(placement=TWO_THREADS) as session:
        for seq in (8, 9):
            feeds = {"x": np.ones((1, seq, 32), np.float32), "mask": np.ones((1, seq), bool)}
            assert session.run(feeds)["y"].shape == (1, seq, 32)
        assert "up to length 8" in session.provider


@pytest.mark.parametrize("turned", [False, True])
def test_of_two_members_the_larger_budget_counts_and_one_depending_on_its_batch_is_enough(bundle, turned):
    one = dataclasses.replace(
        bundle.artifact(), details={"max_relative_error": 0.02, "batch_dependent": True}
    )
    other = dataclasses.replace(one, details={"max_relative_error": 0.05, "batch_dependent": False})
    details = routed_artifact(*((other, one) if turned else (one, other)), 8).details
    assert (details["max_relative_error"], details["batch_dependent"]) == (0.05, True)


def test_sizes_go_from_short_to_long_and_none_is_out_of_range():
    assert default_sizes(load_spec("minilm-l6-v2")) == [
        {"batch": 1, "seq": 16},
        {"batch": 8, "seq": 16},
        {"batch": 1, "seq": 128},
        {"batch": 8, "seq": 128},
        {"batch": 1, "seq": 256},
        {"batch": 1, "seq": 512},
    ]
    assert default_sizes(small_spec())[-1] == {"batch": 1, "seq": 64}


def test_each_candidate_has_a_name_of_its_own_and_the_simplest_comes_first():
    names = [each.name for each in all_candidates()]
    assert len(set(names)) == len(names)
    assert names[0] == CANONICAL
    assert [each.name for each in all_candidates() if each.baseline] == ["torch-eager", "torch-compile"]


def test_openvino_passes_its_gate_in_both_precisions_where_it_runs(bundle):
    candidates = [each for each in all_candidates() if each.name.startswith("openvino")]
    grid = {"batch": [1], "seq": [4]}
    report = searched(bundle, (*CANDIDATES[:1], *candidates), allow=[Precision.BF16], grid=grid)
    assert {each.outcome for each in report.tried} <= {"passed", "not here"}


def test_seconds_that_are_none_are_refused(bundle):
    with pytest.raises(InputError, match=r"seconds = nan; expected a number above 0"):
        searched(bundle, seconds=float("nan"))


def test_optimize_prints_every_candidate_every_size_and_the_choice(bundle, cli, monkeypatch):
    monkeypatch.setattr("mha_deploy.search.run.all_candidates", lambda: (*CANDIDATES[:1], wrong()))
    arguments = ("optimize", bundle.folder, "--grid", "batch=1", "--grid", "seq=4", "--seconds", 0.02)
    result = cli(*arguments, "--threads", 2)
    assert result.exit_code == 0, result.output
    for text in ("candidates (fp32 allowed)", "wrong: failed: ", "batch x seq = 1 x 4", "chosen: canonical"):
        assert text in result.stdout
    again = cli(*arguments, "--threads", 2, "--json")
    assert json.loads(again.stdout)["reused_sizes"] == 1
    assert (bundle.folder / RECORD).is_file()
    shown = cli("inspect", bundle.folder)
    assert "chosen" in shown.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--allow", "int4"), "--allow 'int4' has int4; expected some of bf16, fp16, int8"),
        (("--portable", "--allow", "bf16"), "are for the search, which --portable and --precision leave out"),
        (("--portable", "--precision", "int8"), "make two forms; ask for one at a time"),
        (("--max-relative-error", "2%"), "are for --precision int8"),
    ],
)
def test_options_that_do_not_go_together_are_refused(bundle, cli, options, message):
    result = cli("optimize", bundle.folder, *options)
    assert result.exit_code == 2
    assert message in result.stderr


def test_the_help_names_the_seconds_that_a_size_is_measured_for(cli):
    assert f"[default: {SECONDS:g}]" in " ".join(cli("optimize", "--help").stdout.split())
