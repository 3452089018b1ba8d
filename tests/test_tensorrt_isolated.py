"""Builds in a process of their own: the same answers, and no crash, noise or orphan reaches this one."""

import os
import pickle
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from graphs import PROFILE, Mha, mha_model, save
from onnx import TensorProto, helper
from tensorrt_builds import SM89, build, options, sha256, written

from mha_deploy.errors import InputError
from mha_deploy.tensorrt.build import build_plan
from mha_deploy.tensorrt.isolated import build_isolated
from mha_deploy.tensorrt.lint import Finding, LintError
from mha_deploy.tensorrt.log import recording
from mha_deploy.tensorrt.messages import BuildError, CompilerCrash, NoAttentionKernel
from mha_deploy.tensorrt.options import BuildOptions

FORM = Mha(mask="bool")
HERE = Path(__file__).parent


class Events:
    """Keeps what it is told; `on_start` runs at the first phase."""

    def __init__(self, on_start=lambda: None):
        self.told, self.on_start = [], on_start

    def phase_start(self, phase, parent, steps):
        if not self.told:
            self.on_start()
        self.told.append(("start", phase, parent, steps))

    def step(self, phase, done):
        self.told.append(("step", phase, done))

    def phase_end(self, phase):
        self.told.append(("end", phase))


def children():
    """Processes of this one, zombies too."""
    own, found = str(os.getpid()), []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if parent == own:
            found.append((int(stat.parent.name), state))
    return found


@pytest.fixture(autouse=True)
def _no_child_is_left():
    before = children()
    yield
    assert children() == before


def isolated(form=FORM, watcher=None, **fields):
    path = written(form)
    chosen = options(path, form.profile, targets=SM89, **fields)
    return build_isolated(path, chosen, progress=watcher or Events())


def signalled(number):
    """A watcher that sends a signal to the process that builds."""

    def send():
        (pid, _state), *_ = children()
        os.kill(pid, number)

    return Events(send)


def raising(error):
    def fail():
        raise error

    return Events(fail)


@pytest.fixture
def shared_operand(tmp_path):
    """One tensor as query, key and value: valid, and the end of TensorRT for RTX 1.7."""
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT16, [1, 4, 8, 64]) for n in "xy")
    node = helper.make_node("Attention", ["x", "x", "x"], ["y"], name="attention")
    graph = helper.make_graph([node], "shared", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    onnx.checker.check_model(model)
    return save(model, tmp_path / "shared.onnx")


def without_figures(log):
    """Times differ from build to build; the library's threads may change the order."""
    return sorted(re.sub(r"\d+", "#", line) for line in log)


@pytest.fixture(scope="module")
def watched():
    """One build there: its plan, what its watcher was told, and what was recorded."""
    watcher = Events()
    with recording() as log:
        built = isolated(watcher=watcher)
    return built, watcher.told, log


def test_plan_and_report_are_those_of_a_build_in_this_process(watched):
    here, there = build(FORM), watched[0]
    assert sha256(there) == sha256(here)
    assert there.backend is here.backend
    assert without_figures(there.log) == without_figures(here.log)
    assert replace(there, log=(), seconds=0.0) == replace(here, log=(), seconds=0.0)


def test_progress_arrives_whole_and_in_order(watched):
    here, there = Events(), watched[1]
    path = written(FORM)
    build_plan(path, options(path, FORM.profile, targets=SM89), progress=here)
    assert there[0][:3] == ("start", "Building engine", "")
    assert there == here.told


def test_the_log_reaches_whoever_records(watched):
    built, _, log = watched
    assert tuple(map(str, log.lines)) == built.log
    assert any(line.startswith("[INFO] Total Activation Memory") for line in built.log)


def same_error(path, chosen):
    """The error of a build there, held against that of a build here."""
    with pytest.raises(Exception) as here:  # noqa: PT011 - held against the other below
        build_plan(path, chosen)
    with pytest.raises(Exception) as there:  # noqa: PT011
        build_isolated(path, chosen)
    assert type(there.value) is type(here.value)
    assert str(there.value) == str(here.value)
    assert there.value.exit_code == here.value.exit_code
    return there.value


def test_a_refused_option_comes_back_as_it_is():
    path = written(FORM)
    error = same_error(path, options(path, FORM.profile, hardware_compatible=True))
    assert type(error) is InputError


def test_findings_of_the_lint_come_back_one_by_one(tmp_path):
    model = mha_model(FORM)
    for node in model.graph.node:
        if node.op_type == "Attention":
            node.attribute.append(helper.make_attribute("softcap", 3.0))
    path = save(model, tmp_path / "softcap.onnx")
    error = same_error(path, options(path, PROFILE, targets=SM89))
    assert type(error) is LintError
    assert [finding.rule for finding in error.findings] == ["softcap"]


def test_a_missing_fused_kernel_comes_back_with_its_exit_code():
    form = Mha(heads=32, head_dim=8)
    path = written(form)
    error = same_error(path, options(path, form.profile, targets=SM89, attention="fused"))
    assert (type(error), error.exit_code) == (NoAttentionKernel, 1)


def test_a_crash_that_tensorrt_reports_itself_comes_back_with_its_cries_in_the_log(capfd):
    with recording() as log, pytest.raises(CompilerCrash, match="failed on this graph"):
        isolated(Mha(heads=2, head_dim=100, mask="bool"))
    assert "[INFO] stderr: Internal Error: MyelinCheckException" in str(log)
    assert capfd.readouterr() == ("", "")


def test_a_segfault_is_an_error_with_the_whole_log_and_a_quiet_screen(shared_operand, capfd):
    chosen = BuildOptions(backend="tensorrt-rtx", targets=SM89)
    with recording() as log, pytest.raises(CompilerCrash, match=r"\(signal 11, SIGSEGV\) on this graph"):
        build_isolated(shared_operand, chosen)
    assert "Input filename" in str(log)
    assert "[INFO] stderr: Fatal Python error: Segmentation fault" in str(log)
    assert capfd.readouterr() == ("", "")


def test_a_child_that_is_killed_is_an_error_that_names_the_signal():
    with pytest.raises(CompilerCrash, match=r"signal 9, SIGKILL.*out of memory"):
        isolated(watcher=signalled(signal.SIGKILL))


def test_an_error_that_is_none_of_ours_comes_back_as_text():
    path = written(FORM)
    wrong = options(path, FORM.profile, targets=89)  # no tuple of names
    with pytest.raises(TypeError) as here:
        build_plan(path, wrong)
    text = re.escape(f"the build failed: TypeError: {here.value}.")
    with recording() as log, pytest.raises(BuildError, match=text):
        build_isolated(path, wrong)
    assert "stderr: Traceback" in str(log)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143), RuntimeError("disk")], ids=repr)
