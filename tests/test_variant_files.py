"""Files of variants: what a manifest records stays as it is, whatever is made anew, by whom and how far."""

import dataclasses
import re
import shutil
import signal
import subprocess
import sys

import onnx
import pytest

from mha_deploy.bundle import Bundle
from mha_deploy.errors import BundleError
from mha_deploy.lowering import Lowered, lean_attention
from mha_deploy.manifest import Artifact
from mha_deploy.onnx_files import files_of
from mha_deploy.precision import Precision
from mha_deploy.search import Candidate, optimize
from mha_deploy.search.candidate import canonical
from mha_deploy.search.rewritten import rewritten
from mha_deploy.sessions import Placement
from mha_deploy.typed import Variant
from mha_deploy.variant_files import staged_variant
from mha_deploy.variants import Checked, typed_artifact

NAME = "lean-attention"
FILE = f"variants/{NAME}/model.onnx"
HASHED = rf"variants/{NAME}-[0-9a-f]{{12}}/model\.onnx"
# Puts other files in the place of a variant, and is killed before it could have recorded them.
KILLED = """
import os, signal, sys
from mha_deploy.bundle import Bundle
from mha_deploy.variant_files import staged_variant
with staged_variant(Bundle.load(sys.argv[1]), "lean-attention") as staged:
    (staged.path / "model.onnx").write_text("another version's")
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def bundle(small_bundle, tmp_path):
    shutil.copytree(small_bundle.folder, tmp_path / "bundle")
    return Bundle.load(tmp_path / "bundle")


def version(number):
    """The rewrite as one version of the program makes it: the same graph in other bytes."""

    def lowering(model):
        lowered = lean_attention(model)
        onnx.helper.set_model_props(lowered.model, {"version": number})
        return Lowered(lowered.model, lowered.steps)

    return rewritten(NAME, lowering)


def made(bundle, number):
    return version(number)(bundle, lambda _: None)


def opened(bundle):
    """The path of the recorded variant, its file held against its record."""
    return Bundle.load(bundle.folder).artifact(NAME).path(bundle.folder).relative_to(bundle.folder)


def written(bundle, text, name=NAME):
    with staged_variant(bundle, name) as staged:
        (staged.path / "model.onnx").write_text(text)
    return staged.folder


def recorded(bundle, folder):
    files = files_of(bundle.folder, folder, "model.onnx")
    artifact = Artifact(NAME, "onnxruntime", Precision.FP32, bundle.signature, files)
    bundle.record(artifact)
    return artifact


def test_a_variant_made_by_another_version_leaves_the_recorded_one_as_it_is(bundle):
    bundle.record(made(bundle, "1"))
    anew = made(bundle, "2")
    assert str(opened(bundle)) == FILE
    assert re.fullmatch(HASHED, anew.files[0].file)
    bundle.record(anew)
    assert str(opened(bundle)) == anew.files[0].file


def test_a_search_that_chooses_something_else_leaves_a_bundle_whose_files_hold(bundle):
    bundle.record(made(bundle, "1"))
    candidates = (
        Candidate("canonical", Precision.FP32, canonical),
        Candidate(NAME, Precision.FP32, version("2"), baseline=True),  # made, and never chosen
    )
    grid = {"batch": [1], "seq": [1]}
    report = optimize(bundle, candidates=candidates, grid=grid, seconds=0.02, placement=Placement(threads=1))
    assert report.artifact == "canonical"
    assert str(opened(bundle)) == FILE


def test_the_same_files_stay_where_they_are_when_they_are_made_again(bundle):
    first = made(bundle, "1")
    before = (bundle.folder / FILE).stat().st_ino
    assert made(bundle, "1") == first
    assert (bundle.folder / FILE).stat().st_ino == before
    assert [path.name for path in (bundle.folder / "variants").iterdir()] == [NAME]


def test_files_that_nothing_records_yet_are_not_replaced_by_another_process_either(bundle):
    one = written(bundle, "one")
    other = written(bundle, "other")
    assert one != other
    recorded(bundle, one)
    assert (opened(bundle).parent.name, (bundle.folder / one / "model.onnx").read_text()) == (NAME, "one")


def test_a_run_that_is_killed_after_it_made_a_variant_leaves_the_recorded_one(bundle):
    recorded(bundle, written(bundle, "recorded"))
    done = subprocess.run([sys.executable, "-c", KILLED, str(bundle.folder)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert str(opened(bundle)) == FILE


@pytest.mark.parametrize("hashed", [False, True], ids=["by its name", "by its hash"])
def test_a_damaged_file_is_made_whole_by_the_command_that_its_error_names(bundle, hashed):
    if hashed:
        written(bundle, "another's")
    artifact = made(bundle, "1")
    bundle.record(artifact)
    (bundle.folder / artifact.files[0].file).write_text("damaged")
    with pytest.raises(BundleError, match="make it again with `optimize`"):
        opened(bundle)
    assert made(bundle, "1") == artifact
    assert str(opened(bundle)) == artifact.files[0].file


def test_a_damaged_file_of_a_typed_variant_is_made_whole_too(bundle):
    artifact = typed_artifact(bundle, Variant(Precision.BF16))
    twin = bundle.folder / "variants/bf16/twin.onnx"
    whole = twin.read_bytes()
    twin.write_bytes(whole[:100])
    assert typed_artifact(bundle, Variant(Precision.BF16)) == artifact
    assert twin.read_bytes() == whole


def test_a_typed_variant_of_other_nodes_leaves_what_stands_on_the_one_before(bundle, monkeypatch):
    monkeypatch.setattr("mha_deploy.variants.check_numerically", lambda *_: Checked(1, 0, "in no runtime"))
    graph = onnx.load(str(bundle.artifact("canonical").path(bundle.folder))).graph
    one, other = [node.name for node in graph.node if node.op_type == "MatMul"][:2]
    first = typed_artifact(bundle, Variant(Precision.FP16, keep_fp32=(one,)))
    bundle.record(dataclasses.replace(first, name="stands-on-it"))
    second = typed_artifact(bundle, Variant(Precision.FP16, keep_fp32=(other,)))
    assert second.name == first.name
    assert second.files != first.files
    for artifact in Bundle.load(bundle.folder).artifacts:
        artifact.path(bundle.folder)


def test_a_file_where_the_folder_is_to_be_stays_as_it_is(bundle):
    (bundle.folder / "variants").mkdir()
    (bundle.folder / "variants" / NAME).write_text("a file")
    assert written(bundle, "new") != f"variants/{NAME}"
    assert (bundle.folder / "variants" / NAME).read_text() == "a file"
