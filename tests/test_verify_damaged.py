"""A bundle of which a file is missing or damaged: that artifact fails, the others are judged."""

import json
import shutil

import pytest

from mha_deploy.bundle import Bundle
from mha_deploy.variants import portable_artifact
from mha_deploy.verification import FAILED


@pytest.fixture
def with_portable(small_bundle, tmp_path):
    """A bundle of two artifacts, and a function that does away with a file of one."""
    folder = shutil.copytree(small_bundle.folder, tmp_path / "bundle")
    portable_artifact(Bundle.load(folder))

    def harm(name, damage):
        file = folder / Bundle.load(folder).artifact(name).files[0].file
        if damage == "missing":
            file.unlink()
        else:
            file.write_bytes(b"changed")
        return file

    return folder, harm


@pytest.mark.parametrize(
    ("harmed", "other", "command"),
    [("portable", "canonical", "optimize --portable"), ("canonical", "portable", "export")],
)
@pytest.mark.parametrize("damage", ["missing", "changed"])
def test_an_artifact_whose_file_does_not_hold_has_failed_and_the_others_are_judged(
    with_portable, tmp_path, cli, harmed, other, command, damage
):
    folder, harm = with_portable
    file, junit = harm(harmed, damage), tmp_path / "report.xml"
    result = cli("verify", folder, "--case", "odd", "--json", "--junit", junit)
    assert (result.exit_code, result.stderr) == (1, "")
    by_artifact = {case["artifact"]: case for case in json.loads(result.stdout)["cases"]}
    assert (by_artifact[other]["name"], by_artifact[other]["outcome"]) == ("odd", "passed")
    assert (by_artifact[harmed]["name"], by_artifact[harmed]["outcome"]) == ("load", FAILED)
    said = by_artifact[harmed]["note"]
    assert said.startswith(f"{file} is ")
    assert said.endswith(f"make it again with `{command}`")
    assert said in junit.read_text()
    shown = cli("verify", folder, "--case", "odd")
    assert shown.exit_code == 1
    assert f"load: {file} is " in shown.stdout.replace("\n", " ")


def test_an_artifact_that_is_named_and_whose_file_is_missing_has_failed_too(with_portable, cli):
    folder, harm = with_portable
    harm("portable", "missing")
    result = cli("verify", folder, "--artifact", "portable", "--case", "odd")
    assert (result.exit_code, result.stderr) == (1, "")
    assert "make it again with `optimize --portable`" in result.stdout.replace("\n", " ")


def test_locate_says_that_it_cannot_look_into_a_missing_file(with_portable, tmp_path, cli):
    folder, harm = with_portable
    file, junit = harm("portable", "missing"), tmp_path / "report.xml"
    result = cli("verify", folder, "--case", "odd", "--locate", "--json", "--junit", junit)
    assert (result.exit_code, result.stderr) == (1, "")
    said = f"portable cannot be looked into: {file} is missing; make it again with `optimize --portable`"
    assert json.loads(result.stdout)["located"]["not_looked_into"] == [said]
    assert junit.exists()
