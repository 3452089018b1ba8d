"""`RotaryEmbedding` (opset 23) spelt out in operators that opset 20 has."""

from __future__ import annotations

from onnx import NodeProto, helper

from mha_deploy.errors import GraphError
from mha_deploy.lowering.graph_edit import Emitter, label
from mha_deploy.lowering.steps import refusal

TO_THE_END = 2**63 - 1


def decompose_rotary(e: Emitter, node: NodeProto) -> None:
    """Rotate pairs (x1, x2) of the head's leading part by the cached angles; the rest passes through.

    Source: the operator's schema, onnx 1.23. [B, heads, S, D], or [B, S, heads * D] with num_heads.

    Raises:
        GraphError: the input's rank is not known, or is 3 without num_heads.
    """
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    x, cos, sin = node.input[:3]
    positions = node.input[3] if len(node.input) > 3 else ""
    heads = int(attributes.get("num_heads", 0))
    rank, head_size = _rank_and_head_size(e, node, heads)
    head_axis = 1 if rank == 4 else 2
    if rank == 3:
        x = e.op("Reshape", x, e.ints(0, 0, heads, -1))
    cos, sin = (_angles(e, cache, positions, head_axis) for cache in (cos, sin))
    turned, rest = x, ""
    size = int(attributes.get("rotary_embedding_dim", 0))
    if size not in (0, head_size):
        turned = _last_axis(e, x, 0, size)
        rest = _last_axis(e, x, size, TO_THE_END)
    turned = _rotate(e, turned, cos, sin, pairs_adjacent=bool(attributes.get("interleaved", 0)))
    result = e.op("Concat", turned, rest, axis=-1) if rest else turned
    e.deliver(e.op("Reshape", result, e.ints(0, 0, -1)) if rank == 3 else result, node.output[0])


def _rank_and_head_size(e: Emitter, node: NodeProto, heads: int) -> tuple[int, int]:
    """Of the input; the head size is 0 where shape inference cannot tell it."""
    name, x = label(node), node.input[0]
    if x not in e.infos:
        raise refusal(name, f"input {x!r}, whose shape cannot be inferred,", "its rank decides the rewrite")
    dims = e.infos[x].dims
    if len(dims) not in (3, 4) or (len(dims) == 3 and heads < 1):
        raise GraphError(
            f"node {name!r} is no valid RotaryEmbedding: input of rank {len(dims)} with num_heads = {heads}; "
            "expected rank 4, or 3 with num_heads"
        )
    last = dims[-1] if isinstance(dims[-1], int) else 0
    return len(dims), last // heads if len(dims) == 3 else last


def _angles(e: Emitter, cache: str, positions: str, head_axis: int) -> str:
    """[B, S, R] with an axis of length 1 where the heads stand."""
    return e.op("Unsqueeze", e.op("Gather", cache, positions) if positions else cache, e.ints(head_axis))


def _last_axis(e: Emitter, tensor: str, start: int, end: int) -> str:
    return e.op("Slice", tensor, e.ints(start), e.ints(end), e.ints(-1))


def _rotate(e: Emitter, x: str, cos: str, sin: str, *, pairs_adjacent: bool) -> str:
    if pairs_adjacent:
        pairs = e.op("Reshape", x, e.ints(0, 0, 0, -1, 2))
        x1, x2 = (e.op("Squeeze", _last_axis(e, pairs, i, i + 1), e.ints(-1)) for i in range(2))
    else:
        halves = [e.fresh("Split"), e.fresh("Split")]
        e.nodes.append(helper.make_node("Split", [x], halves, name=halves[0], axis=-1, num_outputs=2))
        x1, x2 = halves
    real = e.op("Sub", e.op("Mul", cos, x1), e.op("Mul", sin, x2))
    imaginary = e.op("Add", e.op("Mul", sin, x1), e.op("Mul", cos, x2))
    if not pairs_adjacent:
        return e.op("Concat", real, imaginary, axis=-1)
    both = e.op("Concat", *(e.op("Unsqueeze", part, e.ints(-1)) for part in (real, imaginary)), axis=-1)
    return e.op("Reshape", both, e.ints(0, 0, 0, -1))
