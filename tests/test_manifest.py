"""The manifest: there and back, and every way in which it and its files can be damaged."""

import json
import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mha_deploy.artifact_details import KINDS
from mha_deploy.bundle import Bundle
from mha_deploy.errors import BundleError
from mha_deploy.file_record import FileRecord, sha256_of
from mha_deploy.manifest import CHECKPOINT, FORMAT, Artifact, Manifest
from mha_deploy.precision import Precision
from mha_deploy.signature import Dim
from mha_deploy.spec import AttentionSpec, WeightsSource

PROVENANCE = {
    "mha_deploy": "0.1.0",
    "created": "2026-01-01T00:00:00+00:00",
    "checkpoint": dict.fromkeys(CHECKPOINT, ""),
    "machine": {"versions": {"torch": "2.9.0"}, "usable_cpus": 2},
}
KEYS = ("format", "spec", "weights", "inputs", "artifacts", "provenance")
SPEC = AttentionSpec(
    24, 4, causal=True, norm="post", dims=(Dim("seq", 2, 3, 4),), weights=WeightsSource("w.bin", "layer.3.")
)


def artifact(name="canonical", files=("model.onnx",), **fields):
    made = {"runtime": "onnxruntime", "precision": Precision.FP16, "signature": SPEC.signature, **fields}
    return Artifact(name, files=tuple(FileRecord(file, "0" * 64, 3) for file in files), **made)


def manifest(**fields):
    made = {
        "spec": SPEC,
        "weights": FileRecord("weights.safetensors", "1" * 64, 5),
        "artifacts": (artifact(),),
        "provenance": PROVENANCE,
        **fields,
    }
    return Manifest(**made)


def bundle(folder):
    """A folder with files that its manifest records as they are."""
    (folder / "weights.safetensors").write_bytes(b"weights")
    (folder / "model.onnx").write_bytes(b"graph")
    (folder / "model.onnx.data").write_bytes(b"external")
    records = tuple(FileRecord.of(folder, file) for file in ("model.onnx", "model.onnx.data"))
    canonical = Artifact("canonical", "onnxruntime", Precision.FP32, SPEC.signature, records)
    manifest(weights=FileRecord.of(folder, "weights.safetensors"), artifacts=(canonical,)).write(folder)
    return folder


def damaged(folder, change):
    manifest().write(folder)
    path = folder / "manifest.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(BundleError) as caught:
        Manifest.read(folder)
    return str(caught.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
json_tables = st.dictionaries(st.text(), json_values, max_size=4)
records = st.builds(
    FileRecord, st.text(min_size=1).filter(lambda t: Path(t).name == t != ".."), st.text(), st.integers(0)
)
artifacts = st.builds(
    Artifact,
    name=st.text(),
    runtime=st.sampled_from(["onnxruntime", "openvino", ""]),
    precision=st.sampled_from(Precision),
    signature=st.just(SPEC.signature),
    files=st.lists(records, min_size=1, max_size=3).map(tuple),
    details=json_tables.filter(lambda table: not KINDS.keys() & table),
)


@settings(deadline=None, max_examples=50)
@given(
    made=st.builds(
        Manifest,
        spec=st.just(SPEC),
        weights=records,
        artifacts=st.lists(artifacts, max_size=3).map(tuple),
        provenance=json_tables.map(lambda table: {**table, **PROVENANCE}),
        inputs=st.lists(records, max_size=2).map(tuple),
    )
)
def test_every_manifest_comes_back_from_its_file_as_it_was(made):
    with tempfile.TemporaryDirectory() as folder:
        made.write(Path(folder))
        assert Manifest.read(Path(folder)) == made


def test_a_manifest_replaces_the_old_one_whole(tmp_path):
    manifest(provenance={**PROVENANCE, "long": "x" * 1000}).write(tmp_path)
    manifest().write(tmp_path)
    assert Manifest.read(tmp_path) == manifest()
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


def test_a_folder_without_a_manifest_is_not_a_bundle(tmp_path):
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path, tmp_path / "nowhere", tmp_path / "file"):
        said = f"{folder} is not a bundle: it has no manifest.json; make one with `export`"
        with pytest.raises(BundleError, match=re.escape(said)):
            Bundle.load(folder)


def test_a_manifest_that_is_a_folder_cannot_be_read(tmp_path):
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(BundleError, match=r"cannot read .*manifest\.json: Is a directory"):
        Manifest.read(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"nonsense", b'{"format": 1', b"\xff\xfe\x00\x01"])
def test_a_manifest_that_is_not_json_is_damaged(tmp_path, content):
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(BundleError, match=r"manifest\.json is damaged: .*; export again"):
        Manifest.read(tmp_path)


def test_a_manifest_cut_short_anywhere_is_damaged(tmp_path):
    manifest().write(tmp_path)
    whole = (tmp_path / "manifest.json").read_bytes()
    for length in range(0, len(whole.rstrip()), 97):
        (tmp_path / "manifest.json").write_bytes(whole[:length])
        with pytest.raises(BundleError, match="is damaged"):
            Manifest.read(tmp_path)


@pytest.mark.parametrize("content", [b"[]", b"5", b"null", b'"text"', b"{}"])
def test_json_that_is_no_manifest_is_damaged(tmp_path, content):
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(BundleError, match="is damaged"):
        Manifest.read(tmp_path)


@pytest.mark.parametrize("key", KEYS)
def test_a_manifest_that_lacks_a_key_is_damaged_and_the_key_named(tmp_path, key):
    assert f"is damaged: it has no '{key}'; export again" in damaged(tmp_path, lambda data: data.pop(key))


