"""A bundle that is exported again while something is made of the one before: nothing of that joins it."""

import fcntl
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
from conftest import small_spec

from mha_deploy import Variant, optimize
from mha_deploy.bundle import CANONICAL, Bundle
from mha_deploy.errors import BundleError
from mha_deploy.pipeline import export
from mha_deploy.precision import Precision
from mha_deploy.quantization import Wanted, quantize
from mha_deploy.ragged import Request, packed
from mha_deploy.search.candidates import all_candidates
from mha_deploy.sessions import Placement
from mha_deploy.staging import locked, put_in_place
from mha_deploy.tensor_files import write_tensors
from mha_deploy.variant_files import staged_variant
from mha_deploy.variants import portable_artifact, typed_artifact

ONE_THREAD = Placement(threads=1)
SAID = r"the bundle .* was exported again meanwhile, and what was made of the one before .*; run it again$"
WANTED = Wanted(0.5, "dynamic", speed_seconds=0, placement=ONE_THREAD)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """The small block with other weights."""
    spec = small_spec()
    spec = replace(spec, weights=replace(spec.weights, seed=7))
    return export(spec, tmp_path_factory.mktemp("other") / "bundle")


@pytest.fixture
def bundle(small_bundle, tmp_path):
    """A copy to write to."""
    return Bundle.load(shutil.copytree(small_bundle.folder, tmp_path / "bundle"))


@pytest.fixture
def requests():
    random = np.random.default_rng(2)
    return [Request({"x": random.standard_normal((n, 32), np.float32)}, n, n) for n in (3, 9, 5, 12)]


@pytest.fixture
def exports(bundle, other):
    """Exports again, once; `exports.at(text)` is a callback that does so when it is told that text."""

    class Exports:
        done = False

        def __call__(self):
            if not self.done:
                new = shutil.copytree(other.folder, bundle.folder.with_name("new"))
                put_in_place(new, bundle.folder)
                shutil.rmtree(new, ignore_errors=True)
                self.done = True

        def at(self, text):
            return lambda told: self() if told.startswith(text) else None

    return Exports()


def held_in(folder):
    """Every file and folder there is, and what the files hold."""
    return {path.relative_to(folder): path.is_file() and path.read_bytes() for path in folder.rglob("*")}


def is_as_exported(bundle, other):
    assert held_in(bundle.folder) == held_in(other.folder)
    assert [path.name for path in bundle.folder.parent.iterdir()] == [bundle.folder.name]


@pytest.mark.parametrize("precision", [Precision.FP16, Precision.BF16])
@pytest.mark.parametrize("at", ["exporting", "checking"])
def test_a_copy_in_16_bits_of_the_old_weights_does_not_join(bundle, other, exports, precision, at):
    with pytest.raises(BundleError, match=SAID):
        typed_artifact(bundle, Variant(precision), exports.at(at))
    assert exports.done
    is_as_exported(bundle, other)


@pytest.mark.parametrize("at", ["lowering", "checking"])
def test_a_portable_form_of_the_old_weights_does_not_join(bundle, other, exports, at):
    with pytest.raises(BundleError, match=SAID):
        portable_artifact(bundle, exports.at(at))
    assert exports.done
    is_as_exported(bundle, other)


@pytest.mark.parametrize("at", ["calibrating", "1 of"])
def test_an_int8_form_of_the_old_weights_does_not_join(bundle, other, exports, requests, at):
    with pytest.raises(BundleError, match=SAID):
        quantize(bundle, WANTED, requests, exports.at(at))
    assert exports.done
    is_as_exported(bundle, other)


def test_inputs_for_int8_do_not_join_another_bundle_either(bundle, other, exports, requests, monkeypatch):
    """The export comes after the int8 form was recorded, so that it went with the old folder."""
    record = Bundle.record

    def recorded(bundle, *artifacts):
        record(bundle, *artifacts)
        exports()

    monkeypatch.setattr(Bundle, "record", recorded)
    with pytest.raises(BundleError, match=SAID):
        quantize(bundle, WANTED, requests)
    assert exports.done
    is_as_exported(bundle, other)


def test_the_command_line_says_so_in_one_line_and_ends_with_2(
    bundle, other, exports, requests, cli, monkeypatch, tmp_path_factory
):
    from mha_deploy.quantization import artifact

    def searched(*given):
        found = search(*given)
        exports()
        return found

    search = artifact.search
    monkeypatch.setattr(artifact, "search", searched)
    inputs = tmp_path_factory.mktemp("inputs") / "x.npz"
    write_tensors(inputs, packed(bundle.spec, requests))
    int8 = ("--precision", "int8", "--max-relative-error", "50%", "--inputs", inputs)
    result = cli("optimize", bundle.folder, *int8)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "was exported again meanwhile" in result.stderr
    is_as_exported(bundle, other)


def searched(bundle, progress, names=(CANONICAL, "lean-attention")):
    candidates = [each for each in all_candidates() if each.name in names]
    found = {"candidates": candidates, "grid": {"batch": [1], "seq": [4]}, "progress": progress}
    return optimize(bundle, seconds=0.02, placement=ONE_THREAD, **found)


