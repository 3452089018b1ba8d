"""Attention modules as others write them, and a plain one to compare with; for the tests of weights."""

import warnings

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from mha_deploy.errors import WeightsError
from mha_deploy.spec import PROJECTIONS, AttentionSpec
from mha_deploy.weights import expected_shapes, read_weights

SPEC = AttentionSpec(d_model=24, num_heads=4)
BERT_NAMES = ("self.query", "self.key", "self.value", "output.dense")


def attend(spec, tensors, query, key, value):
    """Head by head, in float64, from the formulas of Vaswani et al. (2017)."""

    def project(name, x):
        bias = tensors.get(f"{name}.bias", torch.zeros(1))
        return x @ tensors[f"{name}.weight"].double().T + bias.double()

    q, k, v = project("query", query), project("key", key), project("value", value)
    heads = []
    for head in range(spec.num_heads):
        narrow = head * spec.num_kv_heads // spec.num_heads
        q_head = q[..., head * spec.head_dim : (head + 1) * spec.head_dim]
        k_head = k[..., narrow * spec.head_dim : (narrow + 1) * spec.head_dim]
        v_head = v[..., narrow * spec.value_dim : (narrow + 1) * spec.value_dim]
        scores = q_head @ k_head.transpose(-1, -2) / spec.head_dim**0.5
        heads.append(scores.softmax(-1) @ v_head)
    return project("output", torch.cat(heads, -1))


class Conv1D(nn.Module):
    """GPT-2's linear layer: the matrix is stored [in, out]."""

    def __init__(self, width_out, width_in):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width_in, width_out) * 0.3)
        self.bias = nn.Parameter(torch.randn(width_out))

    def forward(self, x):
        return torch.addmm(self.bias, x.flatten(0, 1), self.weight).unflatten(0, x.shape[:2])


def sdpa(spec, q, k, v):
    q, k, v = (
        x.unflatten(-1, (-1, x.shape[-1] // n)).transpose(1, 2)
        for x, n in zip((q, k, v), (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), strict=True)
    )
    grouped = spec.num_heads != spec.num_kv_heads
    return nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=grouped).transpose(1, 2).flatten(2)


def place(module, name, child):
    """Put `child` at a dotted name, as `state_dict` will spell it."""
    *parents, last = name.split(".")
    for parent in parents:
        if parent not in module._modules:
            module.add_module(parent, nn.Module())
        module = module._modules[parent]
    module.add_module(last, child)


class Separate(nn.Module):
    def __init__(self, spec, *names):
        super().__init__()
        self.spec, self.names = spec, names
        for name, projection in zip(names, PROJECTIONS, strict=True):
            width_out, width_in = expected_shapes(spec)[f"{projection}.weight"]
            place(self, name, nn.Linear(width_in, width_out, bias=projection in spec.bias))

    def forward(self, query, key, value):
        to_q, to_k, to_v, to_y = (self.get_submodule(name) for name in self.names)
        return to_y(sdpa(self.spec, to_q(query), to_k(key), to_v(value)))


class Packed(nn.Module):
    def __init__(self, spec, qkv, output, linear):
        super().__init__()
        self.spec, self.names = spec, (qkv, output)
        place(self, qkv, linear(3 * spec.d_model, spec.d_model))
        place(self, output, linear(spec.d_model, spec.d_model))

    def forward(self, query, *_):
        to_qkv, to_y = (self.get_submodule(name) for name in self.names)
        return to_y(sdpa(self.spec, *to_qkv(query).chunk(3, -1)))


class TorchMHA(nn.MultiheadAttention):
    def forward(self, query, key, value):
        return super().forward(query, key, value, need_weights=False)[0]


def torch_mha(spec):
    module = TorchMHA(
        spec.d_model, spec.num_heads, bias=bool(spec.bias), kdim=spec.kdim, vdim=spec.vdim, batch_first=True
    )
    for name, parameter in module.named_parameters():
        if "bias" in name:  # PyTorch starts them at 0, where a lost bias would not show
            nn.init.normal_(parameter)
    return module


def linear(width_out, width_in):
    return nn.Linear(width_in, width_out)


def saved(path, tensors, prefix=""):
    save_file({prefix + name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return path


def own_tensors(spec):
    return read_weights(spec).tensors


def said(spec, file, prefix=""):
    """The message, which names the file; nothing else is said on the way."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(WeightsError) as error:
            read_weights(spec.with_weights(file, prefix))
    assert caught == []
    message = str(error.value)
    assert f"checkpoint {file}" in message
    return message
