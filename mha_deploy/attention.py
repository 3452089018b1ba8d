"""The reference: multi-head attention in PyTorch, the thing that everything else is checked against.

    Attention(Q, K, V) = softmax(Q K^T / sqrt(head_dim)) V          Vaswani et al. (2017), eq. 1
    MultiHead(Q, K, V) = [head_1; ...; head_h] W_O                  section 3.2.2

Masks are boolean, True = keep. A query with no key to look at has context 0. What stands in a
position that nobody may look at (NaN, inf, anything) reaches no other position: masking the scores
is not enough for that, since 0 x NaN = NaN in the product with the values, so it is selected away.

Axes: B batch, S query length, T key length, H heads, D head size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from mha_deploy.errors import FeedError
from mha_deploy.spec import AttentionSpec

PATHS = ("fused", "spelled-out")


class MultiHeadAttention(nn.Module):
    """The block that `spec` describes; inputs come in the order of `spec.signature`.

    `path` picks between two ways to the same numbers: "fused" (scaled_dot_product_attention) and
    "spelled-out", where every product can be looked at. They share the weights.
    """

    def __init__(self, spec: AttentionSpec, path: str = "fused") -> None:
        super().__init__()
        heads, kv_heads = spec.num_heads, spec.num_kv_heads
        self.spec, self.path = spec, path
        self.query = nn.Linear(spec.d_model, heads * spec.head_dim, bias="query" in spec.bias)
        self.key = nn.Linear(spec.kdim, kv_heads * spec.head_dim, bias="key" in spec.bias)
        self.value = nn.Linear(spec.vdim, kv_heads * spec.value_dim, bias="value" in spec.bias)
        self.output = nn.Linear(heads * spec.value_dim, spec.d_model, bias="output" in spec.bias)
        self.norm = nn.Identity() if spec.norm == "none" else nn.LayerNorm(spec.d_model, eps=spec.norm_eps)

    def forward(self, *inputs: Tensor) -> Tensor:
        block = self._admit(inputs)
        q, k, v = self._heads(block)
        if self.path == "spelled-out":
            context = self._spelled_out(q, k, v, block.keep)
        else:
            context = self.fused(q, k, v, block.keep)
        return self._leave(block.residual, context.transpose(1, 2).flatten(2))  # B S d_model

    def fused(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=keep, dropout_p=self._dropout, enable_gqa=self._groups > 1
        )

    def _spelled_out(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
        weights = _weights(q, k.repeat_interleave(self._groups, dim=1), keep)
        weights = functional.dropout(weights, self._dropout)
        return weights @ v.repeat_interleave(self._groups, dim=1)  # B H S D

    def attention_weights(self, *inputs: Tensor) -> Tensor:
        """softmax(Q K^T / sqrt(head_dim)), [B, H, S, T]; rows sum to 1, or to 0 where nothing is kept."""
        block = self._admit(inputs)
        q, k, _ = self._heads(block)
        return _weights(q, k.repeat_interleave(self._groups, dim=1), block.keep)

    def _admit(self, inputs: tuple[Tensor, ...]) -> _Admitted:
        """Query, key and value with the unseen selected away, and one mask for all reasons to mask."""
        spec = self.spec
        _check(spec, inputs)
        mask = inputs[-1] if spec.mask != "none" else None
        query, key, value = inputs[:3] if spec.kind == "cross" else (inputs[0],) * 3
        if spec.kind == "self" and mask is not None and spec.mask == "padding":
            query = _select(mask, query)  # one selection serves all three, and the residual
        residual = query
        query = self.norm(query) if spec.norm == "pre" else query
        if spec.kind == "self":
            key = value = query
        keep = self._keep(query, key, mask)
        if mask is not None and spec.mask == "padding" and spec.kind == "cross":
            key, value = _select(mask, key), _select(mask, value)
        if keep is not None and spec.mask == "full":
            seen = keep.any(dim=2).squeeze(1)  # B 1 S T -> B T
            key, value = _select(seen, key), _select(seen, value)
        return _Admitted(residual, query, key, value, keep)

    def _keep(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor | None:
        """Padding, a full mask and causality as one boolean mask [B, 1, S, T]; None keeps everything.

        It has its whole query axis since ONNX Runtime's Attention does not broadcast that one, and
        causality is part of it since runtimes disagree on what their causal flag means where S != T.
        """
        B, S, T = query.shape[0], query.shape[1], key.shape[1]
        keep = None
        if mask is not None:
            keep = mask[:, None] if self.spec.mask == "full" else mask[:, None, None, :]
        if self.spec.causal:
            rows = torch.arange(S, device=query.device)[:, None]
            causal = rows >= torch.arange(T, device=query.device)  # S T
            keep = causal if keep is None else keep & causal
        return None if keep is None else keep.expand(B, 1, S, T)

    def _heads(self, block: _Admitted) -> tuple[Tensor, Tensor, Tensor]:
        q = self.query(block.query).unflatten(-1, (self.spec.num_heads, -1))  # B S H D
        k = self.key(block.key).unflatten(-1, (self.spec.num_kv_heads, -1))  # B T Hkv D
        v = self.value(block.value).unflatten(-1, (self.spec.num_kv_heads, -1))  # B T Hkv Dv
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _leave(self, residual: Tensor, context: Tensor) -> Tensor:
        """`context` [..., H*Dv] through the output projection, residual and norm."""
        y: Tensor = self.output(context)
        if self.spec.norm == "pre":
            y = residual + y
        elif self.spec.norm == "post":
            y = self.norm(residual + y)
        return y

    @property
    def _groups(self) -> int:
        """Query heads that share a key/value head: head h looks at key/value head h // groups."""
        return self.spec.num_heads // self.spec.num_kv_heads

    @property
    def _dropout(self) -> float:
        return self.spec.dropout if self.training else 0.0


class _Admitted(NamedTuple):
    residual: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    keep: Tensor | None


def _select(keep: Tensor, x: Tensor) -> Tensor:
    """`x` [B, T, d] where `keep` [B, T], else 0, whatever `x` holds there."""
    return torch.where(keep[..., None], x, 0.0)


def _weights(q: Tensor, k: Tensor, keep: Tensor | None) -> Tensor:
    scores: Tensor = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5  # B H S T
    if keep is None:
        return scores.softmax(dim=-1)
    # softmax over a row of -inf is NaN; the second selection makes that row 0.
    return torch.where(keep, scores.masked_fill(~keep, -torch.inf).softmax(dim=-1), 0.0)


def _check(spec: AttentionSpec, inputs: tuple[Tensor, ...]) -> None:
    tensors = spec.signature.inputs
    if len(inputs) != len(tensors):
        raise FeedError(f"got {len(inputs)} inputs; expected {', '.join(map(str, tensors))}")
    for tensor, given in zip(tensors, inputs, strict=True):
        right_kind = (given.dtype == torch.bool) == (tensor.dtype == "bool")
        if given.ndim != len(tensor.shape) or not right_kind:
            has = f"shape {list(given.shape)} and dtype {str(given.dtype).removeprefix('torch.')}"
            raise FeedError(f"input {tensor.name!r} has {has}; expected {tensor}")
