"""The reference over packed tokens: the same weights and the same core, padding in the core alone."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from mha_deploy.attention import MultiHeadAttention


class PackedAttention(MultiHeadAttention):
    """`MultiHeadAttention` whose inputs come in the order of `packed.graph_signature`.

    Projections, residual and norm act on tokens [tokens, width]; only the core sees rows.
    """

    def forward(self, *inputs: Tensor) -> Tensor:
        spec = self.spec
        *data, mask, place = inputs
        if spec.kind == "cross":
            query, key, value, q_index, kv_index = data
        else:
            query, q_index = data
            kv_index = q_index
        residual = query
        query = self.norm(query) if spec.norm == "pre" else query
        if spec.kind == "self":
            key = value = query
        q = _set_out(self.query(query), q_index, spec.num_heads)  # B H S D
        k = _set_out(self.key(key), kv_index, spec.num_kv_heads)  # B Hkv T D
        v = _set_out(self.value(value), kv_index, spec.num_kv_heads)  # B Hkv T Dv
        context = self.fused(q, k, v, self._keep(q_index, kv_index, mask))
        rows = context.transpose(1, 2).flatten(2).flatten(0, 1)  # B*S H*Dv
        return self._leave(residual, functional.embedding(place, rows))


def _set_out(projected: Tensor, index: Tensor, heads: int) -> Tensor:
    """Tokens [tokens, heads*d] at `index` [B, S], as [B, heads, S, d]; `embedding` exports as one Gather."""
    rows: Tensor = functional.embedding(index, projected)  # B S heads*d
    return rows.reshape(*index.shape, heads, -1).transpose(1, 2)
