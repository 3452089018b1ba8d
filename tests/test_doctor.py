"""`doctor` on machines that lack things, and on one with a broken install."""

import sys

import pytest

from mha_deploy import machine
from mha_deploy.doctor import examine


def installed(monkeypatch, **versions):
    found = {name.replace("_", "-"): version for name, version in versions.items()}
    monkeypatch.setattr(machine, "version", lambda name: found.get(name, ""))


def finding(what):
    (found,) = [finding for finding in examine() if finding.what == what]
    return found


def broken_module(monkeypatch, folder, name, code):
    """Let `import name` run `code`, and whatever is loaded under that name come back afterwards."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(code)
    for loaded in [name, *(module for module in sys.modules if module.startswith(f"{name}."))]:
        monkeypatch.setitem(sys.modules, loaded, None)
        del sys.modules[loaded]
    monkeypatch.syspath_prepend(folder)


def test_both_distributions_of_onnxruntime_are_a_problem_with_the_way_out(monkeypatch):
    installed(monkeypatch, onnxruntime="1.32.0", onnxruntime_gpu="1.31.0")
    found = finding("onnxruntime")
    assert found.state == "problem"
    assert "onnxruntime 1.32.0 and onnxruntime-gpu 1.31.0 are both installed" in found.detail
    assert (
        "uninstall both, then install one: pip install 'mha-deploy[cpu]' or 'mha-deploy[gpu]'" in found.detail
    )


@pytest.mark.parametrize("name", ["onnxruntime", "onnxruntime-gpu"])
def test_one_distribution_of_onnxruntime_is_right_and_named(monkeypatch, name):
    installed(monkeypatch, **{name: "1.32.0"})
    assert (finding("onnxruntime").state, finding("onnxruntime").detail) == ("ok", f"{name} 1.32.0")


def test_what_is_missing_is_said_with_what_would_bring_it(monkeypatch):
    installed(monkeypatch)
    assert finding("onnxruntime").state == "missing"
    assert "pip install 'mha-deploy[cpu]'" in finding("onnxruntime").detail
    assert "pip install 'mha-deploy[gpu]'" in finding("tensorrt").detail
    assert "pip install 'mha-deploy[rtx]'" in finding("tensorrt-rtx").detail
    assert {f.state for f in examine() if f.what in ("torch", "onnx", "onnxscript")} == {"missing"}


def test_what_is_installed_is_shown_with_its_version(monkeypatch):
    installed(monkeypatch, torch="2.13.0", tensorrt_rtx="1.7.1")
    assert (finding("torch").state, finding("torch").detail) == ("ok", "2.13.0")
    assert (finding("tensorrt-rtx").state, finding("tensorrt-rtx").detail) == ("ok", "1.7.1")


def test_cpu_features_say_which_are_there_and_which_are_not(monkeypatch):
    monkeypatch.setattr(machine, "cpu_features", lambda: ("avx2", "avx512f"))
    found = finding("cpu features")
    assert (found.state, found.detail[:13]) == ("ok", "avx2, avx512f")
    assert "(not: avx512_vnni, avx_vnni, avx512_bf16, amx_bf16, amx_int8)" in found.detail
    monkeypatch.setattr(machine, "cpu_features", lambda: ())
    assert finding("cpu features").detail.startswith("none of those that matter here")


def test_every_finding_is_one_of_three_states_and_goes_into_json():
    findings = examine()
    assert {f.state for f in findings} <= {"ok", "missing", "problem"}
    assert all(f.to_json() == {"what": f.what, "state": f.state, "detail": f.detail} for f in findings)
    assert len({f.what for f in findings}) == len(findings)


def test_providers_are_those_of_the_installed_runtime():
    onnxruntime = pytest.importorskip("onnxruntime")
    assert ", ".join(onnxruntime.get_available_providers()) in finding("execution providers").detail


@pytest.mark.parametrize(
    "code",
    ["raise ImportError('libonnxruntime.so: cannot open shared object file')", ""],
    ids=["it does not load", "its files were overwritten and then removed"],
)
def test_an_onnxruntime_that_does_not_import_is_a_problem_and_no_traceback(monkeypatch, tmp_path, code):
    installed(monkeypatch, onnxruntime="1.32.0")
    broken_module(monkeypatch, tmp_path, "onnxruntime", code)
    assert finding("execution providers").state == "problem"


@pytest.mark.parametrize("error", ["ImportError", "OSError"])
def test_a_torch_that_does_not_import_is_a_problem_and_no_traceback(monkeypatch, tmp_path, error):
    installed(monkeypatch, torch="2.13.0")
    broken_module(
        monkeypatch, tmp_path, "torch", f"raise {error}('libcudart.so: cannot open shared object file')"
    )
    assert finding("NVIDIA GPU").state == "problem"


@pytest.mark.parametrize(
    ("governor", "shown"),
    [
        ("performance", "frequency: 3000 MHz, governor performance; stolen"),
        (
            "powersave",
            "frequency: 3000 MHz, governor powersave (changes with the load; performance would not)",
        ),
        ("", "frequency: not readable; stolen"),
    ],
)
def test_what_timings_stand_on_is_shown_where_it_can_be_read(monkeypatch, governor, shown):
    monkeypatch.setattr(machine, "governor", lambda: governor)
    monkeypatch.setattr(machine, "frequency_mhz", lambda: 3000.0)
    monkeypatch.setattr(machine, "cpu_times", lambda: machine.CpuTimes(10, 2, 100))
    assert shown in finding("timing").detail
    assert finding("timing").detail.endswith("stolen by other machines: 2.0% since boot")
    monkeypatch.setattr(machine, "cpu_times", lambda: machine.CpuTimes(*[float("nan")] * 3))
    assert finding("timing").detail.endswith("stolen by other machines: not readable")