@pytest.mark.parametrize("key", ["name", "runtime", "precision", "signature", "files", "details"])
def test_an_artifact_that_lacks_a_key_is_damaged(tmp_path, key):
    said = damaged(tmp_path, lambda data: data["artifacts"][0].pop(key))
    assert f"is damaged: artifacts[0] has no '{key}'; export again" in said


@pytest.mark.parametrize("key", ["file", "sha256", "bytes"])
def test_a_file_record_that_lacks_a_key_is_damaged(tmp_path, key):
    said = damaged(tmp_path, lambda data: data["weights"].pop(key))
    assert f"is damaged: weights lacks '{key}'; export again" in said


@pytest.mark.parametrize("file", ["../secret.onnx", "/etc/hostname", "a/../../b", ".."])
def test_a_record_that_points_outside_the_folder_is_refused(tmp_path, file):
    assert "is damaged" in damaged(tmp_path, lambda data: data["artifacts"][0]["files"][0].update(file=file))


def test_an_artifact_without_files_is_damaged(tmp_path):
    assert "is damaged" in damaged(tmp_path, lambda data: data["artifacts"][0].update(files=[]))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data["artifacts"][0].update(precision="fp8"), "'fp8' is not a valid Precision"),
        (lambda data: data["spec"].update(num_heads=5), "num_heads = 5 does not divide by num_kv_heads = 4"),
        (lambda data: data["spec"].update(window=5), "spec has unknown 'window'"),
        (lambda data: data["spec"]["dims"][0].update(max=0), "expected 1 <= min <= opt <= max"),
    ],
)
def test_a_manifest_with_an_impossible_value_is_damaged_and_says_which(tmp_path, change, said):
    assert said in damaged(tmp_path, change)


def test_a_newer_format_is_told_from_damage_and_names_its_writer(tmp_path):
    def newer(data):
        data.clear()
        data.update(format=FORMAT + 1, provenance={"mha_deploy": "9.0.0"}, anything="else")

    said = damaged(tmp_path, newer)
    assert said == (
        f"{tmp_path} has bundle format 2, written by mha-deploy 9.0.0; "
        "this version reads up to 1: upgrade mha-deploy or export again"
    )


@pytest.mark.parametrize("number", [0, -1, 0.5])
def test_a_format_below_the_first_is_damaged(tmp_path, number):
    assert "format" in damaged(tmp_path, lambda data: data.update(format=number))


def test_a_file_as_recorded_is_the_one_to_open(tmp_path):
    loaded = Bundle.load(bundle(tmp_path))
    assert loaded.artifact().path(tmp_path) == tmp_path / "model.onnx"
    assert loaded.manifest.weights.verified(tmp_path).read_bytes() == b"weights"


def test_the_hash_is_sha_256(tmp_path):
    (tmp_path / "abc").write_bytes(b"abc")
    # FIPS 180-4's example.
    assert sha256_of(tmp_path / "abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.mark.parametrize("content", [b"grap", b"", b"graph.", b"grapH"])
@pytest.mark.parametrize("file", ["model.onnx", "model.onnx.data"])
def test_a_file_cut_short_or_changed_is_refused_before_it_is_opened(tmp_path, file, content):
    loaded = Bundle.load(bundle(tmp_path))
    expected = (tmp_path / file).stat().st_size
    (tmp_path / file).write_bytes(content)
    sizes = rf"\({len(content)} bytes, expected {expected} with SHA-256 \w{{12}}\.\.\.\)"
    said = rf"{file} is not the file that the manifest records {sizes}; it was changed or cut short"
    with pytest.raises(BundleError, match=said):
        loaded.artifact().path(tmp_path)


@pytest.mark.parametrize("file", ["model.onnx", "model.onnx.data"])
def test_a_missing_file_is_refused(tmp_path, file):
    loaded = Bundle.load(bundle(tmp_path))
    (tmp_path / file).unlink()
    with pytest.raises(BundleError, match=rf"{re.escape(file)} is missing; make it again with `export`"):
        loaded.open_session()


@pytest.mark.parametrize(
    ("file", "fields", "command"),
    [
        ("model.onnx", {}, "export"),
        ("variants/fused-projections/model.onnx", {"precision": Precision.FP32}, "optimize"),
        ("variants/fp16/model.onnx", {"details": {"io": "fp32"}}, "optimize --precision fp16"),
        ("variants/packed-fp16/model.onnx", {"layout": "packed"}, "build-engine --fp16 --layout packed"),
        ("engines/fp16.plan", {"details": {"passport": {}}}, "build-engine"),
    ],
)
@pytest.mark.parametrize("changed", [True, False], ids=["changed", "missing"])
def test_the_advice_for_a_file_that_does_not_hold_is_the_command_that_made_it(
    tmp_path, file, fields, command, changed
):
    if changed:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_bytes(b"changed")
    with pytest.raises(BundleError, match=rf"make it again with `{command}`$"):
        artifact(files=(file,), **fields).path(tmp_path)


def test_a_folder_that_moved_is_the_same_bundle(tmp_path):
    (tmp_path / "one").mkdir()
    bundle(tmp_path / "one").rename(tmp_path / "other")
    assert Bundle.load(tmp_path / "other").artifact().path(tmp_path / "other").read_bytes() == b"graph"


def test_an_unknown_artifact_is_answered_with_the_known_ones(tmp_path):
    loaded = Bundle.load(bundle(tmp_path))
    with pytest.raises(BundleError, match="has no artifact 'fp16'; it has canonical"):
        loaded.artifact("fp16")
