"""What is said about a file that is no checkpoint, or not all of one."""

import json
import pickle
import warnings
from argparse import Namespace

import numpy as np
import pytest
import torch
from attention_modules import BERT_NAMES, SPEC, Separate, own_tensors, said, saved
from safetensors.torch import save_file
from torch import nn


def test_a_file_that_does_not_exist_is_said_in_one_line(tmp_path):
    assert said(SPEC, tmp_path / "nope.pt").endswith("nope.pt: No such file or directory")


def test_a_folder_is_answered_with_the_checkpoints_in_it(tmp_path):
    saved(tmp_path / "model.safetensors", own_tensors(SPEC))
    (tmp_path / "config.json").write_text("{}")
    message = said(SPEC, tmp_path)
    assert message.endswith("is a folder; give the checkpoint file itself (it holds model.safetensors)")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is empty"),
        (b"# a readme, and no weights at all\n", "is neither a safetensors file nor a PyTorch checkpoint"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer, not the weights"),
        (b'{"hidden_size": 24}', "is a JSON file without a weight_map"),
        (b'{"hidden_size": ', "looks like JSON and is not valid"),
        (pickle.dumps({"a": 1}), "is a pickle that PyTorch does not load safely"),
    ],
)
def test_a_foreign_file_is_said_in_one_line(tmp_path, content, expected):
    (tmp_path / "w.bin").write_bytes(content)
    message = said(SPEC, tmp_path / "w.bin")
    assert expected in message
    assert "\n" not in message


def test_a_numpy_archive_is_no_checkpoint(tmp_path):
    np.savez(tmp_path / "w.npz", x=np.zeros(3))
    assert "is damaged, cut off, or no PyTorch checkpoint" in said(SPEC, tmp_path / "w.npz")


@pytest.mark.parametrize("kept", [4, 8, 20, 300, -1])
def test_a_cut_off_safetensors_file_is_said_in_one_line(tmp_path, kept):
    file = saved(tmp_path / "w.safetensors", own_tensors(SPEC))
    file.write_bytes(file.read_bytes()[:kept])
    message = said(SPEC, file)
    assert "is a damaged or cut-off safetensors file" in message
    assert "\n" not in message


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "older pickle"])
@pytest.mark.parametrize("kept", [50, 700, -10])
def test_a_cut_off_torch_file_is_said_in_one_line(tmp_path, zipped, kept):
    file = tmp_path / "w.pt"
    torch.save(own_tensors(SPEC), file, _use_new_zipfile_serialization=zipped)
    file.write_bytes(file.read_bytes()[:kept])
    message = said(SPEC, file)
    assert "is damaged, cut off, or no PyTorch checkpoint" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        (nn.Linear(2, 2), "holds a whole module (torch.nn.modules.linear.Linear), not a state dict"),
        (Separate(SPEC, *BERT_NAMES), "holds a Python object (attention_modules.Separate) beside tensors"),
        (
            {"state_dict": {}, "args": Namespace(lr=1)},
            "holds a Python object (argparse.Namespace) beside tensors",
        ),
        (torch.zeros(3), "holds a Tensor, expected a state dict"),
        ([torch.zeros(3)], "holds a list, expected a state dict"),
    ],
)
def test_more_or_less_than_tensors_is_refused_with_what_to_save(tmp_path, held, expected):
    torch.save(held, tmp_path / "w.pt")
    message = said(SPEC, tmp_path / "w.pt")
    assert expected in message
    assert message.endswith('with torch.save(model.state_dict(), "weights.pt"), and give that file')


def test_a_torchscript_program_is_refused_with_what_to_save(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2)), tmp_path / "w.pt")
    assert "is a TorchScript program; save the tensors alone" in said(SPEC, tmp_path / "w.pt")


@pytest.mark.parametrize("save", [save_file, torch.save])
def test_a_checkpoint_without_tensors_is_said_to_hold_none(tmp_path, save):
    save({}, tmp_path / "w")
    assert said(SPEC, tmp_path / "w").endswith("holds no tensors; expected a state dict")


def index_file(folder, last_shard="model-00002-of-00002.safetensors"):
    names = [
        f"layers.{i}.self_attn.{n}"
        for i in range(2)
        for n in ("q_proj.weight", "k_proj.weight", "v_proj.weight", "out_proj.weight")
    ]
    shards = (
        ["model-00001-of-00002.safetensors"] * 4 + ["model-00002-of-00002.safetensors"] * 3 + [last_shard]
    )
    file = folder / "model.safetensors.index.json"
    file.write_text(json.dumps({"metadata": {}, "weight_map": dict(zip(names, shards, strict=True))}))
    return file


def test_an_index_is_answered_with_the_shard_that_holds_the_layer(tmp_path):
    message = said(SPEC, index_file(tmp_path), "layers.1.self_attn")
    assert "is the index of a sharded checkpoint and holds no weights" in message
    assert message.endswith(f"give {tmp_path / 'model-00002-of-00002.safetensors'}")


def test_a_layer_over_two_shards_must_be_put_together(tmp_path):
    message = said(SPEC, index_file(tmp_path, "model-00001-of-00002.safetensors"), "layers.1.self_attn.")
    assert "is spread over model-00001-of-00002.safetensors and model-00002-of-00002.safetensors" in message


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [("", "pick one layer by its prefix first"), ("layer.1.", "no tensor has prefix 'layer.1.'")],
)
def test_an_index_asked_for_no_layer_it_has_suggests_one(tmp_path, prefix, expected):
    message = said(SPEC, index_file(tmp_path), prefix)
    assert expected in message
    assert "did you mean --prefix 'layers." in message
