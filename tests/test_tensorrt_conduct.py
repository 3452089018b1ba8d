"""How a build behaves: progress, Ctrl-C, a quiet screen, threads, another process."""

import hashlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from graphs import Mha
from tensorrt_builds import SM89, build, build_anew, options, sha256, written

from mha_deploy.tensorrt.build import build_plan
from mha_deploy.tensorrt.log import Log, recording, stderr_into
from mha_deploy.tensorrt.messages import CompilerCrash

CRASH = Mha(heads=2, head_dim=100, mask="bool")


class Watcher:
    """Keeps what it is told; `on_start` runs at the first phase."""

    def __init__(self, on_start=lambda: None):
        self.open, self.phases, self.steps, self.on_start = [], {}, [], on_start

    def phase_start(self, phase, parent, steps):
        if not self.phases:
            self.on_start()
        self.open.append(phase)
        self.phases[phase] = (parent, steps)

    def step(self, phase, done):
        self.steps.append((phase, done))

    def phase_end(self, phase):
        self.open.remove(phase)


def watched(watcher, form=Mha()):  # noqa: B008 - frozen
    path = written(form)
    return build_plan(path, options(path, form.profile, targets=SM89), progress=watcher)


def test_progress_opens_closes_and_counts_every_phase():
    watcher = Watcher()
    watched(watcher)
    assert (watcher.phases["Building engine"][0], watcher.open) == ("", [])
    assert ("Building engine", 1) in watcher.steps
    assert all(1 <= done <= watcher.phases[phase][1] for phase, done in watcher.steps)
    assert all(parent in watcher.phases for parent, _ in watcher.phases.values() if parent)


def test_watching_does_not_change_the_plan():
    assert sha256(watched(Watcher())) == sha256(build(Mha()))


def test_ctrl_c_cancels_the_build_and_comes_out_as_it_always_does():
    before = signal.getsignal(signal.SIGINT)
    watcher = Watcher(on_start=lambda: signal.raise_signal(signal.SIGINT))
    with recording() as log, pytest.raises(KeyboardInterrupt):
        watched(watcher)
    assert any("BuildCanceled" in line.text for line in log.lines)
    assert signal.getsignal(signal.SIGINT) is before


def test_after_ctrl_c_the_same_build_still_works():
    with pytest.raises(KeyboardInterrupt):
        watched(Watcher(on_start=lambda: signal.raise_signal(signal.SIGINT)))
    assert sha256(build_anew(Mha())) == sha256(build(Mha()))


def test_a_progress_that_raises_cancels_the_build_with_its_own_error():
    class FullError(Exception):
        pass

    def fail():
        raise FullError("disk")

    with recording() as log, pytest.raises(FullError, match="disk"):
        watched(Watcher(on_start=fail))
    assert any("BuildCanceled" in line.text for line in log.lines)


def test_a_failed_build_leaves_its_log_with_whoever_recorded():
    with recording() as log, pytest.raises(CompilerCrash):
        build(CRASH)
    assert "[ERROR] IBuilder::buildSerializedNetwork" in str(log)
    assert "[INFO] stderr: Internal Error: MyelinCheckException" in str(log)


def test_a_built_plan_brings_its_log():
    built = build(Mha())
    assert any(line.startswith("[INFO] Total Activation Memory") for line in built.log)


def test_a_build_that_succeeds_prints_nothing(capfd):
    build_anew(Mha())
    assert capfd.readouterr() == ("", "")


def test_the_librarys_own_cries_stay_off_the_screen(capfd):
    with pytest.raises(CompilerCrash):
        build(CRASH)
    assert capfd.readouterr() == ("", "")


def test_what_is_written_to_descriptor_2_goes_into_the_log_and_then_to_the_screen_again(capfd):
    log = Log()
    with stderr_into(log):
        os.write(2, b"inside\n")
    os.write(2, b"outside\n")
    assert [line.text for line in log.lines] == ["stderr: inside"]
    assert capfd.readouterr().err == "outside\n"


def test_an_inner_recording_hands_its_lines_to_the_outer_one():
    with recording() as outer:
        with recording() as inner:
            inner.add(3, "said inside")
        outer.add(3, "said after")
    assert [line.text for line in outer.lines] == ["said inside", "said after"]


def test_a_logger_that_other_code_registered_first_takes_nothing_away():
    code = (
        "import sys, tensorrt_rtx; first = tensorrt_rtx.Logger(); builder = tensorrt_rtx.Builder(first);"
        "sys.path.insert(0, sys.argv[1]); from tensorrt_builds import Mha, build;"
        "built = build(Mha()); print(built.warnings, built.activation_bytes > 0)"
    )
    tests = str(Path(__file__).parent)
    done = subprocess.run([sys.executable, "-c", code, tests], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "() True"


def test_builds_in_several_threads_keep_their_logs_and_plans_apart():
    forms = [Mha(), Mha(opset=20), Mha(mask="causal")]
    built = {}

    def work(form):
        built[form] = build_anew(form)

    threads = [threading.Thread(target=work, args=(form,)) for form in forms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for form in forms:
        assert sha256(built[form]) == sha256(build(form))
        named = [line for line in built[form].log if "Input filename" in line]
        assert [written(form).name in line for line in named] == [True]


SCRIPT = """
import hashlib, sys
from pathlib import Path
from mha_deploy.tensorrt.build import build_plan
from mha_deploy.tensorrt.graph import read_graph
from mha_deploy.tensorrt.messages import CompilerCrash
from mha_deploy.tensorrt.options import BuildOptions
from mha_deploy.tensorrt.profiles import profiles_for_graph

class Bar:
    def phase_start(self, phase, parent, steps):
        if not parent:
            print("bar:", phase, file=sys.stderr)
    def step(self, phase, done): pass
    def phase_end(self, phase): pass

def build(name, profile):
    path = Path(name)
    profiles = profiles_for_graph(read_graph(path).inputs, [profile])
    chosen = BuildOptions(profiles=profiles, backend="tensorrt-rtx", targets=("sm89",))
    return build_plan(path, chosen, progress=Bar())

print(hashlib.sha256(build(sys.argv[1], sys.argv[3]).plan).hexdigest())
try:
    build(sys.argv[2], sys.argv[3])
except CompilerCrash:
    print("crashed", file=sys.stderr)
"""


@pytest.fixture(scope="module")
def process():
    form = Mha(mask="bool")
    arguments = [sys.executable, "-c", SCRIPT, str(written(form)), str(written(CRASH)), form.profile]
    return subprocess.run(arguments, capture_output=True, text=True, check=True)


def test_another_process_builds_the_same_bytes(process):
    assert process.stdout.strip() == hashlib.sha256(build(Mha(mask="bool")).plan).hexdigest()


def test_a_progress_bar_reaches_the_screen_and_the_librarys_cries_do_not(process):
    assert process.stderr.splitlines() == ["bar: Building engine", "bar: Building engine", "crashed"]


def test_importing_the_package_loads_neither_tensorrt_nor_onnx():
    code = (
        "import sys, mha_deploy.tensorrt, mha_deploy.tensorrt.profiles, mha_deploy.tensorrt.targets,"
        " mha_deploy.tensorrt.options, mha_deploy.tensorrt.plan;"
        "print(sorted({'onnx', 'tensorrt', 'tensorrt_rtx', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
