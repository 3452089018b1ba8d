"""The serving benchmark's document: written from its JSON, and honest about what was not met."""

from __future__ import annotations

import sys
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mha_deploy.errors import InputError
from mha_deploy.load.encoding import Reply

FOLDER = Path(__file__).parents[1] / "benchmarks" / "serving"


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))

    def imported(name):
        monkeypatch.delitem(sys.modules, name, raising=False)
        return __import__(name)

    return imported


def search(rate, failed=0, limited=False):
    check = {"failed": failed}
    return {
        "rate_per_s": rate,
        "limited_by_generator": limited,
        "alone": {"check": check},
        "trials": [{"report": {"check": {"failed": 0}}}],
    }


DATA = {
    "machine": {
        "cpu": "a CPU",
        "cpu_features": ["avx2"],
        "usable_cpus": 2,
        "versions": {"onnxruntime": "1.32.0"},
    },
    "conditions": {
        "lengths": "lognormal:27:2:160",
        "p99_ms": 20.0,
        "seconds": 10.0,
        "tolerance": 0.05,
        "d_model": 768,
    },
    "variants_tried_per_s": {"triton": {"plain": 400.0, "batched": 390.0}},
    "engine": "lean-attention",
    "missing": {},
    "left_out": {},
    "systems": ["mha-deploy", "triton (plain)"],
    "rounds": [
        {"mha-deploy": search(600.0), "triton (plain)": search(400.0)},
        {"mha-deploy": search(500.0), "triton (plain)": search(390.0)},
        {"mha-deploy": search(520.0), "triton (plain)": search(380.0)},
    ],
    "lone_request": {
        "tensor": [128, 384],
        "threads": 2,
        "medians_us": {"bare": [1000.0] * 8},
        "over_us": {"in_process": [60.0] * 7 + [55.0], "http": [400.0] * 7 + [420.0]},
        "allowed_us": {"in_process": 150.0, "http": 600.0},
    },
}


def test_the_document_holds_the_rates_the_ratios_and_the_overheads(module):
    text, met = module("document").written(DATA)
    assert met
    assert "| mha-deploy | 600 | 500 | 520 | 520 |" in text
    assert "Against the best peer of the same round: 1.50x, 1.28x, 1.37x (target: 1.25x" in text
    assert "- triton: plain 400/s, batched 390/s" in text
    said = "60 us in process (55 to 60; at most 150), 400 us over HTTP (400 to 420; at most 600); met"
    assert said in text


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("rounds", 1, "mha-deploy"), search(0.0), "0.00x"),
        (("rounds", 1, "mha-deploy"), search(500.0, failed=2), "Wrong answers in the sample: 2."),
        (("rounds", 1, "triton (plain)"), search(390.0, limited=True), "for the generator's sake: 1."),
        (("missing",), {"ray": "not installed"}, "- ray: did not run: not installed"),
        (("lone_request", "over_us", "in_process"), [60.0] * 7 + [151.0], "(60 to 151; at most 150)"),
        (("lone_request", "over_us", "http"), [400.0] * 7, "(nan to nan; at most 600)"),
    ],
)
def test_whatever_is_not_met_is_said_and_fails(module, place, value, said):
    data = deepcopy(DATA)
    inner = data
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    if said == "0.00x":
        data["rounds"][2]["mha-deploy"] = search(0.0)
    text, met = module("document").written(data)
    assert said in text
    assert not met


def test_bf16_is_given_beside_the_target_and_does_not_meet_it(module):
    data = deepcopy(DATA)
    data["systems"].append("mha-deploy (bf16)")
    for each in data["rounds"]:
        each |= {"mha-deploy": search(100.0), "mha-deploy (bf16)": search(800.0)}
    text, met = module("document").written(data)
    assert not met
    assert (
        "0.25x, 0.26x, 0.26x (target: 1.25x in the median; missed); mha-deploy (bf16): 2.00x, 2.05x," in text
    )
    data = deepcopy(DATA)
    data["left_out"] = {"mha-deploy (bf16)": "this CPU does not compute in bf16"}
    text, met = module("document").written(data)
    assert met
    assert "- mha-deploy (bf16): did not run: this CPU does not compute in bf16" in text


