"""Triton's own load generator, unmodified, against a served bundle."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from serving import MODEL, bundle_runner, free_port, serving

PROGRAM = Path(sys.executable).with_name("perf_analyzer")  # tritonclient's wheel for Linux brings it


def libraries():
    """Where the wheel of CUDA's runtime, which the program is linked with, has its library."""
    found = importlib.util.find_spec("nvidia.cuda_runtime") if importlib.util.find_spec("nvidia") else None
    return str(Path(found.submodule_search_locations[0]) / "lib") if found else ""


def analyzed(*arguments):
    surroundings = {**os.environ, "LD_LIBRARY_PATH": libraries()}
    return subprocess.run(
        [PROGRAM, *arguments], capture_output=True, text=True, env=surroundings, timeout=120, check=False
    )


@pytest.fixture(scope="module", autouse=True)
def program():
    if not PROGRAM.exists():
        pytest.skip("tritonclient's wheel brings no perf_analyzer here")
    said = analyzed("--version").stderr
    if "shared libraries" in said:
        pytest.skip(f"perf_analyzer does not start: {said.strip().splitlines()[-1]}")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Requests of three lengths without a mask, and one whose second half is masked."""
    random = np.random.default_rng(0)

    def request(length):
        return {"x": {"content": random.standard_normal(length * 32).tolist(), "shape": [length, 32]}}

    masked = {**request(8), "mask": {"content": [True] * 4 + [False] * 4, "shape": [8]}}
    path = tmp_path_factory.mktemp("perf") / "requests.json"
    path.write_text(json.dumps({"data": [request(3), request(8), request(31), masked]}))
    return path


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_perf_analyzer_drives_requests_of_different_lengths_and_reads_the_servers_figures(
    small_bundle, data, protocol
):
    with serving(bundle_runner(small_bundle), grpc_port=free_port()) as server:
        port = server.port if protocol == "http" else server.server.grpc_port
        done = analyzed(
            *("-m", MODEL, "-i", protocol, "-u", f"127.0.0.1:{port}", "--input-data", data),
            # Only whether it works is asked here, so that a figure need not settle.
            *("-s", "999", "--measurement-mode", "count_windows", "--measurement-request-count", "20"),
        )
        outcomes = dict(server.stats.outcomes)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Successful request count: " in done.stdout
    assert "compute infer" in done.stdout
    assert {outcome.value for outcome, count in outcomes.items() if count} <= {"answered", "cancelled"}
    assert sum(outcomes.values()) >= 60