def test_an_exception_of_the_progress_ends_the_child_and_comes_out(error):
    with recording() as log, pytest.raises(type(error)) as raised:
        isolated(watcher=raising(error))
    assert raised.value is error
    assert "BuildCanceled" in str(log)


def test_a_child_that_does_not_heed_is_killed(monkeypatch):
    monkeypatch.setattr("mha_deploy.tensorrt.isolated._GRACE_SECONDS", 0.2)

    def stop_and_fail():
        signalled(signal.SIGSTOP).on_start()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        isolated(watcher=Events(stop_and_fail))


def test_ctrl_c_in_the_child_alone_is_a_keyboard_interrupt():
    with pytest.raises(KeyboardInterrupt):
        isolated(watcher=signalled(signal.SIGINT))


def test_a_signal_to_this_process_alone_ends_the_build():
    with pytest.raises(KeyboardInterrupt):
        isolated(watcher=Events(lambda: signal.raise_signal(signal.SIGINT)))


def test_the_child_ends_when_this_process_is_killed():
    """A child without a parent would compile on for nobody."""
    code = (
        "import os, signal, sys; sys.path.insert(0, sys.argv[1]);"
        "import test_tensorrt_isolated as t;"
        "die = lambda: (print(t.children()[0][0], flush=True), os.kill(os.getpid(), signal.SIGKILL));"
        "t.isolated(watcher=t.Events(die))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(HERE)], capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL
    stat = Path(f"/proc/{int(done.stdout)}/stat")
    for _ in range(50):
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.1)
    pytest.fail("the child still runs")


def test_the_child_needs_no_torch():
    code = "import sys, mha_deploy.tensorrt.worker, mha_deploy.tensorrt.build; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_lint_error_survives_pickling_with_findings_and_a_changed_text():
    error = LintError((Finding("node", "rule", "what", "why"),))
    error.args = (f"{error} (full log: x)",)
    again = pickle.loads(pickle.dumps(error))
    assert (again.findings, str(again)) == (error.findings, str(error))
