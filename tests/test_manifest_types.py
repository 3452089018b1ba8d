"""A manifest whose values are of another kind than `export` writes: one line of error, from every command."""

from __future__ import annotations

import json
import math
import re
import shutil
from copy import deepcopy

import pytest

from mha_deploy.bundle import Bundle
from mha_deploy.errors import BundleError
from mha_deploy.file_record import FileRecord
from mha_deploy.manifest import CHECKPOINT, Artifact, Choice, Manifest
from mha_deploy.packed import graph_signature
from mha_deploy.precision import Precision
from mha_deploy.search.routing import routed_artifact
from mha_deploy.signature import Dim
from mha_deploy.spec import AttentionSpec, WeightsSource
from mha_deploy.tensorrt.passport import Passport

SPEC = AttentionSpec(32, 4, dims=(Dim("seq", 1, 8, 16),), weights=WeightsSource("w.bin", "layer.3."))
VALUES = (None, True, 7, -1, 1.5, math.nan, math.inf, "x", [], [None], {})
# What is read as in the first two artifacts, and would only take time again.
SAME = re.compile(r"artifacts\[[23]\]\.signature\.|artifacts\[2\]\.details\.routes\.long\.")
# What no command reads: the machine that exported, but for its versions, and an engine's passport, which
# `tensorrt.passport` reads.
FREE = re.compile(r"provenance\.machine\.(?!versions)|artifacts\[\d\]\.details\.passport\.(?!command)")


def artifact(name="canonical", runtime="onnxruntime", layout="padded", **details):
    signature = graph_signature(SPEC) if layout == "packed" else SPEC.signature
    files = (FileRecord(f"{name}.onnx", "0" * 64, 3),)
    return Artifact(name, runtime, Precision.FP32, signature, files, details, layout)


CANONICAL = artifact(opset=23, made_from="w", axes_proved_at=["seq=1"], axes_not_reached=["seq=16"])
TUNED = artifact(
    "tuned",
    settings={"device": "cpu", "threads": 1, "spinning": False},
    max_relative_error=0.01,
    batch_dependent=False,
    keep_fp32=["node"],
    kept_fp32=["node"],
    lowering=["rule at node"],
)
MADE = Manifest(
    SPEC,
    FileRecord("weights.safetensors", "1" * 64, 5),
    (
        CANONICAL,
        artifact("packed", layout="packed", io="fp32", checked="10 cases", twin_of="other"),
        routed_artifact(TUNED, CANONICAL, 8),
        artifact("engine", "tensorrt-rtx", passport={"command": "build-engine BUNDLE", "key": "k"}),
    ),
    {
        "mha_deploy": "0.1.0",
        "created": "2026-01-01T00:00:00+00:00",
        "checkpoint": dict.fromkeys(CHECKPOINT, ""),
        "machine": {"cpu": "some", "usable_cpus": 2, "versions": {"torch": "2.9.0"}},
    },
    (FileRecord("inputs.safetensors", "2" * 64, 5),),
    (Choice("machine", "cpu", 1, "canonical", ("0" * 64,)),),
)
WHOLE = json.loads(json.dumps(MADE.to_json()))


def places(value, place=""):
    """Every place within a JSON value, as an error names it, with the keys that lead there."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        at = f"{place}[{key}]" if isinstance(key, int) else f"{place}.{key}".lstrip(".")
        yield at, (key,), inner
        yield from ((within, (key, *keys), found) for within, keys, found in places(inner, at))


def changed(keys, value, whole=WHOLE):
    data = deepcopy(whole)
    holder = data
    for key in keys[:-1]:
        holder = holder[key]
    holder[keys[-1]] = value
    return data


def could_be_meant(place, value, there):
    """`value` is of the kind that is there; what it says is not this test's concern."""
    if isinstance(value, bool) or isinstance(there, bool):
        return isinstance(value, bool) and isinstance(there, bool)
    if re.search(r"\.shape\[\d\]$", place):  # a size or a dim's name
        return value in ("x", 7)
    if isinstance(there, int | float):
        return isinstance(value, int | type(there)) and math.isfinite(value) and value >= 0
    return isinstance(value, type(there)) and value != [None]


def said(folder, data):
    (folder / "manifest.json").write_text(json.dumps(data))
    with pytest.raises(BundleError) as caught:
        Manifest.read(folder)
    return str(caught.value)


def test_the_manifest_that_is_changed_here_is_sound(tmp_path):
    (tmp_path / "manifest.json").write_text(json.dumps(WHOLE))
    assert Manifest.read(tmp_path) == MADE


@pytest.mark.parametrize("top", WHOLE)
def test_a_value_of_another_kind_is_refused_by_its_place_wherever_it_stands(tmp_path, top):
    tried = 0
    for place, keys, there in places(WHOLE):
        for value in VALUES if keys[0] == top and not (FREE.match(place) or SAME.match(place)) else ():
            if could_be_meant(place, value, there):
                continue
            message = said(tmp_path, changed(keys, value))
            assert "\n" not in message
            assert place in message, (value, message)
            assert re.search(r"manifest\.json is damaged: .*; export again$", message), (place, value)
            tried += 1
    assert tried >= len(VALUES) / 2


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("spec", "name"), 7, "spec.name is 7, expected a text"),
        (("spec", "bias"), {}, "spec.bias is {}, expected a list"),
        (("spec", "dims"), [], "spec.dims is [], expected a list that is not empty"),
        (("weights", "bytes"), True, "weights.bytes is True, expected a whole number of at least 0"),
        (("inputs", 0), None, "inputs[0] is None, expected an object"),
        (
            ("artifacts", 2, "details", "routes", "short", "details", "settings", "threads"),
            1.5,
            "artifacts[2].details.routes.short.details.settings.threads is 1.5, expected a whole number",
        ),
        (("artifacts", 2, "details"), {}, "artifacts[2].details has no 'routes'"),
        (("artifacts", 3, "details"), {}, "artifacts[3].details has no 'passport'"),
        (
            ("choices", 0),
            {},
            "choices[0] lacks 'artifact', 'artifact_sha256', 'device', 'machine', 'threads'",
        ),
        (("provenance", "machine"), {}, "provenance.machine has no 'versions'"),
    ],
)
def test_the_message_says_what_was_given_and_what_was_expected(tmp_path, keys, value, message):
    assert f"manifest.json is damaged: {message}" in said(tmp_path, changed(keys, value)).replace(
        "the stored spec is incomplete or malformed: ", ""
    )


