"""Attention blocks written straight as ONNX: small, seeded, made in milliseconds.

The graphs have the forms that `torch.onnx.export` gives a multi-head attention: projections,
reshape to heads, then the `Attention` operator (opset 23 and later) or its decomposition.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from mha_deploy.precision import Precision

ELEMENT = {
    "fp64": TensorProto.DOUBLE,
    "fp32": TensorProto.FLOAT,
    "fp16": TensorProto.FLOAT16,
    "bf16": TensorProto.BFLOAT16,
}
PROFILE = "batch=1:8:8,seq=1:128:512"
CROSS_PROFILE = "batch=1:8:8,q_len=1:128:512,kv_len=1:128:512"


@dataclass(frozen=True)
class Mha:
    """One multi-head attention block; `mask` is none, bool, additive or causal.

    `cast` puts the attention proper between casts to fp32 and back. `mask_dtype` is the element
    type of an additive mask, the block's own unless named. `fixed_seq` makes the length static;
    `qdq` = "fp8" puts quantise/dequantise pairs where a fused fp8 attention has them (opset 21).
    """

    opset: int = 23
    dtype: str = "fp16"
    mask: str = "none"
    heads: int = 4
    kv_heads: int = 0
    head_dim: int = 64
    cross: bool = False
    cast: bool = False
    mask_dtype: str = ""
    fixed_seq: int = 0
    qdq: str = ""

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def profile(self) -> str:
        if self.fixed_seq:
            return "batch=1:8:8"
        return CROSS_PROFILE if self.cross else PROFILE


class GraphWriter:
    """Nodes and initialisers in the order they are added; names are given by counting."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def op(self, kind: str, *inputs: str, out: str = "", domain: str = "", **attributes: Any) -> str:
        name = f"{kind.lower()}_{len(self.nodes)}"
        output = out or f"{name}_out"
        self.nodes.append(
            helper.make_node(kind, list(inputs), [output], name=name, domain=domain, **attributes)
        )
        return output

    def const(self, value: Any, dtype: str) -> str:
        name = f"const_{len(self.weights)}"
        array = np.asarray(value)
        array = array.astype(Precision(dtype).numpy) if dtype in ELEMENT else array.astype(dtype)
        self.weights.append(numpy_helper.from_array(array, name))
        return name

    def weight(self, *shape: int) -> str:
        name = f"weight_{len(self.weights)}"
        array = _seeded(tuple(shape), len(self.weights)).astype(Precision(self.dtype).numpy)
        self.weights.append(numpy_helper.from_array(array, name))
        return name


@cache
def _seeded(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.0, 0.05, shape).astype(np.float32)


def model(
    writer: GraphWriter,
    inputs: list[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto],
    opset: int,
    *,
    domains: dict[str, int] | None = None,
) -> onnx.ModelProto:
    graph = helper.make_graph(writer.nodes, "attention", inputs, outputs, writer.weights)
    opsets = [helper.make_opsetid(d, v) for d, v in {"": opset, **(domains or {})}.items()]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10 if opset < 23 else 11)


def mha_model(form: Mha) -> onnx.ModelProto:
    g = GraphWriter(form.dtype)
    seq: str | int = form.fixed_seq or "seq"
    q_axis, k_axis = ("q_len", "kv_len") if form.cross else (seq, seq)
    names = ("query", "key", "value") if form.cross else ("x", "x", "x")
    width, kv_heads = form.width, form.kv_heads or form.heads
    inputs = [
        helper.make_tensor_value_info(name, ELEMENT[form.dtype], ["batch", axis, width])
        for name, axis in dict(zip(names, (q_axis, k_axis, k_axis), strict=True)).items()
    ]
    heads = (form.heads, kv_heads, kv_heads)
    q, k, v = (_project(g, name, n, form) for name, n in zip(names, heads, strict=True))
    mask = _mask_input(g, form, inputs, q_axis, k_axis)
    if form.cast:
        q, k, v = (g.op("Cast", t, to=TensorProto.FLOAT) for t in (q, k, v))
    if form.opset >= 23:
        operands = (q, k, v, mask) if mask else (q, k, v)
        o = g.op("Attention", *operands, **({"is_causal": 1} if form.mask == "causal" else {}))
    else:
        o = _decomposed(g, form, (q, k, v), mask)
    if form.cast:
        o = g.op("Cast", o, to=ELEMENT[form.dtype])
    merged = g.op("Reshape", g.op("Transpose", o, perm=[0, 2, 1, 3]), g.const([0, 0, width], "int64"))
    g.op("Add", g.op("MatMul", merged, g.weight(width, width)), g.weight(width), out="y")
    output = helper.make_tensor_value_info("y", ELEMENT[form.dtype], ["batch", q_axis, width])
    return model(g, inputs, [output], form.opset)


