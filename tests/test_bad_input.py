"""Each bad input of the command line: one clear line, the right exit code, the earlier bundle untouched."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from safetensors.numpy import save_file

from mha_deploy import Bundle
from mha_deploy.errors import BundleError, CheckError, MissingError, RunnerClosedError

GOOD = "[attention]\nd_model = 32\nnum_heads = 4\n"


def listing(folder):
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} if folder.exists() else {}


@pytest.fixture
def refused(cli, tmp_path):
    """Export a spec's text that must be refused; returns the one line on stderr."""

    def run(text: str, *more: object) -> str:
        spec = tmp_path / "block.toml"
        spec.write_text(text)
        result = cli("export", spec, "-o", tmp_path / "out", *more)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert "Traceback" not in result.stderr
        assert not (tmp_path / "out").exists()
        return result.stderr

    return run


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[attention\n", "block.toml is not valid TOML"),
        (GOOD + "heads = 4\n", "unknown key in [attention]: heads; known: d_model, num_heads"),
        ("[attn]\n", "unknown section: attn; known: attention, dims, weights, inputs"),
        ("[attention]\nnum_heads = 4\n", "[attention] lacks d_model"),
        (GOOD.replace("32", "33"), "d_model = 33 does not divide by num_heads = 4"),
        (GOOD + "num_kv_heads = 3\n", "num_heads = 4 does not divide by num_kv_heads = 3"),
        (GOOD + 'mask = "causal"\n', "mask = 'causal'; expected one of 'none', 'padding', 'full'"),
        (GOOD + 'bias = ["q"]\n', "bias names 'q'"),
        (GOOD + "kdim = 7\n", "kdim = 7, vdim = 32 with kind = 'self'"),
        (GOOD.replace("32", '"32"'), "d_model = '32'; expected a value of type int"),
        (GOOD + "[dims]\nseq = { min = 8, opt = 4, max = 16 }\n", "min=8 opt=4 max=16"),
        (GOOD + "[dims]\nseq = { min = 0, opt = 4, max = 16 }\n", "expected 1 <= min <= opt <= max"),
        (
            GOOD + "[dims]\nkv_len = { min = 1, opt = 4, max = 16 }\n",
            "dims 'kv_len'; kind = 'self' has batch, seq",
        ),
        (GOOD + "[weights]\nfile = 'w.safetensors'\nseed = 1\n", "both file and seed"),
    ],
)
def test_a_wrong_spec_is_refused_in_one_line(refused, text, message):
    stderr = refused(text)
    assert message in stderr
    assert stderr.count("\n") == 1


def test_an_unknown_preset_is_refused_with_the_known_ones(cli, tmp_path):
    result = cli("export", "bert-huge", "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert "no spec 'bert-huge'" in result.stderr
    assert "bert-base" in result.stderr


@pytest.mark.parametrize("content", [b"", b"foreign", b"\x10\x00\x00\x00\x00\x00\x00\x00{cut"])
def test_a_truncated_or_foreign_checkpoint_is_refused(refused, content, tmp_path):
    path = tmp_path / "w.safetensors"
    path.write_bytes(content)
    stderr = refused(GOOD, "--weights", path)
    assert "w.safetensors" in stderr
    assert stderr.count("\n") == 1


def test_a_checkpoint_of_another_size_is_refused_with_every_misfit(refused, tmp_path):
    shapes = {f"{n}.weight": (16, 16) for n in ("query", "key", "value")} | {"extra": (2,)}
    save_file(
        {name: np.ones(shape, np.float32) for name, shape in shapes.items()}, tmp_path / "w.safetensors"
    )
    stderr = refused(GOOD, "--weights", tmp_path / "w.safetensors")
    for expected in (
        "query.weight is [16, 16]; the spec needs [32, 32]",
        "output.weight is missing",
        "extra [2]",
    ):
        assert expected in stderr


def test_real_inputs_that_do_not_fit_are_refused_at_export(refused, tmp_path):
    save_file({"x": np.ones((5, 32), np.float32), "lengths": np.array([4])}, tmp_path / "in.safetensors")
    assert "packed 'x' has shape [5, 32]; expected [4, 32]" in refused(
        GOOD, "--inputs", tmp_path / "in.safetensors"
    )


def test_a_folder_that_is_no_bundle_is_never_replaced(cli, tmp_path):
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "dear.txt").write_text("keep me")
    result = cli("export", "minilm-l6-v2", "-o", tmp_path / "letters")
    assert result.exit_code == 2
    assert "exists and is not a bundle" in result.stderr
    assert (tmp_path / "letters" / "dear.txt").read_text() == "keep me"


@pytest.mark.parametrize("out", [".", "", "..", "sub/.."])
def test_the_current_folder_is_never_replaced(cli, tmp_path, monkeypatch, out):
    (tmp_path / "sub").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here" / "sub").mkdir()
    result = cli("export", "minilm-l6-v2", "-o", out)
    assert result.exit_code == 2
    assert "the current folder or holds it" in result.stderr


