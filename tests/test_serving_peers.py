"""The serving benchmark's systems: how each is installed, started and spoken to."""

from __future__ import annotations

import asyncio
import os
import runpy
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, call

import numpy as np
import pytest

from mha_deploy.errors import InputError
from mha_deploy.load import LoadOptions, ReferenceChecker, closed_plan, parse_lengths, run_load
from mha_deploy.load.encoding import Reply

PEERS = Path(__file__).parents[1] / "benchmarks" / "serving" / "peers"


def test_as_exported_the_server_runs_the_graph_that_the_peers_run(serving_suite, tmp_path):
    systems = serving_suite("systems")
    commands = {
        variant: systems.command_of(systems.System("mha-deploy", variant), tmp_path, 8000)
        for variant in systems.OUR_ARGUMENTS
    }
    assert "--artifact" not in commands["default"]
    assert commands["as exported"][-2:] == ["--artifact", "canonical"]
    assert "--artifact" not in commands["bf16"]
    assert commands["packed"][-4:] == ["--artifact", "packed", "--mode", "fast"]


def test_a_tensor_survives_each_peers_encoding(serving_suite):
    systems = serving_suite("systems")
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


def test_cpu_time_is_that_of_all_processes_of_the_session_ended_ones_too(serving_suite):
    systems = serving_suite("systems")
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    program = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {burn!r}])\n{burn}\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, start_new_session=True
    ) as process:
        it, end = systems.Started(None, process.pid), time.monotonic() + 30
        while it.cpu_s() < 0.55:
            assert time.monotonic() < end, "what it took does not show"
            time.sleep(0.01)
        process.stdin.close()
    assert np.isnan(systems.Started(None, process.pid).cpu_s())


def test_every_peer_has_its_requirements_pinned_and_a_server(serving_suite):
    for name in serving_suite("systems").NAMES:
        lines = (PEERS / name / "requirements.txt").read_text().split()
        pinned = (PEERS / name / "constraints.txt").read_text().lower().replace("_", "-").split()
        assert [
            line for line in lines if line.partition("[")[0].split("==")[0] not in "\n".join(pinned)
        ] == []
        assert all("==" in line for line in (*lines, *pinned))
        assert (PEERS / name / "serve.py").exists()


def test_every_peer_declares_all_that_the_page_says_of_it(serving_suite):
    systems = serving_suite("systems")
    for name in systems.NAMES:
        declared = systems.declared(name)
        words = ("title", "server", "backend", "workers", "tensors", "batching")
        assert all(isinstance(declared[each], str) for each in words)
        assert declared["threads"] >= 1 <= declared["largest_batch"]
        assert declared["window_ms"] >= 0
        assert all("==" in each for each in declared["requirements"])


@pytest.fixture
def installs(serving_suite, monkeypatch, tmp_path):
    """`systems` with one peer "it" in an empty place, and the commands that it would run."""
    systems, commands = serving_suite("systems"), []

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


def test_each_peer_is_given_a_worker_for_every_usable_core(serving_suite, monkeypatch, tmp_path):
    systems = serving_suite("systems")
    monkeypatch.setattr(systems, "usable_cpus", lambda: 8)
    for name in systems.NAMES:
        command = systems.command_of(systems.System(name, "plain"), tmp_path, 8000)
        assert command[-2:] == ["--workers", "8"]
    assert "--workers" not in systems.command_of(systems.System("mha-deploy", "default"), tmp_path, 8000)


@pytest.fixture
def serve(monkeypatch, tmp_path):
    """Runs a peer's serve.py over stand-ins for its packages; what became of the process, or None."""
    become = []
    monkeypatch.syspath_prepend(str(PEERS))
    monkeypatch.setenv("PYTHONPATH", str(PEERS))
    monkeypatch.setattr(os, "execve", lambda *given: become.append(given))
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **_: str(tmp_path))

    def run(name, modules, *options):
        for each, module in modules.items():
            monkeypatch.setitem(sys.modules, each, module)
        monkeypatch.delitem(sys.modules, "arguments", raising=False)
        given = ["--model", "model.onnx", "--port", "8000", "--variant", "batched", *options]
        monkeypatch.setattr(sys, "argv", ["serve.py", *given])
        runpy.run_path(str(PEERS / name / "serve.py"), run_name="__main__")
        return become.pop() if become else None

    return run


