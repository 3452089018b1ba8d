"""Models of one `Attention` node with random feeds, and the operator worked out by hand in float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

FLOAT, HALF, BOOL, INT64 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BOOL, TensorProto.INT64

Feeds = dict[str, np.ndarray]


@dataclass(frozen=True)
class Form:
    """One form of the operator. `mask` is a shape, () for none; `outputs` as the node lists them."""

    batch: int = 2
    q_heads: int = 4
    kv_heads: int = 4
    queries: int = 5
    keys: int = 5
    size: int = 8
    value_size: int = 8
    past: int = 0
    rank: int = 4
    dtype: int = FLOAT
    mask: tuple[int, ...] = ()
    mask_type: int = BOOL
    lengths: tuple[int, ...] = ()
    opset: int = 24
    outputs: tuple[str, ...] = ("y",)
    dynamic: bool = False
    attributes: dict[str, Any] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return self.past + self.keys

    def shapes(self) -> dict[str, list[int]]:
        def operand(heads: int, length: int, size: int) -> list[int]:
            four = [self.batch, heads, length, size]
            return four if self.rank == 4 else [self.batch, length, heads * size]

        shapes = {
            "q": operand(self.q_heads, self.queries, self.size),
            "k": operand(self.kv_heads, self.keys, self.size),
            "v": operand(self.kv_heads, self.keys, self.value_size),
        }
        if self.mask:
            shapes["mask"] = list(self.mask)
        if self.past:
            shapes["past_key"] = [self.batch, self.kv_heads, self.past, self.size]
            shapes["past_value"] = [self.batch, self.kv_heads, self.past, self.value_size]
        if self.lengths:
            shapes["lengths"] = [self.batch]
        return shapes

    def output_shapes(self) -> dict[str, list[int]]:
        y = [self.batch, self.q_heads, self.queries, self.value_size]
        return {
            "y": y if self.rank == 4 else [self.batch, self.queries, self.q_heads * self.value_size],
            "present_key": [self.batch, self.kv_heads, self.total, self.size],
            "present_value": [self.batch, self.kv_heads, self.total, self.value_size],
            "scores": [self.batch, self.q_heads, self.queries, self.total],
        }

    def dtype_of(self, name: str) -> int:
        return {"mask": self.mask_type, "lengths": INT64}.get(name, self.dtype)

    def model(self) -> onnx.ModelProto:
        shapes = self.shapes()
        slots = ["q", "k", "v", "mask", "past_key", "past_value", "lengths"]
        inputs = [slot if slot in shapes else "" for slot in slots]
        while not inputs[-1]:
            inputs.pop()
        heads = {"q_num_heads": self.q_heads, "kv_num_heads": self.kv_heads} if self.rank == 3 else {}
        node = helper.make_node(
            "Attention", inputs, list(self.outputs), name="attention", **heads, **self.attributes
        )
        given = [name for name in self.outputs if name]
        graph = helper.make_graph(
            [node],
            "graph",
            [self._value(name, shape) for name, shape in shapes.items()],
            [self._value(name, self.output_shapes()[name]) for name in given],
        )
        opset = helper.make_opsetid("", self.opset)
        return helper.make_model(graph, opset_imports=[opset], ir_version=10)

    def _value(self, name: str, shape: list[int]) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, self.dtype_of(name), self._dims(name, shape))

    def _dims(self, name: str, shape: list[int]) -> list[int | str]:
        """Batch and lengths by symbol where the form is dynamic; heads and sizes stay numbers."""
        if not self.dynamic:
            return list(shape)
        if name == "lengths":
            return ["batch"]
        if name == "mask":
            # Columns by the keys' symbol say that there are as many; by another, that there may be fewer.
            columns = "keys" if not self.past and shape[-1] == self.keys else "columns"
            symbols = ["batch", "", "queries", columns][-len(shape) :]
            return [s if s and n != 1 else n for s, n in zip(symbols, shape, strict=True)]
        length = {"q": "queries", "y": "queries", "k": "keys", "v": "keys"}.get(name, "past")
        if name.startswith("present"):
            length = "total"
        if name == "scores":
            return ["batch", shape[1], "queries", "total"]
        return ["batch", shape[1], length, shape[3]] if len(shape) == 4 else ["batch", length, shape[2]]

    def feeds(self, seed: int) -> Feeds:
        """Standard normal operands; masks in which a row may well be masked from end to end."""
        rng = np.random.default_rng(seed)
        feeds: Feeds = {}
        for name, shape in self.shapes().items():
            dtype = helper.tensor_dtype_to_np_dtype(self.dtype_of(name))
            if name == "lengths":
                feeds[name] = np.array(self.lengths, dtype)
            elif name != "mask":
                feeds[name] = rng.standard_normal(shape).astype(dtype)
            else:
                dead = rng.random([*shape[:-1], 1]) < 0.3
                keep = (rng.random(shape) < 0.6) & ~dead
                bias = np.where(keep, rng.standard_normal(shape), -np.inf)
                feeds[name] = keep if self.mask_type == BOOL else bias.astype(dtype)
        return feeds


def by_hand(form: Form, feeds: Feeds) -> dict[str, np.ndarray]:
    """The operator's definition in float64, one loop an axis, a row with no key 0. Keys as outputs."""
    q, k, v = (_four_axes(form, feeds[name].astype(np.float64), name) for name in "qkv")
    if form.past:
        k = np.concatenate([feeds["past_key"].astype(np.float64), k], axis=2)
        v = np.concatenate([feeds["past_value"].astype(np.float64), v], axis=2)
    scale = form.attributes.get("scale", form.size**-0.5)
    cap = form.attributes.get("softcap", 0.0)
    group = form.q_heads // form.kv_heads
    y = np.zeros([form.batch, form.q_heads, form.queries, form.value_size])
    weights = np.zeros([form.batch, form.q_heads, form.queries, form.total])
    bias = _bias(form, feeds)
    for b, h, i in np.ndindex(form.batch, form.q_heads, form.queries):
        scores = k[b, h // group] @ q[b, h, i] * scale
        scores = cap * np.tanh(scores / cap) if cap else scores
        row = bias[b, h, i]
        if np.all(np.isneginf(row)):
            continue
        exponentials = np.exp(scores + row - np.max(scores + row))
        weights[b, h, i] = exponentials / exponentials.sum()
        y[b, h, i] = weights[b, h, i] @ v[b, h // group]
    if form.rank == 3:
        y = y.transpose(0, 2, 1, 3).reshape(form.batch, form.queries, -1)
    return {"y": y, "present_key": k, "present_value": v, "probabilities": weights}


def _four_axes(form: Form, x: np.ndarray, name: str) -> np.ndarray:
    if form.rank == 4:
        return x
    heads = form.q_heads if name == "q" else form.kv_heads
    return x.reshape(form.batch, x.shape[1], heads, -1).transpose(0, 2, 1, 3)


def _bias(form: Form, feeds: Feeds) -> np.ndarray:
    """0, -inf or the additive mask for every (batch, head, query, key)."""
    bias = np.zeros([form.batch, form.q_heads, form.queries, form.total])
    if form.mask:
        mask = feeds["mask"]
        mask = np.where(mask, 0.0, -np.inf) if form.mask_type == BOOL else mask.astype(np.float64)
        short = form.total - mask.shape[-1]
        if short and not (form.opset < 24 and mask.shape[-1] == 1):
            mask = np.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, short)], constant_values=-np.inf)
        bias = bias + mask
    left = form.attributes.get("left_window_size", -1)
    right = form.attributes.get("right_window_size", -1)
    for b, i, j in np.ndindex(form.batch, form.queries, form.total):
        position = i + (form.lengths[b] - form.queries if form.lengths else form.past)
        hidden = bool(form.attributes.get("is_causal", 0)) and j > position
        hidden |= left >= 0 and j < position - left
        hidden |= right >= 0 and j > position + right
        hidden |= bool(form.lengths) and j >= form.lengths[b]
        if hidden:
            bias[b, :, i, j] = -np.inf
    return bias


def run_ort(model: onnx.ModelProto, feeds: Feeds) -> dict[str, np.ndarray]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in model.graph.output]
    return dict(zip(names, session.run(names, feeds), strict=True))
