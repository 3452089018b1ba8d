"""File formats, dtypes and seeds: how tensors get in, whatever their layout."""

import json
import resource
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from attention_modules import SPEC, Conv1D, Packed, own_tensors, saved
from safetensors.torch import save_file

from mha_deploy.spec import WeightsSource
from mha_deploy.weights import read_weights


@pytest.mark.parametrize("wrap", [dict, lambda s: {"state_dict": s, "epoch": 3}, lambda s: {"model": s}])
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "older pickle"])
def test_a_torch_state_dict_is_read_plain_or_nested_whatever_the_suffix(tmp_path, wrap, zipped):
    file = tmp_path / "weights.safetensors"
    torch.save(wrap(own_tensors(SPEC)), file, _use_new_zipfile_serialization=zipped)
    loaded = read_weights(SPEC.with_weights(file)).tensors
    assert all(torch.equal(loaded[name], tensor) for name, tensor in own_tensors(SPEC).items())


def test_a_safetensors_file_is_known_by_its_content(tmp_path):
    file = saved(tmp_path / "pytorch_model.bin", own_tensors(SPEC))
    assert read_weights(SPEC.with_weights(file)).stored_dtype == "float32"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("save", [save_file, torch.save])
def test_other_float_types_are_converted_and_their_name_is_kept(tmp_path, dtype, save):
    tensors = {name: tensor.to(dtype) for name, tensor in own_tensors(SPEC).items()}
    save(tensors, tmp_path / "model")
    loaded = read_weights(SPEC.with_weights(tmp_path / "model"))
    assert loaded.stored_dtype == str(dtype).removeprefix("torch.")
    for name, tensor in tensors.items():
        assert loaded.tensors[name].dtype == torch.float32
        assert torch.equal(loaded.tensors[name], tensor.float())


def test_mixed_float_types_are_both_named(tmp_path):
    tensors = own_tensors(SPEC) | {"query.weight": torch.zeros(24, 24, dtype=torch.bfloat16)}
    file = saved(tmp_path / "model.safetensors", tensors)
    assert read_weights(SPEC.with_weights(file)).stored_dtype == "bfloat16, float32"


@pytest.mark.parametrize("save", [save_file, torch.save])
def test_every_tensor_is_contiguous_and_has_memory_of_its_own(tmp_path, save):
    state = Packed(SPEC, "c_attn", "c_proj", Conv1D).state_dict()
    save(state, tmp_path / "model")
    loaded = read_weights(SPEC.with_weights(tmp_path / "model")).tensors
    for tensor in loaded.values():
        assert tensor.is_contiguous()
        assert tensor.untyped_storage().nbytes() == 4 * tensor.numel()
        assert not tensor.requires_grad


def test_the_causal_mask_that_gpt2_stores_beside_its_weights_is_ignored(tmp_path):
    module = Packed(SPEC, "c_attn", "c_proj", Conv1D)
    buffers = {"bias": torch.ones(1, 1, 8, 8, dtype=torch.bool), "masked_bias": torch.tensor(-1e4)}
    file = saved(tmp_path / "model.safetensors", module.state_dict() | buffers, "h.0.attn.")
    assert read_weights(SPEC.with_weights(file, "h.0.attn.")).layout.startswith("GPT-2")


def test_layer_1_is_not_taken_for_layer_10_when_the_dot_is_forgotten(tmp_path):
    first, tenth = own_tensors(SPEC), own_tensors(replace(SPEC, weights=WeightsSource(seed=10)))
    both = {f"layer.1.{n}": t for n, t in first.items()} | {f"layer.10.{n}": t for n, t in tenth.items()}
    loaded = read_weights(SPEC.with_weights(saved(tmp_path / "m", both), "layer.1")).tensors
    assert torch.equal(loaded["query.weight"], first["query.weight"])


def peak_bytes():
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def file_with_a_hole(folder, tensors, hole):
    """A safetensors file of layer.0 and of one more tensor, `hole` bytes large, that takes no disk."""
    small = saved(folder / "small", tensors, "layer.0.").read_bytes()
    length = int.from_bytes(small[:8], "little")
    header, data = json.loads(small[8 : 8 + length]), small[8 + length :]
    end = len(data) + hole
    header["other.weight"] = {"dtype": "F32", "shape": [hole // 4], "data_offsets": [len(data), end]}
    text = json.dumps(header).encode()
    with (folder / "huge").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + data)
        file.truncate(8 + len(text) + end)
    return folder / "huge"


def test_one_layer_of_a_large_file_is_read_without_the_rest(tmp_path):
    tensors = own_tensors(SPEC)
    file = file_with_a_hole(tmp_path, tensors, 2**32)
    before = peak_bytes()
    loaded = read_weights(SPEC.with_weights(file, "layer.0.")).tensors
    assert peak_bytes() - before < 2**30
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


CRAMPED = """
import resource, sys
from mha_deploy.spec import AttentionSpec
from mha_deploy.weights import read_weights
import torch
resource.setrlimit(resource.RLIMIT_AS, (2**35, 2**35))
read_weights(AttentionSpec(d_model=24, num_heads=4).with_weights(sys.argv[1], "layer.0."))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux holds a process to RLIMIT_AS")
def test_a_file_that_cannot_be_mapped_is_said_to_be_too_large(tmp_path):
    file = file_with_a_hole(tmp_path, own_tensors(SPEC), 2**36)
    done = subprocess.run([sys.executable, "-c", CRAMPED, file], capture_output=True, text=True, check=False)
    assert f"WeightsError: cannot map checkpoint {file} into memory" in done.stderr


def test_seeded_weights_depend_on_the_seed_alone_and_leave_the_global_random_state():
    spec = replace(SPEC, norm="pre", weights=WeightsSource(seed=7))
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = read_weights(spec)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    second = read_weights(spec)
    other = own_tensors(replace(spec, weights=WeightsSource(seed=8)))
    assert first.layout == "random, seed 7"
    for name, tensor in first.tensors.items():
        assert torch.equal(tensor, second.tensors[name])
        assert not torch.equal(tensor, other[name])


def test_seeded_matrices_lie_within_xaviers_bound_and_no_bias_is_zero():
    spec = replace(SPEC, norm="post")
    tensors = own_tensors(spec)
    bound = (6 / (24 + 24)) ** 0.5
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            assert 0.9 * bound < tensor.abs().max() <= bound
        elif name != "norm.weight":
            assert 0.03 < tensor.abs().mean() < 0.3
    assert abs(tensors["norm.weight"].mean() - 1) < 0.1


def test_the_matrices_of_a_seed_do_not_change_with_bias_or_norm():
    bare, full = own_tensors(replace(SPEC, bias=())), own_tensors(replace(SPEC, norm="pre"))
    assert all(torch.equal(tensor, full[name]) for name, tensor in bare.items())


def test_importing_the_package_does_not_import_torch():
    code = "import sys, mha_deploy.weights; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