@pytest.mark.parametrize(
    ("of", "keys", "value"),
    [
        ("canonical", ("inputs", 1, "name"), "mask2"),
        ("canonical", ("inputs", 0, "dtype"), "float64"),
        ("canonical", ("outputs", 0, "shape", 2), 7),
        ("canonical", ("outputs",), []),
        ("canonical", ("dims", 1, "max"), 32),
        ("packed", ("inputs", 0, "shape"), ["rows", 32]),
    ],
)
def test_an_artifact_with_another_signature_than_the_block_is_refused(tmp_path, of, keys, value):
    number = [each["name"] for each in WHOLE["artifacts"]].index(of)
    message = said(tmp_path, changed(("artifacts", number, "signature", *keys), value))
    assert f"is damaged: artifact '{of}' is x [" in message
    assert ", by the spec it is x [" in message


def test_a_route_with_another_signature_than_the_block_is_refused(tmp_path):
    keys = ("artifacts", 2, "details", "routes", "long", "signature", "outputs")
    assert "artifact 'canonical' is x [" in said(tmp_path, changed(keys, []))


def test_what_is_said_of_a_tensor_for_people_may_be_another(tmp_path):
    data = changed(("artifacts", 0, "signature", "inputs", 1, "meaning"), "of an older version")
    (tmp_path / "manifest.json").write_text(json.dumps(data))
    assert Manifest.read(tmp_path).artifacts[0].signature.inputs[1].meaning == "of an older version"


@pytest.mark.parametrize("provenance", [None, [], {"mha_deploy": 3}])
def test_a_newer_format_is_told_from_damage_whatever_else_it_holds(tmp_path, provenance):
    message = said(tmp_path, {"format": 2, "provenance": provenance})
    assert "has bundle format 2, written by mha-deploy a newer version; this version reads up to 1" in message


def test_half_a_character_is_damage(tmp_path):
    assert "surrogates not allowed; export again" in said(tmp_path, changed(("spec", "name"), "\ud800"))


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect",),
        ("inspect", "--json"),
        ("verify",),
        ("bench", "--seconds", "0.01"),
        ("serve", "--port", "0"),
        ("load", "--rate", "1"),
        ("optimize",),
        ("optimize", "--precision", "fp16"),
        ("build-engine", "--fp16"),
    ],
    ids=" ".join,
)
def test_every_command_ends_with_2_and_one_line(cli, tmp_path, arguments):
    (tmp_path / "manifest.json").write_text(json.dumps(changed(("artifacts", 0, "details"), None)))
    command, *options = arguments
    result = cli(command, tmp_path, *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        f"error: {tmp_path}/manifest.json is damaged: artifacts[0].details is None, expected an object; "
        "export again\n"
    )


@pytest.mark.parametrize("change", [{"head_dim": 7}, {"bias": []}])
def test_weights_of_another_block_than_the_spec_are_refused(cli, small_bundle, tmp_path, change):
    folder = shutil.copytree(small_bundle.folder, tmp_path / "bundle")
    data = json.loads((folder / "manifest.json").read_text())
    data["spec"] |= change
    (folder / "manifest.json").write_text(json.dumps(data))
    with pytest.raises(BundleError, match=r"does not hold the block that the manifest's spec .*query\.bias"):
        Bundle.load(folder).reference()
    result = cli("verify", folder)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)


def test_a_bundle_without_artifacts_says_which_is_missing(tmp_path):
    (tmp_path / "manifest.json").write_text(json.dumps({**WHOLE, "artifacts": [], "choices": []}))
    with pytest.raises(BundleError, match=r"has no artifact 'canonical'; it has none$"):
        Bundle.load(tmp_path).artifact()


def test_a_passport_is_read_as_strictly():
    whole = {
        **{name: "text" for name, of in Passport.__annotations__.items() if of == "str"},
        **{name: ["text"] for name, of in Passport.__annotations__.items() if of == "tuple[str, ...]"},
        "plan_bytes": 3,
        "activation_bytes": 3,
        "decomposed": False,
        "options": {"tf32": False},
        "profiles": [{"seq": [1, 8, 16]}],
        "attentions": [{"name": "n", "fused": True, "kernel": "k", "reason": ""}],
        "lowering": [{"node": "n", "rule": "r", "why": "w"}],
    }
    assert Passport.from_json(whole).to_json() == whole
    for place, keys, there in places(whole):
        for value in VALUES:
            if could_be_meant(place, value, there) or place.startswith("options."):
                continue
            with pytest.raises(BundleError) as caught:
                Passport.from_json(changed(keys, value, whole))
            assert f"the engine's passport is damaged: {place}" in str(caught.value)
    with pytest.raises(
        BundleError, match=r"seq is \[\], expected a list of min, opt and max; build the engine"
    ):
        Passport.from_json({**whole, "profiles": [{"seq": []}]})
