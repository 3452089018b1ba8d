"""The block as a user of PyTorch writes it, for the peers that start from a module."""

from __future__ import annotations

import torch
from peers.task import Task
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional


class SelfAttention(nn.Module):
    """Multi-head self attention over x [batch, seq, d_model], mask [batch, seq] (True = keep)."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(d_model, d_model)
        self.key = nn.Linear(d_model, d_model)
        self.value = nn.Linear(d_model, d_model)
        self.output = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (self._heads(layer(x)) for layer in (self.query, self.key, self.value))
        context = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        return self.output(context.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # B H S D


def load_block(task: Task) -> SelfAttention:
    """In evaluation mode, its weights needing no gradients; sets PyTorch's threads."""
    torch.set_num_threads(task.threads)
    module = SelfAttention(task.d_model, task.num_heads)
    module.load_state_dict(load_file(task.weights))
    return module.eval().requires_grad_(requires_grad=False)


def example(task: Task) -> tuple[Tensor, Tensor]:
    """Inputs to trace with."""
    mask = torch.ones(2, 16, dtype=torch.bool)
    mask[1, 9:] = False
    return torch.randn(2, 16, task.d_model), mask
