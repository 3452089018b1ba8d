"""build-engine on a bundle: precision, verdict, passport, cache."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from conftest import small_spec

from mha_deploy.bundle import Bundle
from mha_deploy.cases import standard_cases
from mha_deploy.cli import main
from mha_deploy.engine_job import Job, run_job
from mha_deploy.engines import build_engine
from mha_deploy.errors import BundleError, CheckError, MissingError
from mha_deploy.file_record import sha256_of
from mha_deploy.pipeline import export
from mha_deploy.precision import Precision
from mha_deploy.tensorrt.options import BuildOptions
from mha_deploy.tensorrt.profiles import profiles_for
from mha_deploy.typed import TypedAttention, Variant
from mha_deploy.variants import typed_artifact
from mha_deploy.verification import verify

pytest.importorskip("tensorrt_rtx")

FP16 = Variant(Precision.FP16)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """Heads of 32, which have a fused kernel."""
    spec = small_spec(d_model=64, num_heads=2)
    return export(spec, tmp_path_factory.mktemp("engines") / "bundle")


@pytest.fixture(scope="module")
def engine(bundle):
    return build_engine(bundle, FP16)


@pytest.fixture
def copy(bundle, engine, tmp_path):
    """A bundle with its engine, to damage."""
    return Bundle.load(shutil.copytree(bundle.folder, tmp_path / "copy"))


@pytest.fixture(scope="module")
def demo(demo_bundle, tmp_path_factory):
    """The demo's bundle, and what the first build of its fp16 engine printed."""
    folder = shutil.copytree(demo_bundle.folder, tmp_path_factory.mktemp("demo-engine") / "minilm-l6-v2")
    result = CliRunner().invoke(main, ["build-engine", str(folder), "--fp16", "--json"])
    assert result.exit_code == 0, result.stderr
    return folder, json.loads(result.stdout)


def test_the_demo_is_built_fused_and_the_second_call_is_a_cache_hit(demo, cli):
    folder, report = demo
    assert report["cached"] is False
    assert report["precision"] == "fp16"
    assert [set(each) for each in report["attentions"]] == [{"name", "fused", "kernel", "reason"}]
    assert all(each["fused"] for each in report["attentions"])
    second = json.loads(cli("build-engine", folder, "--fp16", "--json").stdout)
    assert second["cached"] is True
    assert second["plan_sha256"] == report["plan_sha256"]


def test_the_typed_fp16_graph_of_the_demo_passes_against_the_fp16_yardstick(demo):
    """A choice of the cases: the largest sizes take PyTorch half a minute in fp16 on a CPU."""
    bundle = Bundle.load(demo[0])
    chosen = ("min", "ragged-padding", "large-values", "sharp-softmax", "real-inputs")
    cases = [c for c in standard_cases(bundle.spec, bundle.real_inputs()) if c.name in chosen]
    report = verify(bundle, ["fp16"], cases=cases)
    outcomes = {case.name: case.outcome for case in report.cases}
    assert report.passed
    assert outcomes.pop("large-values") == "out of range"
    assert set(outcomes.values()) == {"passed"}
    assert "real-inputs" in outcomes


def test_the_passport_says_what_the_engine_was_made_from(bundle, engine):
    passport = json.loads((engine.path.with_suffix(".passport.json")).read_text())
    manifest = Bundle.load(bundle.folder).manifest
    typed = next(artifact for artifact in manifest.artifacts if artifact.name == "fp16")
    assert passport["onnx_sha256"] == typed.files[0].sha256
    assert passport["weights_sha256"] == manifest.weights.sha256
    assert passport["profiles"] == [{"batch": [1, 2, 6], "seq": [1, 8, 64]}]
    assert passport["inputs"] == ["x [batch, seq, 64] float32", "mask [batch, seq] bool"]
    assert passport["command"] == "mha-deploy build-engine BUNDLE --fp16"
    assert any(name.startswith("Attention") for name in passport["kept_fp32"])
    assert "against PyTorch" in passport["checked"]
    assert passport == manifest.artifacts[-1].details["passport"]


def test_an_engine_is_about_half_the_size_of_the_fp32_one(bundle, engine):
    full = build_engine(bundle, Variant(Precision.FP32))
    assert full.passport.precision == "fp32"
    assert full.passport.decomposed
    assert "fp32 attention has no fused kernel" in full.passport.attentions[0]["reason"]


@pytest.mark.parametrize("io", ["fp32", "same"])
def test_bf16_is_built_and_its_check_is_labelled_as_through_a_twin(bundle, io):
    engine = build_engine(bundle, Variant(Precision.BF16, io))
    assert engine.passport.precision == "bf16"
    assert "through its fp32 twin" in engine.passport.checked
    assert engine.passport.inputs[0].endswith("float32" if io == "fp32" else "bfloat16")
    assert all(each["fused"] for each in engine.passport.attentions)


