"""The serving benchmark's run: what it leaves behind, and its page from that alone. Nothing is measured."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from mha_deploy.errors import MissingError

LATENCY = {"p50_ms": 5.0, "p90_ms": 8.0, "p95_ms": 9.0, "p99_ms": 12.5, "max_ms": 30.0, "samples": 460}


def load_report():
    """As a load report has it, with what is not kept."""
    return {
        "target": "it",
        "outcomes": {"answered": 460, "refused": 0},
        "latency": LATENCY,
        "send_lag": LATENCY,
        "percentiles": "a rule",
        "check": {"sampled": 8, "failed": 0, "rule": "another"},
        "machine": {"cpu": "a CPU"},
    }


def held(rate):
    trial = {"rate_per_s": rate, "held": True, "why_not": "", "tells": True, "report": load_report()}
    return {
        "rate_per_s": rate,
        "limited_by_generator": False,
        "alone": load_report(),
        "trials": [
            {**trial, "cpu_ms": 2.125},
            {**trial, "rate_per_s": 2 * rate, "held": False, "why_not": "p99 21.000 ms", "cpu_ms": 2.5},
        ],
    }


@pytest.fixture
def failing():
    """Systems that raise, with the number of the round."""
    return set()


@pytest.fixture
def suite(serving_suite, monkeypatch, tmp_path, failing):
    """The script `run` in an empty place, where every system holds 400 requests/s and ours 600."""
    run = serving_suite("run")

    def play(systems, served, conditions, stairs, seed):
        assert (conditions.trials, stairs) == (8, {})
        found = {}
        for system in systems:
            assert served(system).bundle is exported
            if (str(system), seed) in failing:
                said = f"{system} ended; last line of its log: ['{tmp_path}/serve.py: killed']"
                found[str(system)] = run.results.failure(run.results.without_paths(said))
            else:
                found[str(system)] = held(600.0 if system.name == "mha-deploy" else 400.0)
        return found

    def no_bf16(_):
        raise MissingError("this CPU does not compute in bf16")

    lone = {
        "tensor": [128, 384],
        "threads": 2,
        "medians_us": {"bare": [1000.0] * 8},
        "over_us": {"in_process": [60.0] * 8, "http": [400.0] * 8},
        "allowed_us": {"in_process": 150.0, "http": 600.0},
    }
    exported = SimpleNamespace(spec=SimpleNamespace(d_model=768))
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setattr(run.results, "ROOT", tmp_path)
    monkeypatch.setattr(run, "play", play)
    monkeypatch.setattr(run, "ReferenceChecker", lambda _: None)
    monkeypatch.setattr(run, "exported", lambda: exported)
    monkeypatch.setattr(run, "in_bf16", no_bf16)
    monkeypatch.setattr(run, "optimize", lambda _: SimpleNamespace(artifact="lean-attention"))
    monkeypatch.setattr(run, "prepare", lambda _: "")
    monkeypatch.setattr(run.overhead, "measure", lambda *_: lone)
    monkeypatch.setattr(run.signal, "signal", lambda *_: None)
    return run


def arguments(tmp_path, *more):
    return ["--peers", "triton", "--rounds", "2", "--out", str(tmp_path / "all.json"), *more]


def test_a_run_leaves_what_is_kept_of_it_and_the_page_of_that(suite, tmp_path):
    given = arguments(tmp_path, "--on", "zen9")
    assert suite.main(given) == 0
    kept = json.loads((tmp_path / "benchmarks" / "results" / "serving-zen9.json").read_text())
    page = (tmp_path / "docs" / "serving-benchmarks-zen9.md").read_text()
    assert kept["command"] == f"python benchmarks/serving/run.py {' '.join(given)}"
    assert f"```\n{kept['command']}\n```" in page
    assert "| Triton (Python backend), plain | 400 | 400 | 400 | 2.12 |" in page
    assert page == suite.written(kept)[0]


def test_each_trial_is_kept_with_its_rate_percentiles_and_whether_it_held(suite, tmp_path):
    suite.main(arguments(tmp_path))
    kept = json.loads((tmp_path / "benchmarks" / "results" / "serving.json").read_text())
    _, trial = kept["rounds"][1]["triton (plain)"]["trials"]
    assert trial == {
        "rate_per_s": 800.0,
        "held": False,
        "why_not": "p99 21.000 ms",
        "tells": True,
        "cpu_ms": 2.5,
        "latency": LATENCY,
        "outcomes": {"answered": 460},
        "check": {"sampled": 8, "failed": 0},
    }
    everything = json.loads((tmp_path / "all.json").read_text())
    assert everything["rounds"][1]["triton (plain)"]["trials"][1]["report"] == load_report()


@pytest.mark.parametrize(
    ("on", "page"), [([], "serving-benchmarks.md"), (["--on", "zen9"], "serving-benchmarks-zen9.md")]
)
def test_the_page_is_written_anew_from_what_was_kept_without_measuring(
    suite, monkeypatch, tmp_path, on, page
):
    suite.main(arguments(tmp_path, *on))
    (kept,) = (tmp_path / "benchmarks" / "results").iterdir()
    written = tmp_path / "docs" / page
    before = written.read_text()
    written.unlink()
    (tmp_path / "all.json").unlink()
    monkeypatch.delattr(suite, "play")
    monkeypatch.setattr(suite, "describe", lambda: {})
    assert suite.main(["--tables", str(kept)]) == 0
    assert written.read_text() == before
    assert not (tmp_path / "all.json").exists()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("serving.json", "no JSON", "serving.json cannot be read"),
        ("serving.json", "[]", "serving.json cannot be read"),
        ("serving.json", '{"rounds": []}', "has format None; expected 'mha-deploy serving benchmark 2'"),
        ("other.json", '{"format": "mha-deploy serving benchmark 2"}', "'other.json'; expected serving.json"),
    ],
)
def test_a_file_that_holds_no_results_is_refused(suite, tmp_path, capsys, name, content, said):
    (tmp_path / name).write_text(content)
    assert suite.main(["--tables", str(tmp_path / name)]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "docs").exists()


def test_a_server_that_fails_in_a_round_holds_nothing_there_and_the_run_goes_on(suite, failing, tmp_path):
    failing.update({("mha-deploy", 1), ("triton (plain)", 2)})
    assert suite.main(arguments(tmp_path)) == 1
    kept = json.loads((tmp_path / "benchmarks" / "results" / "serving.json").read_text())
    page = (tmp_path / "docs" / "serving-benchmarks.md").read_text()
    first, second = kept["rounds"]
    assert first["triton (plain)"]["rate_per_s"] == 400.0
    assert second["mha-deploy"]["rate_per_s"] == 600.0
    for found, name in ((first["mha-deploy"], "mha-deploy"), (second["triton (plain)"], "triton (plain)")):
        assert found["rate_per_s"] == 0.0
        assert found["why_none"] == f"{name} ended; last line of its log: ['serve.py: killed']"
    assert "| mha-deploy | 0 | 600 | 0 |" in page
    assert "- mha-deploy: 0 in round 1: ended; last line" in page
    assert "- Triton (Python backend), plain: 0 in round 2: ended; last line" in page


def test_nothing_is_won_over_a_peer_that_failed_in_a_round(suite, failing, tmp_path):
    failing.add(("triton (plain)", 1))
    assert suite.main(arguments(tmp_path)) == 1
    page = (tmp_path / "docs" / "serving-benchmarks.md").read_text()
    assert "(target: 1.25x in the median; missed)" in page


def test_a_variant_that_never_runs_is_said_and_the_other_counts(suite, failing, tmp_path):
    failing.update({("triton (plain)", 1), ("triton (plain)", 2)})
    assert suite.main(arguments(tmp_path)) == 0
    page = (tmp_path / "docs" / "serving-benchmarks.md").read_text()
    assert "| Triton (Python backend), batched | 400 |" in page
    assert "- Triton (Python backend), plain: 0 in round 1: ended" in page
