"""What a search cannot do anything with is said once, before anything is measured."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import small_spec

from mha_deploy.bundle import Bundle
from mha_deploy.errors import BundleError
from mha_deploy.file_record import FileRecord
from mha_deploy.lowering import lean_attention
from mha_deploy.pipeline import INPUTS_FILE, export
from mha_deploy.precision import Precision
from mha_deploy.search import Candidate, optimize
from mha_deploy.search.candidate import canonical
from mha_deploy.search.record import FILE_NAME
from mha_deploy.search.rewritten import rewritten
from mha_deploy.sessions import Placement
from mha_deploy.tensor_files import write_tensors

CANONICAL = Candidate("canonical", Precision.FP32, canonical)
LEAN = Candidate("lean-attention", Precision.FP32, rewritten("lean-attention", lean_attention))


@pytest.fixture
def bundle(small_bundle, tmp_path):
    shutil.copytree(small_bundle.folder, tmp_path / "bundle")
    return Bundle.load(tmp_path / "bundle")


def searched(bundle, *candidates):
    grid = {"batch": [1], "seq": [1]}
    return optimize(bundle, candidates=candidates, grid=grid, seconds=0.02, placement=Placement(threads=1))


def untried(_bundle, _status):
    pytest.fail("a candidate was made")


def test_a_record_that_cannot_be_written_ends_a_search_before_anything_is_measured(bundle, cli):
    (bundle.folder / FILE_NAME).mkdir()
    with pytest.raises(BundleError, match=r"^cannot write .*search\.json: Is a directory$"):
        searched(bundle, Candidate("untried", Precision.FP32, untried))
    result = cli("optimize", bundle.folder)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1


def test_a_read_only_bundle_ends_a_search_before_anything_is_measured(bundle, monkeypatch):
    def refuse(path, *_args, **_named):
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(BundleError, match=r"^cannot write .*search\.json: Read-only file system$"):
        searched(bundle, Candidate("untried", Precision.FP32, untried))


def test_a_variant_that_cannot_be_written_ends_the_search_and_is_no_verdict(bundle):
    (bundle.folder / "variants").write_text("in the way")
    with pytest.raises(BundleError, match=r"^cannot write to .*variants: File exists$"):
        searched(bundle, CANONICAL, LEAN)


def test_a_file_that_is_not_the_recorded_one_is_still_a_candidates_own_failure(bundle):
    def broken(_bundle, _status):
        raise BundleError("the engine's passport says another GPU")

    report = searched(bundle, CANONICAL, Candidate("broken", Precision.FP32, broken))
    assert [each.outcome for each in report.tried] == ["passed", "failed"]


@pytest.mark.parametrize("junk", [np.nan, np.inf])
def test_inputs_that_hold_no_numbers_are_named_once_as_what_is_wrong(tmp_path, cli, junk):
    x = np.ones((5, 32), np.float32)
    x[3, 1] = junk
    made = export(small_spec(), tmp_path / "bundle")
    write_tensors(made.folder / INPUTS_FILE, {"x": x, "lengths": np.array([2, 3])})
    # `export` refuses such inputs; it has not always done so.
    manifest = replace(made.manifest, inputs=(FileRecord.of(made.folder, INPUTS_FILE),))
    manifest.write(made.folder)
    for options in ((), ("--portable",)):
        result = cli("optimize", tmp_path / "bundle", *options)
        assert result.exit_code == 2
        said = " ".join(result.stderr.split())
        assert said.count("the inputs hold NaN or inf, in 'x' of request 1 of ") == 1
        assert "PyTorch computes" not in said