def test_io_same_keeps_no_fp32_at_the_graphs_ends(bundle):
    engine = build_engine(bundle, Variant(Precision.FP16, "same"))
    assert engine.passport.inputs[0] == "x [batch, seq, 64] float16"
    assert not [name for name in engine.passport.kept_fp32 if name.startswith("graph value")]


def test_other_options_build_another_engine_in_place_of_the_old_one(copy):
    before = set((copy.folder / "engines").glob("*.plan"))
    again = build_engine(copy, FP16, BuildOptions(targets=("sm89",)), ["seq=1:16:32"])
    assert not again.cached
    assert again.passport.targets == ("sm89",)
    assert again.passport.command.endswith("--profile seq=1:16:32 --target-sm sm89")
    assert again.path not in before
    assert Bundle.load(copy.folder).artifact("fp16-tensorrt-rtx").path(copy.folder) == again.path
    assert build_engine(copy, FP16).cached  # the first one is still there, as cache
    Bundle.load(copy.folder).artifact("fp16-tensorrt-rtx").path(copy.folder)


@pytest.mark.parametrize("name", ["canonical", "fp16", "bf16-twin", "portable"])
def test_the_name_of_an_onnx_form_is_not_an_engines(copy, cli, name):
    before = {artifact.name for artifact in Bundle.load(copy.folder).artifacts}
    result = cli("build-engine", copy.folder, "--fp16", "--name", name)
    assert result.exit_code == 2
    assert "is the name of an ONNX form" in result.stderr
    assert {artifact.name for artifact in Bundle.load(copy.folder).artifacts} == before


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "a/b", ".hidden", "a b"])
def test_a_name_that_is_no_plain_name_is_refused(copy, cli, name):
    result = cli("build-engine", copy.folder, "--fp16", "--name", name)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "expected letters, digits" in result.stderr


@pytest.mark.parametrize(
    "damage",
    [
        {"attentions": [1]},
        {"lowering": [{}]},
        {"activation_bytes": "x"},
        {"key": 1},
        {"warnings": [None]},
        {"profiles": [{"batch": [1, 2]}]},
    ],
)
def test_a_damaged_passport_is_one_line(copy, cli, damage):
    manifest = json.loads((copy.folder / "manifest.json").read_text())
    artifact = next(each for each in manifest["artifacts"] if each["name"] == "fp16-tensorrt-rtx")
    artifact["details"]["passport"] |= damage
    (copy.folder / "manifest.json").write_text(json.dumps(manifest))
    result = cli("inspect", copy.folder)
    assert result.exit_code == 2
    assert f"passport is damaged: {next(iter(damage))}" in result.stderr


def test_value_heads_of_another_size_still_fuse(tmp_path):
    bundle = export(small_spec(d_model=64, num_heads=2, value_dim=16), tmp_path / "bundle")
    engine = build_engine(bundle, FP16)
    assert [each["fused"] for each in engine.passport.attentions] == [True]


@pytest.mark.parametrize("precision", [Precision.FP16, Precision.BF16])
def test_a_typed_graph_that_is_a_little_wrong_does_not_join_the_bundle(
    small_bundle, precision, tmp_path, monkeypatch
):
    """3 % off: less than bf16 scatters at its worst element, more than it does on the whole."""
    bundle = Bundle.load(shutil.copytree(small_bundle.folder, tmp_path / "bundle"))
    right = TypedAttention.forward
    monkeypatch.setattr(TypedAttention, "forward", lambda self, *inputs: right(self, *inputs) * 1.03)
    with pytest.raises(CheckError, match="does not compute what PyTorch computes"):
        typed_artifact(bundle, Variant(precision))
    assert [artifact.name for artifact in Bundle.load(bundle.folder).artifacts] == ["canonical"]


def test_an_engine_and_its_graph_are_in_the_bundle_that_they_were_built_from(bundle, engine):
    assert bundle.artifact(engine.name).path(bundle.folder) == engine.path
    feeds = {"x": np.ones((1, 3, 64), np.float32), "mask": np.ones((1, 3), bool)}
    with bundle.open_session("fp16") as session:
        assert session.run(feeds)["y"].shape == (1, 3, 64)