def test_a_link_to_a_bundle_stays_a_link(small_bundle, tmp_path):
    from conftest import small_spec

    from mha_deploy.pipeline import export

    target = shutil.copytree(small_bundle.folder, tmp_path / "target")
    (tmp_path / "link").symlink_to(target)
    before = target.stat().st_ino
    export(small_spec(), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert target.stat().st_ino != before
    assert (target / "manifest.json").is_file()


def test_the_files_of_a_bundle_can_be_read_by_others(small_bundle):
    umask = os.umask(0)
    os.umask(umask)
    modes = {path.name: path.stat().st_mode & 0o777 for path in small_bundle.folder.iterdir()}
    assert set(modes.values()) == {0o666 & ~umask}


def test_a_block_that_memory_does_not_hold_ends_with_3(cli, tmp_path):
    (tmp_path / "block.toml").write_text("[attention]\nd_model = 2000000000\nnum_heads = 1\n")
    result = cli("export", tmp_path / "block.toml", "-o", tmp_path / "out")
    assert result.exit_code == 3
    assert "not enough memory on this machine" in result.stderr


def test_a_maximum_that_memory_does_not_hold_is_said_to_be_unproved(cli, tmp_path, monkeypatch):
    monkeypatch.setattr("mha_deploy.cases.sizes.SCORES_LIMIT", 2**20)
    dims = "[dims]\nbatch = { min = 1, opt = 1, max = 2 }\nseq = { min = 1, opt = 8, max = 200000 }\n"
    (tmp_path / "block.toml").write_text("[attention]\nd_model = 8\nnum_heads = 1\n" + dims)
    result = cli("export", tmp_path / "block.toml", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    assert "not proved to its maximum" in result.stdout
    assert " of 200000" in result.stdout


def test_a_folder_that_cannot_be_written_is_refused(cli, tmp_path):
    (tmp_path / "file").write_text("")
    result = cli("export", "minilm-l6-v2", "-o", tmp_path / "file" / "bundle")
    assert result.exit_code == 2
    assert "cannot write to" in result.stderr


def test_a_prefix_without_weights_is_refused(cli, tmp_path):
    result = cli("export", "minilm-l6-v2", "-o", tmp_path / "out", "--prefix", "a.")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)


@pytest.fixture
def copy(small_bundle, tmp_path):
    return shutil.copytree(small_bundle.folder, tmp_path / "copy")


def test_a_truncated_onnx_file_is_refused(cli, copy):
    path = copy / "model.onnx"
    path.write_bytes(path.read_bytes()[:-100])
    result = cli("bench", copy)
    assert result.exit_code == 2
    assert "model.onnx is not the file that the manifest records" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_bundle_of_a_newer_format_is_refused_and_says_what_wrote_it(cli, copy):
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["format"], manifest["provenance"]["mha_deploy"] = 99, "7.0"
    (copy / "manifest.json").write_text(json.dumps(manifest))
    result = cli("inspect", copy)
    assert result.exit_code == 2
    assert "bundle format 99, written by mha-deploy 7.0; this version reads up to 1" in result.stderr


def test_a_folder_without_a_manifest_is_not_a_bundle(cli, tmp_path):
    result = cli("verify", tmp_path)
    assert result.exit_code == 2
    assert "is not a bundle: it has no manifest.json" in result.stderr


def test_an_unknown_artifact_is_refused_with_the_known_ones(cli, small_bundle):
    result = cli("bench", small_bundle.folder, "--artifact", "engine")
    assert result.exit_code == 2
    assert "has no artifact 'engine'; it has canonical" in result.stderr


def test_a_provider_that_is_not_here_ends_with_3(cli, small_bundle):
    result = cli("verify", small_bundle.folder, "--device", "cuda")
    assert result.exit_code == 3
    assert "CUDAExecutionProvider was asked for" in result.stderr


def test_a_failed_verification_ends_with_1(cli, copy):
    """A model with one wrong weight, recorded in the manifest as if it were right."""
    import onnx
    from onnx import numpy_helper

    from mha_deploy.file_record import sha256_of

    model = onnx.load(copy / "model.onnx")
    bias = next(i for i in model.graph.initializer if i.name == "output.bias")
    bias.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(bias) + np.float32(0.01), "output.bias"))
    onnx.save(model, copy / "model.onnx")
    manifest = json.loads((copy / "manifest.json").read_text())
    record = manifest["artifacts"][0]["files"][0]
    record |= {"sha256": sha256_of(copy / "model.onnx"), "bytes": (copy / "model.onnx").stat().st_size}
    (copy / "manifest.json").write_text(json.dumps(manifest))
    result = cli("verify", copy)
    assert result.exit_code == 1
    assert "FAILED" in result.stdout


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {"x": np.zeros((1, 65, 32), np.float32), "mask": np.ones((1, 65), bool)},
            "seq = 65; this block takes seq 1..64",
        ),
        (
            {"x": np.zeros((1, 5, 32)), "mask": np.ones((1, 5), bool)},
            "'x' has dtype float64; expected x [batch, seq, 32] float32",
        ),
        (
            {"x": np.zeros((70, 32), np.float32), "lengths": np.array([5, 65])},
            "request 1 has seq = 65; this block takes seq 1..64",
        ),
        (
            {"x": np.zeros((5, 32), np.float32), "lengths": np.array([5, 0])},
            "at least one length, whole numbers of at least 1",
        ),
        ({"x": np.zeros((5, 32)), "lengths": np.array([5])}, "'x' has dtype float64"),
        ({"y": np.zeros((5, 32), np.float32)}, "got inputs y; expected mask, x"),
    ],
)
def test_wrong_inference_inputs_are_refused_and_nothing_is_written(
    cli, small_bundle, tmp_path, tensors, message
):
    np.savez(tmp_path / "in.npz", **tensors)
    result = cli("infer", small_bundle.folder, tmp_path / "in.npz", "-o", tmp_path / "out.npz")
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out.npz").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.npz", "cannot read"),
        ("cut.npz", "is not a readable .npz file"),
        ("cut.safetensors", "is not a readable .safetensors file"),
        ("in.json", "neither a .npz nor a .safetensors file"),
    ],
)
def test_an_unreadable_input_file_is_refused(cli, small_bundle, tmp_path, name, message):
    if name != "missing.npz":
        (tmp_path / name).write_bytes(b"PK\x03\x04cut")
    result = cli("infer", small_bundle.folder, tmp_path / name, "-o", tmp_path / "out.npz")
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_pickle_inside_an_npz_is_not_loaded(cli, small_bundle, tmp_path):
    np.savez(tmp_path / "in.npz", x=np.array([{"a": 1}], dtype=object), allow_pickle=True)
    result = cli("infer", small_bundle.folder, tmp_path / "in.npz", "-o", tmp_path / "out.npz")
    assert result.exit_code == 2
    assert "is not a readable .npz file" in result.stderr


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ("batch=7", "batch = 7; this block takes batch 1..6"),
        ("heads=1", "grid names heads; the dims are batch, seq"),
        ("batch", "--grid 'batch'; expected a dim and its sizes"),
    ],
)
def test_a_wrong_bench_grid_is_refused(cli, small_bundle, grid, message):
    result = cli("bench", small_bundle.folder, "--grid", grid)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("stop", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_an_export_that_is_stopped_leaves_the_earlier_bundle_untouched(stop, code, small_bundle, tmp_path):
    bundle = shutil.copytree(small_bundle.folder, tmp_path / "bundle")
    before = listing(bundle)
    spec = tmp_path / "block.toml"
    spec.write_text(GOOD)
    command = [sys.executable, "-m", "mha_deploy", "export", str(spec), "-o", str(bundle)]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ | {"COLUMNS": "200"}
    )
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob(".bundle.partial-*/weights.safetensors")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(stop)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == code
    assert "Traceback" not in stderr
    assert listing(bundle) == before
    if stop != signal.SIGKILL:
        assert not list(tmp_path.glob(".bundle.partial-*"))


