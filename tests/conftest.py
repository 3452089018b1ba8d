"""Bundles that many tests look at. Exporting takes seconds, so each is made once a session."""

from __future__ import annotations

import importlib
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from fake_tensorrt import HostMemory

from mha_deploy.benchmark import BenchReport, bench
from mha_deploy.benchmark.rounds import WALL
from mha_deploy.bundle import Bundle
from mha_deploy.cli import main
from mha_deploy.pipeline import export
from mha_deploy.sessions import Placement
from mha_deploy.sessions.tensorrt import TensorRtSession
from mha_deploy.signature import Dim
from mha_deploy.spec import AttentionSpec
from mha_deploy.tensorrt.backend import has_cuda_driver

SMALL_DIMS = (Dim("batch", 1, 2, 6), Dim("seq", 1, 8, 64))


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not has_cuda_driver():
        pytest.skip("needs an NVIDIA GPU, and no driver answers here; make test-gpu lists them")


@pytest.fixture(scope="session", autouse=True)
def no_pauses():
    """Pauses keep one measurement from disturbing the next: no test asks how fast anything is, and how the
    pauses are taken is tested on a clock of the tests' own."""
    sleep = WALL.sleep
    object.__setattr__(WALL, "sleep", lambda _seconds: None)
    yield
    object.__setattr__(WALL, "sleep", sleep)


@pytest.fixture
def serving_suite(monkeypatch):
    """A module of benchmarks/serving by its name; its scripts are no package."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks" / "serving"))

    def imported(name):
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    return imported


def small_spec(**changes) -> AttentionSpec:
    """A block that exports and runs fast."""
    return AttentionSpec(**{"d_model": 32, "num_heads": 4, "dims": SMALL_DIMS, "name": "small", **changes})


@pytest.fixture(scope="session")
def small_bundle(tmp_path_factory) -> Bundle:
    """Self attention with a padding mask; read it, never write to it."""
    return export(small_spec(), tmp_path_factory.mktemp("small") / "bundle")


@pytest.fixture(scope="session")
def cross_bundle(tmp_path_factory) -> Bundle:
    """Cross attention whose key and value have widths of their own; read it, never write to it."""
    spec = small_spec(kind="cross", kdim=20, vdim=24, dims=())
    return export(spec, tmp_path_factory.mktemp("cross") / "bundle")


@pytest.fixture(scope="session")
def demo_bundle(tmp_path_factory) -> Bundle:
    """The demo's: a real layer with real inputs."""
    return export("minilm-l6-v2", tmp_path_factory.mktemp("demo") / "minilm-l6-v2")


@pytest.fixture(scope="session")
def bench_report(small_bundle) -> BenchReport:
    """Two sizes of the small bundle on one thread; measuring takes seconds too."""
    grid = {"batch": [1, 2], "seq": [8]}
    return bench(small_bundle, grid=grid, seconds=0.05, placement=Placement(threads=1))


@pytest.fixture(autouse=True)
def handlers_of_signals_are_left_as_they_were():
    """What a test or the code under it leaves behind would reach the tests after it."""
    watched = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in watched]
    yield
    after = [signal.getsignal(number) for number in watched]
    for number, handler in zip(watched, before, strict=True):
        signal.signal(number, handler)
    assert after == before


@pytest.fixture
def cli():
    """Run the command line in this process; the result has exit_code, stdout and stderr."""

    def run(*arguments: object):
        # Wide enough that no table folds a word that a test looks for.
        return CliRunner(env={"COLUMNS": "220"}).invoke(main, [str(argument) for argument in arguments])

    return run


@pytest.fixture
def random():
    return np.random.default_rng(0)


@pytest.fixture
def opened(tmp_path):
    """Open a session over a fake plan; it comes with its memory and is closed when the test ends."""
    path = tmp_path / "model.plan"
    path.write_bytes(b"a plan")
    sessions = []

    def open_(plan, signature=None, *, rtx=False, **options):
        memory, backend = HostMemory(), plan.backend(rtx=rtx)
        options |= {"backend": backend, "memory": lambda: memory}
        session = TensorRtSession(path, signature or plan.signature, **options)
        sessions.append(session)
        return session, memory

    yield open_
    for session in sessions:
        session.close()
