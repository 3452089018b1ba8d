"""Golden cases through the command line: export with their weights, infer with their inputs.

`expected` was computed in fp64 by an implementation independent of this project.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mha_deploy.verification import verify

GOLDEN = Path(__file__).parent / "golden"
TOLERANCE = 5e-6

SPECS = {
    "torch-mha-self": "d_model = 128\nnum_heads = 8",
    "torch-mha-cross-kdim-vdim": 'kind = "cross"\nd_model = 96\nnum_heads = 4\nkdim = 80\nvdim = 64',
    "gpt2-causal": 'd_model = 128\nnum_heads = 4\ncausal = true\nmask = "none"',
}
INPUTS = {
    "torch-mha-self": lambda io: {"x": io["query"], "mask": ~io["key_padding_mask"]},
    "torch-mha-cross-kdim-vdim": lambda io: {
        **{name: io[name] for name in ("query", "key", "value")},
        "mask": ~io["key_padding_mask"],
    },
    "gpt2-causal": lambda io: {"x": io["hidden_states"]},
}


def spec_file(folder: Path, attention: str) -> Path:
    path = folder / "block.toml"
    path.write_text(f"[attention]\n{attention}\n")
    return path


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_a_golden_case_comes_out_as_expected(name, suffix, cli, tmp_path):
    io = load_file(GOLDEN / f"{name}.io.safetensors")
    bundle, inputs, out = tmp_path / "bundle", tmp_path / f"inputs{suffix}", tmp_path / f"y{suffix}"
    feeds = INPUTS[name](io)
    np.savez(inputs, **feeds) if suffix == ".npz" else save_file(feeds, inputs)
    weights = GOLDEN / f"{name}.safetensors"
    exported = cli("export", spec_file(tmp_path, SPECS[name]), "-o", bundle, "--weights", weights)
    assert exported.exit_code == 0, exported.stderr
    inferred = cli("infer", bundle, inputs, "-o", out)
    assert inferred.exit_code == 0, inferred.stderr
    y = np.load(out)["y"] if suffix == ".npz" else load_file(out)["y"]
    assert y.shape == io["expected"].shape
    # Self attention does not compute what padded queries would give: nobody reads those rows.
    rows = feeds["mask"] if name == "torch-mha-self" else np.ones(y.shape[:2], bool)
    assert np.abs(y - io["expected"])[rows].max() <= TOLERANCE


def test_torchs_own_mask_is_taken_by_the_name_of_its_form(cli, tmp_path):
    io = load_file(GOLDEN / "torch-mha-cross-kdim-vdim.io.safetensors")
    feeds = {name: io[name] for name in ("query", "key", "value")} | {"mask": io["key_padding_mask"]}
    save_file(feeds, tmp_path / "inputs.safetensors")
    bundle, out = tmp_path / "bundle", tmp_path / "y.safetensors"
    spec = spec_file(tmp_path, SPECS["torch-mha-cross-kdim-vdim"])
    cli("export", spec, "-o", bundle, "--weights", GOLDEN / "torch-mha-cross-kdim-vdim.safetensors")
    result = cli("infer", bundle, tmp_path / "inputs.safetensors", "-o", out, "--mask-form", "ignore")
    assert result.exit_code == 0, result.stderr
    assert np.abs(load_file(out)["y"] - io["expected"]).max() <= TOLERANCE


def test_rotary_weights_are_refused_until_rotary_is_supported(cli, tmp_path):
    attention = "d_model = 256\nnum_heads = 8\nnum_kv_heads = 2\nbias = false\ncausal = true\nmask = 'none'"
    weights = GOLDEN / "llama-gqa-rope.safetensors"
    result = cli("export", spec_file(tmp_path, attention), "-o", tmp_path / "bundle", "--weights", weights)
    assert result.exit_code == 2
    assert "rotary position embedding; that is not supported yet" in result.stderr
    assert not (tmp_path / "bundle").exists()


def test_the_demo_layer_equals_its_golden_output_to_3e_6(demo_bundle, cli, tmp_path):
    io = load_file(GOLDEN / "minilm-l6-v2-layer3.io.safetensors")
    save_file({"x": io["hidden_states"], "lengths": io["lengths"]}, tmp_path / "inputs.safetensors")
    out = tmp_path / "y.safetensors"
    result = cli("infer", demo_bundle.folder, tmp_path / "inputs.safetensors", "-o", out)
    assert result.exit_code == 0, result.stderr
    assert np.abs(load_file(out)["y"] - io["expected"]).max() <= 3e-6


def test_the_demo_bundle_passes_verification_and_says_so_in_json(demo_bundle, cli):
    result = cli("verify", demo_bundle.folder, "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 0
    assert report["passed"] is True
    assert {"min", "max", "real-inputs"} <= {case["name"] for case in report["cases"]}
    for case in report["cases"]:
        assert case["passed"] is True
        assert case["artifact"] == "canonical"
        assert 0 <= case["max_abs_error"] <= case["allowed"]


def test_the_demo_reference_equals_its_golden_output(demo_bundle):
    io = load_file(GOLDEN / "minilm-l6-v2-layer3.io.safetensors")
    requests = demo_bundle.real_inputs()
    assert [request.q_len for request in requests] == io["lengths"].tolist()
    np.testing.assert_array_equal(np.concatenate([r.tensors["x"] for r in requests]), io["hidden_states"])


def test_verify_accepts_cases_of_the_callers_own(demo_bundle):
    from mha_deploy.cases import sized_case

    report = verify(demo_bundle, cases=[sized_case(demo_bundle.spec, {"batch": 2, "seq": 3})])
    assert [case.name for case in report.cases] == ["batch=2, seq=3"]
    assert report.passed
