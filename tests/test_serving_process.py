"""The command `serve` as a process: signals, restarts, addresses."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from serving import Connection, ask, fake_runner, get, infer_request, serving, until

import mha_deploy
from mha_deploy.manifest import Choice
from mha_deploy.runner import RunnerOptions
from mha_deploy.serving import ServeOptions, serve

X = np.ones((1, 4, 32), np.float32)


@contextlib.contextmanager
def served(bundle, *options):
    """A `serve` process that is ready, and its port; killed when the block ends."""
    command = [sys.executable, "-m", "mha_deploy", "serve", str(bundle.folder), *map(str, options)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(mha_deploy.__file__).parents[1],
    ) as process:
        try:
            lines = []
            while not (lines and lines[-1].startswith("serving ")):
                lines.append(process.stderr.readline())
                assert lines[-1], f"it ended: {lines}"
            process.said = lines
            yield process, int(re.search(r":(\d+) \(ready", lines[-1]).group(1))
        finally:
            process.kill()


@pytest.fixture(scope="module")
def copied(small_bundle, tmp_path_factory):
    """A bundle that calibration may write to."""
    folder = shutil.copytree(small_bundle.folder, tmp_path_factory.mktemp("served") / "bundle")
    return mha_deploy.Bundle.load(folder)


def test_sigterm_under_load_loses_nothing_and_exits_0(copied):
    """Every request that was sent is answered: 200, or 503 that says it is shutting down; the report adds
    up to what clients saw. Connections that never got a word of theirs in are refused."""
    statuses, refused, stop = [], [], threading.Event()

    def client():
        while not stop.is_set():
            try:
                with Connection(port) as connection:
                    connection.send(infer_request(X))
                    reply = connection.reply()
            except ConnectionError:
                return
            if reply is None:
                refused.append(1)
                return
            statuses.append(reply.status)

    with served(copied, "--port", 0, "--workers", 1, "--json") as (process, port):
        with ThreadPoolExecutor(6) as pool:
            clients = [pool.submit(client) for _ in range(6)]
            while len(statuses) < 50:
                time.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            out, _ = process.communicate(timeout=30)
            stop.set()
            for each in clients:
                each.result()
        assert process.returncode == 0
    report = json.loads(out)
    assert set(statuses) <= {200, 503}
    assert report["outcomes"].get("answered", 0) == statuses.count(200)
    assert report["received"] == sum(report["outcomes"].values()) == len(statuses)


STARTS = """
import sys, time
import mha_deploy.runner.calibration as calibration
from mha_deploy.cli import main

def calibrate(*_, **__):
    print("calibrating", flush=True)
    time.sleep(60)

calibration.calibrate = calibrate
main(["serve", sys.argv[1], "--port", "0"])
"""


def test_sigterm_during_the_start_ends_it_in_one_line(small_bundle, tmp_path):
    folder = shutil.copytree(small_bundle.folder, tmp_path / "bundle")
    files = sorted(folder.rglob("*"))
    with subprocess.Popen(
        [sys.executable, "-c", STARTS, folder],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(mha_deploy.__file__).parents[1],
    ) as process:
        assert process.stdout.readline() == "calibrating\n"
        process.send_signal(signal.SIGTERM)
        out, told = process.communicate(timeout=30)
    assert (process.returncode, out, told) == (143, "", "stopped by SIGTERM before it was ready\n")
    assert sorted(folder.rglob("*")) == files


ASKED = """
import os, signal, sys
from mha_deploy import Bundle
from mha_deploy.runner import RunnerOptions
from mha_deploy.serving import ServeOptions, serve

def announce(_server):
    print(sys.getswitchinterval() < 0.001)
    os.kill(os.getpid(), signal.SIGTERM)

