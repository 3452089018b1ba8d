"""The command that an error about a missing or damaged file names is the one that makes it again."""

import re
import shutil

import pytest

from mha_deploy.bundle import Bundle
from mha_deploy.errors import BundleError
from mha_deploy.maker import maker_of

SETTINGS = {"device": "cuda"}
NODES = ["node_scores", "node_out"]


def plain(name, precision="fp32", layout="padded", **details):
    files = [{"file": f"variants/{name}/model.onnx"}]
    return {"name": name, "precision": precision, "layout": layout, "files": files, "details": details}


INT8 = plain("int8", "int8", made_from="canonical", scheme="static", max_relative_error=0.025)
LEAN = plain("lean-attention", made_from="canonical", lowering=[])


@pytest.mark.parametrize(
    ("artifact", "command"),
    [
        (LEAN, "optimize"),
        (plain("openvino-bf16-fusible-attention", "bf16", made_from="fusible"), "optimize --allow bf16"),
        (plain("cuda-fp16", "fp16", made_from="fp16", settings=SETTINGS), "optimize --precision fp16"),
        (plain("portable", opset=20, made_from="canonical"), "optimize --portable"),
        (INT8, "optimize --precision int8 --max-relative-error 0.025"),
        (plain("fp16", "fp16", io="fp32"), "optimize --precision fp16"),
        (plain("bf16-twin", "bf16", twin_of="bf16"), "optimize --precision bf16"),
        (
            plain("fp16-islands", "fp16", io="fp32", keep_fp32=NODES),
            "optimize --precision fp16 --keep-fp32 node_scores,node_out",
        ),
        (
            plain("bf16-islands-twin", "bf16", twin_of="bf16-islands"),
            "optimize --precision bf16 --keep-fp32 NODES",
        ),
        (plain("fp16-io", "fp16", io="same"), "build-engine --fp16 --io same"),
        (plain("bf16-io-twin", "bf16", twin_of="bf16-io"), "build-engine --bf16 --io same"),
        (plain("packed", layout="packed", io="fp32"), "export --layout packed"),
        (plain("packed-fp16", "fp16", "packed", io="fp32"), "build-engine --fp16 --layout packed"),
        (plain("fp32-rtx", passport={}), "build-engine"),
        (plain("damaged", passport=1), "build-engine"),
        (
            plain("mine", "fp16", passport={"command": "mha-deploy build-engine BUNDLE --fp16 --name mine"}),
            "build-engine --fp16 --name mine",
        ),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else "",
)
def test_each_kind_of_artifact_has_a_command_that_makes_it(artifact, command):
    assert maker_of(artifact, artifact["files"][0]["file"]) == command


@pytest.mark.parametrize("part", [LEAN, INT8], ids=["short", "long"])
def test_a_file_of_two_artifacts_as_one_is_made_by_what_makes_its_own(part):
    routes = {"up_to_length": 64, "short": LEAN, "long": INT8}
    routed = plain("lean-attention-to-64-then-int8", "int8", max_relative_error=0.025, routes=routes)
    file = part["files"][0]["file"]
    assert maker_of(routed, file) == maker_of(part, file)


@pytest.mark.parametrize(
    "details", [{"routes": 3}, {"routes": {"short": {}}}, {"io": "fp32", "keep_fp32": 1}]
)
def test_details_that_cannot_be_read_leave_it_at_a_command_without_options(details):
    assert maker_of(plain("odd", **details), "variants/odd/model.onnx") == "optimize"


@pytest.mark.parametrize(("form", "name"), [("--portable", "portable"), ("--precision=fp16", "fp16")])
@pytest.mark.parametrize("damage", ["missing", "changed"])
def test_the_command_that_an_error_names_makes_the_bundle_whole(
    cli, small_bundle, tmp_path, form, name, damage
):
    folder = shutil.copytree(small_bundle.folder, tmp_path / "bundle")
    assert cli("optimize", folder, form).exit_code == 0
    file = folder / Bundle.load(folder).artifact(name).files[0].file
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(b"changed")
    with pytest.raises(BundleError) as caught:
        Bundle.load(folder).open_session(name)
    told = re.search(r"make it again with `optimize (.*)`$", str(caught.value))
    assert told
    assert cli("optimize", folder, *told[1].split()).exit_code == 0
    Bundle.load(folder).open_session(name).close()