@pytest.mark.parametrize(
    ("module", "function", "name"),
    [
        ("mha_deploy.engine_job", "build_isolated", "new"),
        ("mha_deploy.engines", "run_job", "new"),
        ("mha_deploy.engines", "run_job", ""),  # the one that is there already
    ],
)
def test_an_engine_of_a_bundle_that_is_exported_again_meanwhile_is_not_recorded(
    copy, module, function, name, monkeypatch
):
    right = getattr(sys.modules[module], function)
    spec = replace(copy.spec, weights=replace(copy.spec.weights, seed=7))

    def followed_by_an_export(*given, **named):
        made = right(*given, **named)
        export(spec, copy.folder)
        return made

    monkeypatch.setattr(f"{module}.{function}", followed_by_an_export)
    with pytest.raises(BundleError, match=r"was exported again meanwhile, .*; run it again$"):
        build_engine(copy, FP16, name=name)
    left = sorted(path.name for path in copy.folder.iterdir())
    assert left == ["manifest.json", "model.onnx", "weights.safetensors"]
    assert [artifact.name for artifact in Bundle.load(copy.folder).artifacts] == ["canonical"]


def test_changed_weights_never_meet_an_old_engine(copy):
    spec = replace(copy.spec, weights=replace(copy.spec.weights, seed=7))
    other = export(spec, copy.folder)
    assert [artifact.name for artifact in other.artifacts] == ["canonical"]
    assert not build_engine(other, FP16).cached


def test_a_damaged_plan_is_no_cache_hit(copy):
    (plan,) = (copy.folder / "engines").glob("fp16-t*.plan")
    plan.write_bytes(plan.read_bytes()[:-1])
    assert not build_engine(copy, FP16).cached
    assert build_engine(copy, FP16).cached


def test_an_engine_in_another_precision_than_asked_for_is_an_error(bundle, tmp_path):
    source = bundle.artifact().path(bundle.folder)
    job = Job(source, tmp_path, "fp16", str, "", "fp16", "", "mha-deploy build-engine BUNDLE --fp16")
    with pytest.raises(CheckError, match="fp16 was asked for, but the engine computes in fp32"):
        run_job(job, BuildOptions(profiles=profiles_for(bundle.signature)))
    assert not list(tmp_path.glob("*.plan"))


FIELDS = ("backend", "version", "onnx_sha256", "weights_sha256", "plan_sha256", "precision", "targets", "key")


@pytest.mark.parametrize("field", [*FIELDS, "profiles", "inputs"])
def test_a_tampered_passport_is_refused_by_the_name_of_the_field(copy, field):
    (path,) = (copy.folder / "engines").glob("fp16-t*.passport.json")
    data = json.loads(path.read_text())
    others = {"profiles": [{"batch": [1, 2, 3]}], "targets": ["sm75"], "inputs": ["x"]}
    data[field] = others.get(field, "tampered")
    path.write_text(json.dumps(data))
    with pytest.raises(
        BundleError, match=rf"passport says {field} = .*build it again: mha-deploy build-engine"
    ):
        copy.open_session("fp16-tensorrt-rtx")


def test_an_engine_of_another_version_is_refused_with_the_command_that_rebuilds(copy):
    manifest = json.loads((copy.folder / "manifest.json").read_text())
    (path,) = (copy.folder / "engines").glob("fp16-t*.passport.json")
    artifact = next(each for each in manifest["artifacts"] if each["name"] == "fp16-tensorrt-rtx")
    artifact["details"]["passport"]["version"] = "9.9"
    path.write_text(json.dumps(artifact["details"]["passport"]))
    record = next(each for each in artifact["files"] if each["file"].endswith(path.name))
    record |= {"sha256": sha256_of(path), "bytes": path.stat().st_size}
    (copy.folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=r"version = \"9\.9\", this machine has .*build-engine '.*' --fp16"):
        Bundle.load(copy.folder).open_session("fp16-tensorrt-rtx")


def test_a_plan_that_is_not_the_recorded_one_is_not_loaded(copy):
    (plan,) = (copy.folder / "engines").glob("fp16-t*.plan")
    plan.write_bytes(plan.read_bytes()[:-1] + b"x")
    with pytest.raises(BundleError, match="is not the file that the manifest records"):
        copy.open_session("fp16-tensorrt-rtx")


def test_a_plan_without_a_passport_is_not_loaded(copy):
    next((copy.folder / "engines").glob("fp16-t*.passport.json")).unlink()
    with pytest.raises(BundleError, match="has no passport"):
        copy.open_session("fp16-tensorrt-rtx")