OPTIONS = pytest.mark.parametrize(("options", "workers"), [((), 2), (("--workers", "8"), 8)])


@OPTIONS
def test_litserve_runs_as_many_workers_as_it_is_given(serve, options, workers):
    litserve = MagicMock(LitAPI=SimpleNamespace)
    serve("litserve", {"litserve": litserve, "block": MagicMock()}, *options)
    assert litserve.LitServer.call_args.kwargs["workers_per_device"] == workers


@OPTIONS
def test_mlserver_holds_as_many_sessions_as_it_is_given(serve, monkeypatch, options, workers):
    _, _, environment = serve("mlserver", {}, *options)
    block = MagicMock()
    modules = {"block": block, "mlserver": MagicMock(MLModel=object), "mlserver.types": MagicMock()}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    model = runpy.run_path(str(PEERS / "mlserver" / "runtime.py"))["Attention"]()
    assert asyncio.run(model.load())
    assert block.Block.call_args_list == [call("model.onnx", 1)] * workers
    assert model._pool._max_workers == workers


@OPTIONS
def test_ray_runs_as_many_replicas_as_it_is_given(serve, options, workers):
    ray, names = MagicMock(), ("starlette.requests", "starlette.responses", "block")
    serve("ray", {"ray": ray, **{name: MagicMock() for name in names}}, *options)
    assert ray.serve.deployment.call_args.kwargs["num_replicas"] == workers
    assert ray.init.call_args.kwargs["num_cpus"] == workers


@OPTIONS
def test_triton_runs_as_many_instances_as_it_is_given(serve, tmp_path, options, workers):
    server = tmp_path / "site" / "pytriton" / "tritonserver"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    (server / "backends" / "python").mkdir(parents=True)
    (server / "python_backend_stubs" / version).mkdir(parents=True)
    (server / "python_backend_stubs" / version / "triton_python_backend_stub").touch()
    block = MagicMock()
    block.Block.return_value.width = 768
    pytriton = SimpleNamespace(__file__=str(server.parent / "__init__.py"))
    serve("triton", {"pytriton": pytriton, "block": block}, *options)
    config = (tmp_path / "models" / "block" / "config.pbtxt").read_text()
    assert f"count: {workers} }}" in config
    assert "max_batch_size: 8" in config
    assert "dynamic_batching { max_queue_delay_microseconds: 0 }" in config
    assert "dims: [ -1, 768 ]" in config


def test_a_server_that_ends_instead_of_answering_is_said_to_have_ended(serving_suite, monkeypatch, tmp_path):
    systems = serving_suite("systems")
    ends = [sys.executable, "-c", "print('no such model'); raise SystemExit(3)"]
    monkeypatch.setattr(systems, "command_of", lambda *_: ends)
    system = systems.System("mha-deploy", "default")
    said = r"mha-deploy ended with 3 before it answered; last line of its log: \['no such model'\]"
    with (
        pytest.raises(InputError, match=said),
        systems.started(system, tmp_path, MagicMock(), tmp_path / "log"),
    ):
        pass


def test_the_floor_answers_what_the_graph_answers(serving_suite, small_bundle, tmp_path):
    systems = serving_suite("systems")
    floor, signature = systems.System(systems.FLOOR, "default"), small_bundle.signature
    plan, options = closed_plan(4, parse_lengths("uniform:2:64"), 40), LoadOptions(warm_up=4, sample=40)
    with systems.started(floor, small_bundle.folder, signature, tmp_path / "log") as it:
        report = run_load(it.target, plan, options, ReferenceChecker(small_bundle))
    assert report.outcomes["answered"] == 40
    assert (report.check.sampled, report.check.failed) == (40, 0)