def _project(g: GraphWriter, source: str, heads: int, form: Mha) -> str:
    wide = heads * form.head_dim
    flat = g.op("Add", g.op("MatMul", source, g.weight(form.width, wide)), g.weight(wide))
    split = g.op("Reshape", flat, g.const([0, 0, heads, form.head_dim], "int64"))
    return g.op("Transpose", split, perm=[0, 2, 1, 3])  # B H S D


def _mask_input(
    g: GraphWriter,
    form: Mha,
    inputs: list[onnx.ValueInfoProto],
    q_axis: str | int,
    k_axis: str | int,
) -> str:
    if form.mask == "bool":
        inputs.append(helper.make_tensor_value_info("mask", TensorProto.BOOL, ["batch", k_axis]))
        return g.op("Unsqueeze", "mask", g.const([1, 2], "int64"))  # B 1 1 K
    if form.mask == "additive":
        dtype = form.mask_dtype or ("fp32" if form.cast else form.dtype)
        shape = ["batch", 1, q_axis, k_axis]
        inputs.append(helper.make_tensor_value_info("mask", ELEMENT[dtype], shape))
        return "mask"
    return ""


def _decomposed(g: GraphWriter, form: Mha, qkv: tuple[str, str, str], mask: str) -> str:
    q, k, v = qkv
    dtype = "fp32" if form.cast else form.dtype
    if form.qdq:
        q, k, v = (_quantised(g, form, t) for t in (q, k, v))
    if form.kv_heads:
        k, v = (_repeat_heads(g, form, t) for t in (k, v))
    scaled = g.op("Mul", q, g.const(form.head_dim**-0.5, dtype))
    scores = g.op("MatMul", scaled, g.op("Transpose", k, perm=[0, 1, 3, 2]))
    if form.mask == "additive":
        scores = g.op("Add", scores, mask)
    elif form.mask in ("bool", "causal"):
        keep = mask or _causal(g, scores)
        scores = g.op("Where", keep, scores, g.const(float("-inf"), dtype))
    weights = g.op("Softmax", scores, axis=-1)
    return g.op("MatMul", _quantised(g, form, weights) if form.qdq else weights, v)


def _quantised(g: GraphWriter, form: Mha, t: str) -> str:
    scale = g.const(0.03, form.dtype)
    zero = f"zero_{len(g.weights)}"
    g.weights.append(helper.make_tensor(zero, TensorProto.FLOAT8E4M3FN, [], [0.0]))
    return g.op("DequantizeLinear", g.op("QuantizeLinear", t, scale, zero), scale, zero)


def _causal(g: GraphWriter, scores: str) -> str:
    """[Sq, Skv] bool: query i sees keys 0..i."""
    zero, one = g.const(0, "int64"), g.const(1, "int64")
    rows, columns = (
        g.op("Range", zero, g.op("Squeeze", g.op("Shape", scores, start=a, end=a + 1)), one) for a in (2, 3)
    )
    return g.op("LessOrEqual", columns, g.op("Unsqueeze", rows, g.const([1], "int64")))


def _repeat_heads(g: GraphWriter, form: Mha, t: str) -> str:
    groups = form.heads // form.kv_heads
    wide = g.op("Unsqueeze", t, g.const([2], "int64"))  # B Hkv 1 S D
    spread = g.op("Expand", wide, g.const([1, 1, groups, 1, 1], "int64"))
    return g.op("Reshape", spread, g.const([0, form.heads, -1, form.head_dim], "int64"))


def save(model_proto: onnx.ModelProto, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model_proto.SerializeToString())
    return path


def write_mha(folder: Path, form: Mha) -> Path:
    """The block as a file whose name tells the form; written once."""
    fields = [str(getattr(form, name)) for name in form.__dataclass_fields__]
    path = folder / ("mha-" + "-".join(f or "x" for f in fields) + ".onnx")
    return path if path.exists() else save(mha_model(form), path)