@pytest.mark.parametrize("at", ["making canonical", "making lean", "rewriting", "batch=1, seq=4"])
def test_a_search_over_the_old_weights_chooses_nothing(bundle, other, exports, at):
    with pytest.raises(BundleError, match=SAID):
        searched(bundle, exports.at(at))
    assert exports.done
    is_as_exported(bundle, other)


def test_a_search_that_an_export_follows_before_it_chooses_does_not(bundle, other, exports, monkeypatch):
    choose = Bundle.choose

    def chosen(bundle, *given):
        exports()
        choose(bundle, *given)

    monkeypatch.setattr(Bundle, "choose", chosen)
    with pytest.raises(BundleError, match=SAID):
        searched(bundle, lambda _: None)
    is_as_exported(bundle, other)


def test_a_search_that_finds_all_in_its_record_chooses_nothing_without_its_files(bundle, monkeypatch):
    """As after an export of the same block within the second that a manifest tells apart."""
    variants, choose = bundle.folder / "variants", Bundle.choose

    def chosen(bundle, *given):
        shutil.rmtree(variants)
        choose(bundle, *given)

    monkeypatch.setattr(Bundle, "choose", chosen)
    with pytest.raises(BundleError, match=r"model\.onnx is missing; make it again with `optimize`$"):
        searched(bundle, lambda _: None, names=["lean-attention"])
    assert Bundle.load(bundle.folder) == bundle
    assert (bundle.artifacts[1:], bundle.manifest.choices) == ((), ())


def test_the_command_line_chooses_nothing_after_an_export_and_ends_with_2(
    bundle, other, exports, cli, monkeypatch
):
    from mha_deploy.search import run

    def told(*given, **named):
        exports()
        return gate(*given, **named)

    gate = run.gate
    monkeypatch.setattr(run, "gate", told)
    result = cli("optimize", bundle.folder, "--threads", 1, "--seconds", 0.02, "--grid", "seq=4")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "was exported again meanwhile" in result.stderr
    is_as_exported(bundle, other)


def test_an_error_that_an_export_is_not_to_blame_for_keeps_its_words(bundle, monkeypatch):
    def failing(*_):
        raise ValueError("something else")

    monkeypatch.setattr("mha_deploy.variants.write_typed", failing)
    with pytest.raises(ValueError, match=r"^something else$"):
        typed_artifact(bundle, Variant(Precision.FP16))


def test_files_of_a_variant_that_are_there_all_the_same_do_not_join_another_bundle(bundle, exports):
    def written():
        with staged_variant(bundle, "lean-attention") as staged:
            exports()
            staged.path.mkdir(parents=True)
            (staged.path / "model.onnx").write_text("of the old weights")

    with pytest.raises(BundleError, match=SAID):
        written()
    assert not list((bundle.folder / "variants").iterdir())


def test_a_folder_that_was_exported_again_before_is_not_written_to(bundle, other, exports):
    exports()
    with pytest.raises(BundleError, match=SAID), staged_variant(bundle, "lean-attention"):
        pass
    is_as_exported(bundle, other)


def test_an_export_waits_for_what_is_being_recorded(bundle, monkeypatch):
    def put(staging, out):
        handle = os.open(out, os.O_RDONLY)
        try:
            with pytest.raises(BlockingIOError):
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(handle)
        put_in_place(staging, out)

    monkeypatch.setattr("mha_deploy.pipeline.put_in_place", put)
    again = export(bundle.spec, bundle.folder)
    again.record(replace(again.artifact(), name="one"))  # nobody holds the folder any more
    assert [artifact.name for artifact in Bundle.load(bundle.folder).artifacts] == [CANONICAL, "one"]


def test_who_waited_for_a_folder_that_was_replaced_meanwhile_holds_the_new_one(bundle, exports, monkeypatch):
    flock, taken = fcntl.flock, []

    def slow(handle, operation):
        exports()
        flock(handle, operation)
        taken.append(os.fstat(handle).st_ino)

    monkeypatch.setattr("fcntl.flock", slow)
    with locked(bundle.folder):
        assert len(taken) == 2
        assert taken[-1] == bundle.folder.stat().st_ino


def test_the_same_block_exported_again_is_another_bundle_too(bundle, small_bundle):
    """What was made of the one before may have gone with its folder."""
    manifest = small_bundle.manifest
    later = {**manifest.provenance, "created": "2001-01-01T00:00:00+00:00"}
    replace(manifest, provenance=later).write(bundle.folder)
    with pytest.raises(BundleError, match=SAID):
        bundle.refresh()


def test_what_joined_a_bundle_since_it_was_loaded_is_no_other_export(bundle, requests):
    early = Bundle.load(bundle.folder)
    quantize(bundle, WANTED, requests)  # which adds an artifact, and inputs
    early.refresh()
    assert early == bundle
    assert len(early.real_inputs()) == len(requests)


def test_a_folder_without_a_bundle_is_said_to_be_none(bundle):
    shutil.rmtree(bundle.folder)
    with pytest.raises(BundleError, match=r"cannot open .*: No such file or directory"):
        bundle.record(bundle.artifact(CANONICAL))
    bundle.folder.mkdir()
    with pytest.raises(BundleError, match=r"is not a bundle: it has no manifest\.json"):
        bundle.record(bundle.artifact(CANONICAL))
