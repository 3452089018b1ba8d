"""One `Attention` node of opset 23 to 25, read into plain fields.

Source: the operator's own schema and function body in onnx 1.23 (`onnx.defs.get_schema`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from onnx import NodeProto, TensorProto, helper

from mha_deploy.errors import GraphError
from mha_deploy.lowering.graph_edit import TensorInfo, label
from mha_deploy.lowering.steps import refusal

KNOWN_ATTRIBUTES = {
    "is_causal", "kv_num_heads", "q_num_heads", "left_window_size", "right_window_size",
    "qk_matmul_output_mode", "scale", "softcap", "softmax_precision",
}  # fmt: skip
FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)

RAW_SCORES, CAPPED_SCORES, MASKED_SCORES, PROBABILITIES = range(4)
"""The values of `qk_matmul_output_mode`."""


@dataclass(frozen=True, slots=True)
class AttentionNode:
    """Inputs, outputs ("" where absent) and attributes (their defaults where absent) of one node.

    `rank` is 4 for [B, heads, S, D] and 3 for [B, S, heads * D] inputs. `head_size` and
    `value_size` are 0 where shape inference cannot tell them. An output that nobody reads is "".
    """

    name: str
    opset: int
    rank: int
    q: str
    k: str
    v: str
    mask: str
    past_key: str
    past_value: str
    lengths: str
    y: str
    present_key: str
    present_value: str
    scores: str
    q_heads: int
    kv_heads: int
    head_size: int
    value_size: int
    dtype: int
    value_dtype: int
    mask_info: TensorInfo
    explicit_scale: float | None
    causal: bool
    left_window: int
    right_window: int
    softcap: float
    softmax_precision: int
    scores_mode: int

    @property
    def mask_is_bool(self) -> bool:
        return bool(self.mask) and self.mask_info.dtype == TensorProto.BOOL

    @property
    def has_window(self) -> bool:
        return self.left_window >= 0 or self.right_window >= 0

    @property
    def has_more(self) -> bool:
        """Whether it has a cache, lengths of its keys, or other results that anybody reads."""
        more = (self.past_key, self.lengths, self.present_key, self.present_value, self.scores)
        return any(more)

    @property
    def is_usual(self) -> bool:
        """Whether it is softmax(scale q k^T) v in fp32, masked by a mask or causality alone, and no more."""
        fp32 = self.dtype == self.value_dtype == TensorProto.FLOAT
        fp32_softmax = self.softmax_precision in (0, TensorProto.FLOAT)
        return fp32 and fp32_softmax and not (self.softcap or self.has_window or self.has_more)

    @property
    def scale(self) -> float | None:
        """What scores are multiplied by; None where that is the usual and the head size is not known."""
        usual = self.head_size**-0.5 if self.head_size else None
        return usual if self.explicit_scale is None else self.explicit_scale

    @property
    def sequence_axis(self) -> int:
        return 2 if self.rank == 4 else 1


def read_attention(
    node: NodeProto, opset: int, infos: Mapping[str, TensorInfo], read: set[str]
) -> AttentionNode:
    """Read and check one node. `read` holds the tensors that anybody reads.

    Raises:
        GraphError: the node is not what the standard allows, or its shapes cannot be inferred.
    """
    name = label(node)
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    unknown = sorted(set(attributes) - KNOWN_ATTRIBUTES)
    if unknown:
        raise refusal(name, f"attribute {unknown[0]!r}", "the ONNX operator Attention has none of that name")
    q, k, v, mask, past_key, past_value, lengths = _padded(node.input, 7)
    for tensor in filter(None, (q, k, v, mask, past_key, past_value, lengths)):
        if tensor not in infos:
            raise refusal(
                name, f"input {tensor!r}, whose shape cannot be inferred,", "its rank decides the rewrite"
            )
    y, present_key, present_value, scores = (
        output if output in read else "" for output in _padded(node.output, 4)
    )
    rank = len(infos[q].dims)
    q_heads, head_size = _heads(infos[q], int(attributes.get("q_num_heads", 0)))
    kv_heads, key_size = _heads(infos[k], int(attributes.get("kv_num_heads", 0)))
    value_heads, value_size = _heads(infos[v], int(attributes.get("kv_num_heads", 0)))
    attention = AttentionNode(
        name, opset, rank, q, k, v, mask, past_key, past_value, lengths,
        y or node.output[0], present_key, present_value, scores,
        q_heads, kv_heads or value_heads, head_size or key_size, value_size,
        infos[q].dtype, infos[v].dtype, infos[mask] if mask else TensorInfo(0, ()),
        attributes.get("scale"), bool(attributes.get("is_causal", 0)),
        int(attributes.get("left_window_size", -1)), int(attributes.get("right_window_size", -1)),
        float(attributes.get("softcap", 0.0)), int(attributes.get("softmax_precision", 0)),
        int(attributes.get("qk_matmul_output_mode", 0)),
    )  # fmt: skip
    _check(attention, infos)
    return attention


def _padded(names: Iterable[str], count: int) -> list[str]:
    given = [*names]
    return [*given, *[""] * (count - len(given))]


def _heads(info: TensorInfo, heads_attribute: int) -> tuple[int, int]:
    """Number of heads and size of one, each 0 where unknown."""
    if len(info.dims) == 4:
        heads, size = info.dims[1], info.dims[3]
        return heads if isinstance(heads, int) else 0, size if isinstance(size, int) else 0
    hidden = info.dims[-1] if info.dims else 0
    size = hidden // heads_attribute if isinstance(hidden, int) and heads_attribute > 0 else 0
    return heads_attribute, size


def _check(a: AttentionNode, infos: Mapping[str, TensorInfo]) -> None:
    problem = _problem(a, infos)
    if problem:
        raise GraphError(f"node {a.name!r} is no valid Attention: {problem}")


def _problem(a: AttentionNode, infos: Mapping[str, TensorInfo]) -> str:  # noqa: PLR0911 - one return a rule
    ranks = {len(infos[tensor].dims) for tensor in (a.q, a.k, a.v)}
    if ranks not in ({3}, {4}):
        return f"query, key and value have ranks {sorted(ranks)}; expected all 3 or all 4"
    if a.rank == 3 and not (a.q_heads > 0 and a.kv_heads > 0):
        return "inputs of rank 3 need q_num_heads and kv_num_heads"
    if a.q_heads and a.kv_heads and a.q_heads % a.kv_heads:
        return f"{a.q_heads} query heads are no multiple of {a.kv_heads} key/value heads"
    if a.dtype not in FLOATS:
        return f"query has element type {TensorProto.DataType.Name(a.dtype)}; expected a float type"
    if bool(a.past_key) != bool(a.past_value):
        return "past_key and past_value go together"
    if a.lengths and (a.past_key or a.present_key or a.present_value):
        return "nonpad_kv_seqlen excludes past and present key/value"
    if a.explicit_scale is not None and a.explicit_scale < 0:
        return f"scale = {a.explicit_scale:g}; its square root multiplies query and key, expected 0 or more"
    if min(a.left_window, a.right_window) < -1:
        return f"window sizes {a.left_window} and {a.right_window}; expected -1 or more"
    if a.softmax_precision not in (0, *FLOATS):
        return f"softmax_precision = {a.softmax_precision} is no floating-point type"
    if a.scores_mode not in range(4):
        return f"qk_matmul_output_mode = {a.scores_mode}; expected 0 to 3"
    return _mask_problem(a, infos)


def _mask_problem(a: AttentionNode, infos: Mapping[str, TensorInfo]) -> str:
    if not a.mask:
        return ""
    if not 1 <= len(a.mask_info.dims) <= 4:
        return f"attn_mask has rank {len(a.mask_info.dims)}; expected 1 to 4"
    columns, keys = a.mask_info.dims[-1], infos[a.k].dims[a.sequence_axis]
    if a.past_key:
        past = infos[a.past_key].dims[2]
        keys = past + keys if isinstance(past, int) and isinstance(keys, int) else ""
    if not isinstance(columns, int) or not isinstance(keys, int) or columns == keys:
        return ""
    if columns > keys:
        return f"attn_mask has {columns} columns for {keys} keys"
    if a.opset < 24 and columns != 1:
        return f"attn_mask has {columns} columns for {keys} keys; only opset 24 and later pad it"
    return ""
