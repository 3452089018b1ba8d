"""Masks [batch, key] in a graph: the one that all queries of an attention share, and those that zero rows."""

from __future__ import annotations

from collections.abc import Mapping

from onnx import NodeProto, TensorProto, numpy_helper

from mha_deploy.lowering.attention_node import AttentionNode
from mha_deploy.lowering.graph_edit import TensorInfo, is_default

# What a masked key's score is brought down by: below all scores but those near fp32's end, also in bf16's
# range. Finite, since keys that are all at -inf, a block of them or a whole row, make NaN.
MASKED = -1e38


def kept_keys(
    a: AttentionNode,
    makers: Mapping[str, NodeProto],
    constants: Mapping[str, TensorProto],
    infos: Mapping[str, TensorInfo],
) -> str | None:
    """The mask [batch, key], True where kept; "" where there is none, None for any other mask."""
    if not a.mask:
        return ""
    spread = makers.get(a.mask)
    raised = makers.get(spread.input[0]) if spread is not None and is_default(spread, "Expand") else None
    if raised is None or not a.mask_is_bool or a.causal or raised_axes(raised, constants) != [1, 2]:
        return None
    mask = infos.get(raised.input[0])
    if mask is None:
        return None
    rows, one = a.mask_info.dims[:2]
    batch, keys = infos[a.k].dims[0], infos[a.k].dims[a.sequence_axis]
    same = mask.dims == (batch, keys) and all(mask.dims) and rows == infos[a.q].dims[0] and one == 1
    return raised.input[0] if same else None


def raised_axes(node: NodeProto, constants: Mapping[str, TensorProto]) -> list[int]:
    """The axes that an Unsqueeze adds; empty for any other node, and for axes that are not constant."""
    later = is_default(node, "Unsqueeze") and len(node.input) > 1  # before opset 13 they were an attribute
    axes = constants.get(node.input[1]) if later else None
    found: list[int] = [] if axes is None else numpy_helper.to_array(axes).tolist()
    return found


def zeroing_mask(
    node: NodeProto, makers: Mapping[str, NodeProto], constants: Mapping[str, TensorProto]
) -> str:
    """The mask [batch, row] by which `node` selects between a tensor's rows and 0; "" where it does not."""
    if not is_default(node, "Where"):
        return ""
    raised, other = makers.get(node.input[0]), constants.get(node.input[2])
    if raised is None or raised_axes(raised, constants) not in ([2], [-1]) or other is None:
        return ""
    zero = not list(other.dims) and not numpy_helper.to_array(other).any()
    return raised.input[0] if zero else ""