def test_running_an_engine_without_a_gpu_says_what_is_missing_and_ends_with_3(cli, bundle, engine, tmp_path):
    from mha_deploy.tensorrt.backend import has_cuda_driver

    if has_cuda_driver():
        pytest.skip("this machine has a GPU")
    np.savez(tmp_path / "in.npz", x=np.zeros((3, 64), np.float32), lengths=np.array([3]))
    name = ("--artifact", "fp16-tensorrt-rtx")
    for command in (
        ("infer", bundle.folder, tmp_path / "in.npz", "-o", tmp_path / "o.npz"),
        ("bench", bundle.folder),
    ):
        result = cli(*command, *name)
        assert result.exit_code == 3
        assert "NVIDIA" in result.stderr
        assert result.stderr.count("\n") == 1


def test_verify_lists_what_this_machine_cannot_run_and_judges_the_rest(cli, bundle, engine):
    build_engine(bundle, Variant(Precision.BF16))
    report = json.loads(cli("verify", bundle.folder, "--json").stdout)
    assert report["passed"] is True
    assert {"canonical", "fp16", "bf16-twin"} <= set(report["providers"])
    assert "bf16" in report["not_run"]
    assert "twin 'bf16-twin' stands for it there" in report["not_run"]["bf16"]


def test_an_artifact_that_cannot_run_and_was_named_is_an_error(bundle, engine):
    build_engine(bundle, Variant(Precision.BF16))
    with pytest.raises(MissingError, match="which ONNX Runtime does not compute on a CPU"):
        verify(Bundle.load(bundle.folder), ["bf16"])


def test_inspect_shows_the_passport_and_the_plans_header(cli, bundle, engine):
    text = cli("inspect", bundle.folder).stdout
    for word in ("engine fp16-tensorrt-rtx", "_gemm_mha_v2", "TensorRT for RTX 1", "sm89", "kept in fp32"):
        assert word in text


def test_fused_only_fails_with_1_where_no_kernel_exists(cli, bundle):
    result = cli("build-engine", bundle.folder, "--fp32", "--attention", "fused", "--name", "x")
    assert result.exit_code == 1
    assert "precision: fp32 attention has no fused kernel" in result.stderr
    assert not list((bundle.folder / "engines").glob("x-*"))


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--fp16", "--profile", "seq=1:8:65"], 2, "seq 1..64"),
        (["--fp16", "--profile", "seq=8:4:16"], 2, "expected 1 <= min <= opt <= max"),
        (["--fp16", "--profile", "length=1:2:3"], 2, "no axis 'length'; dynamic axes here: batch, seq"),
        (["--fp16", "--target-sm", "sm90"], 2, "sm90 (Hopper); build for it with full TensorRT"),
        (["--fp16", "--target-sm", "sm12"], 2, "has no sm12"),
        (["--bf16", "--target-sm", "sm75"], 2, "sm75"),
        (["--fp16", "--timing-cache", "t"], 2, "has no timing cache"),
        (["--fp16", "--hardware-compatible"], 2, "has no hardware compatibility levels"),
        (["--fp16", "--backend", "tensorrt"], 3, "no usable NVIDIA driver"),
        (["--fp16", "--refit", "--name", "refit"], 3, "has no CUDA driver"),
        (["--fp16", "--workspace", "1", "--name", "small"], 2, "--workspace more bytes"),
        ([], 2, "name the engine's precision: --fp16, --bf16 or --fp32"),
        (["--fp16", "-o", "x"], 2, "leave -o out"),
    ],
)
def test_a_wrong_option_is_refused_in_one_line_and_leaves_no_plan(
    cli, bundle, engine, options, code, message
):
    before = sorted((bundle.folder / "engines").glob("*.plan"))
    result = cli("build-engine", bundle.folder, *options)
    assert (result.exit_code, result.stdout) == (code, "")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert sorted((bundle.folder / "engines").glob("*.plan")) == before


def test_a_failed_build_names_the_file_with_the_full_log(cli, bundle, engine):
    result = cli("build-engine", bundle.folder, "--fp16", "--workspace", "1", "--name", "small")
    assert "(full log: " in result.stderr
    log = bundle.folder / "engines" / "logs" / "small.log"
    assert str(log) in result.stderr
    assert "within workspace limit" in log.read_text() or "insufficient workspace" in log.read_text()


@pytest.mark.parametrize(("stop", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_build_that_is_stopped_leaves_the_bundle_as_it_was(stop, code, small_bundle, tmp_path):
    folder = shutil.copytree(small_bundle.folder, tmp_path / "bundle")
    command = [sys.executable, "-m", "mha_deploy", "build-engine", str(folder), "--fp16"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    deadline = time.monotonic() + 120
    while not list(folder.glob("variants/.fp16.partial-*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(stop)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == code
    assert "Traceback" not in stderr
    assert [artifact.name for artifact in Bundle.load(folder).artifacts] == ["canonical"]
    assert not list(folder.glob("engines/*.plan"))