@pytest.mark.parametrize("error", [BundleError, CheckError, MissingError, RunnerClosedError])
def test_debug_shows_the_traceback_and_leaves_the_exit_code_as_it_is(cli, monkeypatch, tmp_path, error):
    def fail(_folder):
        raise error("told in one line")

    monkeypatch.setattr(Bundle, "load", fail)
    without, told = cli("inspect", tmp_path), cli("--debug", "inspect", tmp_path)
    assert without.stderr == "error: told in one line\n"
    assert told.stderr.startswith("Traceback (most recent call last):\n")
    assert told.stderr.endswith(f"{error.__name__}: told in one line\nerror: told in one line\n")
    assert without.exit_code == told.exit_code == error.exit_code


def test_ctrl_c_stays_one_where_a_library_makes_an_error_of_its_own_of_it(cli, monkeypatch, tmp_path):
    def library(_folder):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise BundleError("something went wrong") from None

    monkeypatch.setattr(Bundle, "load", library)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in jobs of the background
    try:
        told = cli("inspect", tmp_path)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert told.stderr == "interrupted; nothing was left half-written\n"
    assert told.exit_code == 130


def test_debug_shows_where_the_memory_ran_out(cli, monkeypatch, tmp_path):
    def fail(_folder):
        raise MemoryError("42 GiB")

    monkeypatch.setattr(Bundle, "load", fail)
    told = cli("--debug", "inspect", tmp_path)
    assert told.stderr.startswith("Traceback (most recent call last):\n")
    assert told.stderr.endswith("error: not enough memory on this machine: 42 GiB\n")
    assert told.exit_code == 3


def test_debug_ends_the_process_with_the_code_of_the_error(tmp_path):
    command = [sys.executable, "-m", "mha_deploy", "--debug", "inspect", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "Traceback" in result.stderr
    assert "BundleError" in result.stderr
