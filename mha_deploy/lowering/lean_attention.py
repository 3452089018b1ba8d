"""Attention with less around it: heads split by the operator, fewer biases, padding looked up."""

from __future__ import annotations

import onnx

from mha_deploy.lowering.flat_heads import flatten_heads
from mha_deploy.lowering.gathered_padding import gather_padding
from mha_deploy.lowering.lighter_biases import lighten_biases
from mha_deploy.lowering.steps import Lowered, in_turn


def lean_attention(model: onnx.ModelProto) -> Lowered:
    """The model after `flatten_heads`, `lighten_biases` and `gather_padding`.

    Raises:
        GraphError: an `Attention` node stands in a subgraph, or is not what the standard allows.
    """
    return in_turn(model, flatten_heads, lighten_biases, gather_padding)
