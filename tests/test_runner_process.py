"""The runner and the life of its process: forks, and an end without a close."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from runner_blocks import SELF, Gate, outcome_of, request, runner_behind

import mha_deploy

LEAVES = """
import sys, threading
import numpy as np
from mha_deploy.bundle import Bundle
from mha_deploy.ragged import Request
from mha_deploy.runner import BatchRunner, RunnerOptions

bundle = Bundle.load(sys.argv[1])
options = RunnerOptions(workers=2, threads=1, max_queue_requests=10_000)
runner = BatchRunner(lambda _: bundle.open_session(), bundle.spec, options)
x = np.ones((64, bundle.spec.d_model), np.float32)
futures = [runner.submit(Request({"x": x}, 64, 64)) for _ in range(3000)]
futures[50].result()
futures[-1].add_done_callback(lambda done: print(type(done.exception()).__name__))
sys.exit(5)
"""


def test_a_process_that_ends_without_a_close_ends_well_and_fails_what_is_left(small_bundle):
    done = subprocess.run(
        [sys.executable, "-c", LEAVES, small_bundle.folder],
        cwd=Path(mha_deploy.__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (5, "RunnerClosedError\n", "")


STOPPED = """
import os, signal, sys
from mha_deploy.cli import main
from mha_deploy.runner.worker import Worker

start = Worker.start

def start_and_stop(worker):
    start(worker)
    os.kill(os.getpid(), signal.SIGTERM)

Worker.start = start_and_stop
main(["serve", sys.argv[1], "--port", "0", "--workers", "3"])
"""


def test_a_stop_while_the_workers_are_started_ends_those_that_were(small_bundle, tmp_path):
    folder = shutil.copytree(small_bundle.folder, tmp_path / "bundle")
    done = subprocess.run(
        [sys.executable, "-c", STOPPED, folder],
        cwd=Path(mha_deploy.__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (143, "")
    assert done.stderr == "stopped by SIGTERM before it was ready\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_child_is_told_that_the_runner_is_not_its_own():
    gate = Gate(SELF)
    gate.let()
    with runner_behind(gate) as runner:
        assert outcome_of(runner.submit(request(SELF, 5))) is None
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                runner.submit(request(SELF, 5))
            except BaseException as error:
                os.write(write, f"{type(error).__name__}: {error}".encode())
            runner.close()
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            told = pipe.read()
        assert os.waitpid(child, 0)[1] == 0
        assert told.startswith("RunnerClosedError: the runner does not cross a fork: its threads are in")
        assert outcome_of(runner.submit(request(SELF, 5))) is None