def test_the_document_says_which_engine_runs(module):
    text, _ = module("document").written(DATA)
    assert "mha-deploy runs what `optimize` makes of it, in fp32 (lean-attention)" in text


def test_as_exported_the_server_runs_the_graph_that_the_peers_run(module, tmp_path):
    systems = module("systems")
    commands = {
        variant: systems.command_of(systems.System("mha-deploy", variant), tmp_path, 8000)
        for variant in systems.OUR_ARGUMENTS
    }
    assert "--artifact" not in commands["default"]
    assert commands["as exported"][-2:] == ["--artifact", "canonical"]
    assert "--artifact" not in commands["bf16"]
    assert commands["packed"][-4:] == ["--artifact", "packed", "--mode", "fast"]


def test_a_tensor_survives_each_peers_encoding(module):
    systems = module("systems")
    x = np.arange(3 * 8, dtype=np.float32).reshape(1, 3, 8)
    for name, wrap in {
        "ray": lambda sent: sent,
        "litserve": lambda sent: sent.replace(b'"x"', b'"y"'),
        "mlserver": lambda sent: sent.replace(b'"inputs"', b'"outputs"'),
    }.items():
        encoding = systems.encoding_of(name, 8)
        pieces, _ = encoding.body({"x": x})
        answer = encoding.answer(Reply(200, {}, wrap(b"".join(pieces))))
        assert np.array_equal(answer, x[0])
        with pytest.raises(InputError, match=r"an answer that cannot be read|expected float32 rows"):
            encoding.answer(Reply(200, {}, b"{}"))


def test_every_peer_has_its_requirements_pinned_and_a_server(module):
    for name in module("systems").NAMES:
        lines = (FOLDER / "peers" / name / "requirements.txt").read_text().split()
        pinned = (FOLDER / "peers" / name / "constraints.txt").read_text().lower().replace("_", "-").split()
        assert [
            line for line in lines if line.partition("[")[0].split("==")[0] not in "\n".join(pinned)
        ] == []
        assert all("==" in line for line in (*lines, *pinned))
        assert (FOLDER / "peers" / name / "serve.py").exists()


@pytest.fixture
def installs(module, monkeypatch, tmp_path):
    """`systems` with one peer "it" in an empty place, and the commands that it would run."""
    systems, commands = module("systems"), []

    def run(command, **_):
        commands.append(command)
        (systems.ENVIRONMENTS / "it").mkdir(parents=True, exist_ok=True)
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(systems, "PEERS", tmp_path / "peers")
    monkeypatch.setattr(systems, "ENVIRONMENTS", tmp_path / "environments")
    monkeypatch.setattr(systems.subprocess, "run", run)
    (tmp_path / "peers" / "it").mkdir(parents=True)
    for name in ("requirements.txt", "constraints.txt"):
        (tmp_path / "peers" / "it" / name).write_text("one==1\n")
    return systems, commands


def test_a_peer_that_is_installed_is_not_installed_again(installs):
    systems, commands = installs
    assert systems.prepare("it") == ""
    assert len(commands) == 2
    assert systems.prepare("it") == ""
    assert len(commands) == 2


@pytest.mark.parametrize("changed", ["requirements.txt", "constraints.txt"])
def test_a_peer_is_installed_anew_in_a_cleared_environment_when_its_files_change(installs, changed):
    systems, commands = installs
    systems.prepare("it")
    (systems.PEERS / "it" / changed).write_text("one==2\n")
    commands.clear()
    assert systems.prepare("it") == ""
    (made, installed) = commands
    assert made[1:4] == ["-m", "venv", "--clear"]
    assert installed[-4:] == [
        "-r",
        str(systems.PEERS / "it" / "requirements.txt"),
        "-c",
        str(systems.PEERS / "it" / "constraints.txt"),
    ]


def test_a_peer_whose_installation_failed_is_tried_again(installs, monkeypatch):
    systems, commands = installs
    works = systems.subprocess.run
    fails = SimpleNamespace(returncode=1, stderr="ERROR: no such version\n")
    monkeypatch.setattr(systems.subprocess, "run", lambda *_, **__: fails)
    assert systems.prepare("it") == "not installed: ERROR: no such version"
    monkeypatch.setattr(systems.subprocess, "run", works)
    assert systems.prepare("it") == ""
    assert len(commands) == 2