before = sys.getswitchinterval()
options = RunnerOptions(workers=1, threads=1)
serve(Bundle.load(sys.argv[1]), runner_options=options, options=ServeOptions(port=0), announce=announce)
print(sys.getswitchinterval() == before)
"""


def test_threads_change_soon_while_a_server_runs_and_as_before_after_it(copied):
    """Or a worker would wait for as long as several runs until the event loop lets it go on."""
    done = subprocess.run(
        [sys.executable, "-c", ASKED, copied.folder],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=Path(mha_deploy.__file__).parents[1],
    )
    assert (done.stdout, done.stderr) == ("True\nTrue\n", "")


def test_a_second_signal_ends_the_grace_at_once(copied):
    """A request whose body never ends would hold the first for longer than this test waits."""
    with served(copied, "--port", 0, "--workers", 1, "--grace", 600, "--json") as (process, port):
        with Connection(port) as connection:
            connection.send(infer_request(X)[:-1])
            process.send_signal(signal.SIGTERM)
            until(lambda: get(port, "/v2/health/ready").status == 503)
            process.send_signal(signal.SIGTERM)
            out, _ = process.communicate(timeout=8)
        assert process.returncode == 0
    report = json.loads(out)
    assert report["received"] == sum(report["outcomes"].values()) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_until_the_very_end_of_an_idle_server_change_nothing(copied, number):
    """Sent without a pause: whatever is being torn down, one meets it."""
    with served(copied, "--port", 0, "--workers", 1) as (process, port):
        assert ask(port, infer_request(X)).status == 200
        while process.poll() is None:
            process.send_signal(number)
            time.sleep(0.001)
        assert (process.returncode, process.stdout.read()) == (0, "1 requests: 1 answered\n")
        assert process.stderr.read() == ""


def test_a_library_callers_handlers_are_back_after_a_server(copied):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    options = ServeOptions(port=0, grace_s=0.0)

    def stop(_server):
        signal.raise_signal(signal.SIGTERM)

    report = serve(copied, runner_options=RunnerOptions(workers=1), options=options, announce=stop)
    assert report.received == 0
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_a_killed_server_starts_again_on_its_port_and_answers_the_same(copied):
    with served(copied, "--port", 0, "--workers", 1) as (process, port):
        before = ask(port, infer_request(X)).y
        process.kill()
    with served(copied, "--port", port, "--workers", 1) as (process, again):
        assert again == port
        assert np.array_equal(ask(port, infer_request(X)).y, before)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, "1 requests: 1 answered\n")


def test_a_choice_of_another_machine_is_named_when_it_is_passed_over(copied, tmp_path):
    bundle = mha_deploy.Bundle.load(shutil.copytree(copied.folder, tmp_path / "bundle"))
    artifact = dataclasses.replace(bundle.artifact(), name="other")
    files = tuple(record.sha256 for record in artifact.files)
    bundle.choose(artifact, Choice("another machine", "cpu", 2, "other", files))
    with served(bundle, "--port", 0, "--workers", 1) as (process, _):
        (warning,) = (line for line in process.said if line.startswith("warning"))
    assert "`optimize` chose other, but on another machine" in warning
    with served(copied, "--port", 0, "--workers", 1) as (process, _):
        assert len(process.said) == 1


def test_a_token_from_a_file_guards_the_server(copied, tmp_path):
    token = tmp_path / "token"
    token.write_text("s3cret-t0ken\n")
    with served(copied, "--port", 0, "--workers", 1, "--token-file", token) as (_, port):
        assert get(port, "/v2").status == 401
        assert get(port, "/v2", authorization="Bearer s3cret-t0ken").status == 200


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--host", "0.0.0.0"), "0.0.0.0 can be reached from other machines; give a token"),
        (("--host", "::"), ":: can be reached from other machines"),
        (("--tls-cert", "cert.pem"), "TLS needs both a certificate and its key"),
        (("--tls-client-ca", "ca.pem"), "it needs --tls-cert and --tls-key"),
        (("--tls-cert", "none.pem", "--tls-key", "none.pem"), "TLS file none.pem: No such file"),
        (("--token-file", "none"), "cannot read the token file none"),
        (
            ("--token-file", "/dev/zero"),
            "the token file /dev/zero holds more than a token; expected at most 4096",
        ),
        (("--request-seconds", "inf"), "request_s = inf; expected a finite number above 0"),
        (("--request-seconds", "nan"), "request_s = nan; expected a finite number above 0"),
        (
            ("--max-body-bytes", (512 << 20) + 1),
            "body_bytes = 536870913; expected at most bodies_bytes = 5368",
        ),
        (("--max-body-bytes", 1 << 31, "--grpc-port", 1), "body_bytes = 2147483648; expected at most"),
        (("--grace", "nan"), "a grace of nan s; expected 0 or more"),
        (("--host", "no.such.host.invalid"), "can be reached from other machines"),
        (("--host", "..", "--insecure"), "cannot listen on ..:0: no name of a host is written so"),
        (("--host", "a" * 80, "--insecure"), "a:0: no name of a host is written so"),
    ],
)
def test_an_unsafe_or_wrong_start_is_refused_in_one_line(cli, copied, options, words):
    result = cli("serve", copied.folder, "--port", 0, "--workers", 1, *options)
    said = [line for line in result.stderr.splitlines() if not line.startswith("warning: ")]
    assert (result.exit_code, len(said)) == (2, 1)
    assert words in said[0]


def test_a_port_in_use_is_told(cli, copied):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        result = cli("serve", copied.folder, "--workers", 1, "--port", port)
    assert result.exit_code == 2
    assert f"cannot listen on 127.0.0.1:{port}" in result.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no usable token; expected printable ASCII without spaces"),
        ("two words", "holds no usable token"),
        ("gr\u00fcn", "holds no usable token"),
        ("a" * 4097, "holds more than a token; expected at most 4096 bytes"),
    ],
)
def test_a_token_that_cannot_be_one_is_refused(cli, copied, monkeypatch, text, words):
    monkeypatch.setenv("MHA_DEPLOY_TOKEN", text)
    result = cli("serve", copied.folder, "--port", 0)
    assert result.exit_code == 2
    assert f"error: the variable MHA_DEPLOY_TOKEN {words}" in result.stderr


def test_the_longest_token_that_is_taken_reaches_the_server():
    with serving(fake_runner(), token="t" * 4096) as running:
        assert get(running.port, "/v2", authorization="Bearer " + "t" * 4096).status == 200


@pytest.mark.parametrize(
    ("missing", "options", "command"),
    [("aiohttp", (), "mha-deploy[serve]"), ("tritonclient.grpc", ("--grpc-port", 1), "mha-deploy[grpc]")],
)
def test_a_missing_package_is_named_with_its_command(cli, copied, monkeypatch, missing, options, command):
    for name in [name for name in sys.modules if name.startswith("mha_deploy.serving.")]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name == missing or name.startswith(f"{missing}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    result = cli("serve", copied.folder, "--port", 0, "--workers", 1, *options)
    assert result.exit_code == 3, result.output
    assert f"pip install '{command}'" in result.stderr


def test_a_grpc_port_in_use_is_told_in_one_line(copied):
    """In a process of its own: gRPC would write past Python's stderr."""
    pytest.importorskip("tritonclient.grpc")
    command = [sys.executable, "-m", "mha_deploy", "serve", copied.folder, "--workers=1", "--port=0"]
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        done = subprocess.run(
            [*command, f"--grpc-port={port}"],
            cwd=Path(mha_deploy.__file__).parents[1],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"error: cannot listen on 127.0.0.1:{port} for gRPC: ")
    assert "address already in use" in done.stderr
