"""What the commands print, in their good course."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from conftest import small_spec
from safetensors.numpy import load_file

from mha_deploy.bundle import Bundle
from mha_deploy.cli import main
from mha_deploy.machine import usable_cpus
from mha_deploy.pipeline import export
from mha_deploy.spec_file import load_spec, preset_names
from mha_deploy.verification import verify


def test_help_names_the_commands_in_the_order_of_the_pipeline():
    text = CliRunner().invoke(main, ["--help"]).output
    making, running, looking = (
        ("export", "optimize", "build-engine"),
        ("verify", "infer", "bench"),
        ("inspect", "doctor"),
    )
    places = [text.index(f"  {name} ") for name in (*making, *running, *looking)]
    assert places == sorted(places)


def test_version_is_the_packages():
    from importlib.metadata import version

    assert version("mha-deploy") in CliRunner().invoke(main, ["--version"]).output


def test_export_says_what_it_recognised_and_where_the_axes_were_proved(cli, tmp_path):
    result = cli("export", "minilm-l6-v2", "-o", tmp_path / "bundle")
    assert result.exit_code == 0
    assert "weights: BERT (self.query, output.dense)" in result.stdout
    assert "axes: batch 1..8..32, seq 1..128..512; proved at" in result.stdout


@pytest.mark.parametrize("preset", [name for name in preset_names() if name != "minilm-l6-v2"])
def test_every_preset_exports_and_is_proved_at_small_sizes(preset, tmp_path):
    spec = load_spec(preset)
    small = tuple(replace(dim, opt=min(dim.opt, 2), max=9) for dim in spec.dims)
    bundle = export(replace(spec, dims=small), tmp_path / "bundle")
    assert len(bundle.artifact().details["axes_proved_at"]) >= 9


def test_export_again_replaces_the_bundle_and_its_files_do_not_grow(tmp_path):
    sizes = []
    for _ in range(3):
        bundle = export(small_spec(d_model=64), tmp_path / "bundle", inline_limit=1000)
        sizes.append({r.file: (bundle.folder / r.file).stat().st_size for r in bundle.artifact().files})
        assert {p.name for p in bundle.folder.iterdir()} == {
            "manifest.json",
            "model.onnx",
            "model.onnx.data",
            "weights.safetensors",
        }
    assert sizes[0] == sizes[1] == sizes[2]
    assert not list(tmp_path.glob(".bundle*"))


def test_verify_prints_a_table_with_allowed_and_needed(cli, small_bundle):
    result = cli("verify", small_bundle.folder)
    assert result.exit_code == 0
    for word in (
        "padding-garbage",
        "allowed",
        "needed",
        "yardstick",
        "26 of 26 cases passed, 10 of 10",
    ):
        assert word in result.stdout


def test_infer_reports_requests_batches_and_padding(cli, demo_bundle, tmp_path):
    inputs = demo_bundle.folder / "inputs.safetensors"
    result = cli("infer", demo_bundle.folder, inputs, "-o", tmp_path / "y.npz", "--json")
    report = json.loads(result.stdout)
    assert (report["requests"], report["tokens"], report["shape"]) == (12, 591, [591, 384])
    assert len(report["batch_ms"]) == report["batches"] <= 12
    assert np.load(tmp_path / "y.npz")["y"].shape == (591, 384)


def test_inspect_shows_where_the_bundle_came_from(cli, demo_bundle):
    result = cli("inspect", demo_bundle.folder)
    for word in ("12 heads", "mask [batch, seq] bool", "BERT", "model.onnx", "encoder.layer.3.attention."):
        assert word in result.stdout
    manifest = json.loads(cli("inspect", demo_bundle.folder, "--json").stdout)
    assert manifest["provenance"]["checkpoint"]["layout"] == "BERT (self.query, output.dense)"


def test_a_bundle_names_no_folder_of_the_machine_that_made_it(demo_bundle):
    text = (demo_bundle.folder / "manifest.json").read_text()
    assert str(demo_bundle.folder.parent) not in text
    assert '"/' not in text


def test_doctor_lists_what_is_here_and_what_is_missing(cli):
    result = cli("doctor", "--json")
    findings = {finding["what"]: finding for finding in json.loads(result.stdout)}
    assert result.exit_code == 0
    assert findings["torch"]["state"] == "ok"
    assert {"cpu features", "execution providers", "NVIDIA GPU", "tensorrt"} <= set(findings)
    assert "this machine" in cli("doctor").stdout


def test_json_on_stdout_stands_alone(small_bundle):
    command = [sys.executable, "-m", "mha_deploy", "inspect", str(small_bundle.folder), "--json"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    json.loads(result.stdout)
    assert result.stderr == ""


def test_the_portable_form_joins_the_bundle_checked(cli, small_bundle, tmp_path):
    import onnx

    folder = shutil.copytree(small_bundle.folder, tmp_path / "bundle")
    result = cli("optimize", folder, "--portable")
    assert result.exit_code == 0, result.stderr
    assert "decompose at " in result.stdout
    assert "checked: 9 cases against PyTorch" in result.stdout
    bundle = Bundle.load(folder)
    model = onnx.load(bundle.artifact("portable").path(folder))
    assert [opset.version for opset in model.opset_import] == [20]
    assert "Attention" not in {node.op_type for node in model.graph.node}
    assert verify(bundle, ["portable"]).passed


def test_the_library_does_what_the_command_line_does(tmp_path, random):
    import mha_deploy

    bundle = mha_deploy.export(small_spec(), tmp_path / "bundle")
    assert isinstance(bundle, Bundle)
    assert mha_deploy.verify(mha_deploy.Bundle.load(tmp_path / "bundle")).passed
    with bundle.open_session() as session:
        feeds = {"x": random.standard_normal((2, 3, 32), dtype=np.float32), "mask": np.ones((2, 3), bool)}
        y = session.run(feeds)["y"]
    import torch

    expected = bundle.reference()(*map(torch.from_numpy, feeds.values()))
    torch.testing.assert_close(torch.from_numpy(y), expected.detach(), rtol=1e-5, atol=1e-6)
    assert callable(mha_deploy.bench)  # the function, not the module of a like name
    assert load_file(bundle.folder / "weights.safetensors").keys() == bundle.reference().state_dict().keys()


@pytest.mark.parametrize(
    "arguments",
    [
        ("verify", "BUNDLE", "--junit"),
        ("verify", "BUNDLE", "--locate", "--keep-fp32-to"),
        ("verify", "BUNDLE", "--heat-map"),
        ("bench", "BUNDLE", "-o"),
        ("bench", "BUNDLE", "--roofline"),
        ("infer", "BUNDLE", "inputs.npz", "-o"),
        ("load", "BUNDLE", "--rate", "9", "-o"),
        ("load", "BUNDLE", "--rate", "9", "--picture"),
    ],
)
def test_a_file_into_a_folder_that_is_not_there_is_refused_before_any_work(
    cli, small_bundle, tmp_path, arguments
):
    command = [str(small_bundle.folder) if word == "BUNDLE" else word for word in arguments]
    result = cli(*command, tmp_path / "mistyped" / "out.png")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert f"there is no folder {tmp_path / 'mistyped'}" in result.stderr
    assert list(tmp_path.iterdir()) == []
    result = cli(*command, tmp_path)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert f"cannot write {tmp_path}: it is a folder" in result.stderr


@pytest.mark.parametrize(
    "command",
    [
        ("verify",),
        ("bench",),
        ("optimize",),
        ("infer", "INPUTS", "-o", "OUT"),
        ("load", "--rate", 9, "--check", 0),
        ("serve", "--port", 0),
    ],
)
def test_more_threads_than_the_machine_could_run_are_refused_before_any_is_started(
    cli, small_bundle, tmp_path, command
):
    np.savez(tmp_path / "inputs.npz", x=np.ones((1, 4, 32), np.float32), mask=np.ones((1, 4), bool))
    files = {"INPUTS": tmp_path / "inputs.npz", "OUT": tmp_path / "y.npz"}
    name, *rest = (files.get(word, word) for word in command)
    most = max(64, 4 * usable_cpus())
    result = cli(name, small_bundle.folder, *rest, "--threads", most + 1)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert f"threads = {most + 1}; expected 0 (every core allowed) to {most}" in result.stderr
    assert not (tmp_path / "y.npz").exists()
