"""A candidate as an ONNX graph: quantised products where there were MatMul nodes.

The forms are those that ONNX Runtime fuses on x86, into one kernel a product. Written here since
`onnxruntime.quantization` (1.32) makes a graph that does not load of one with an `Attention` node, and
has neither a scale for each token nor smoothing.

Weights are symmetric int8 with a scale for each output channel; activations are uint8. A value of 0
is exact in every scheme, so padding that the graph has zeroed stays 0.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from mha_deploy.lowering.graph_edit import label
from mha_deploy.quantization.calibration import Ranges
from mha_deploy.quantization.candidate import DYNAMIC, PER_TOKEN, STATIC
from mha_deploy.quantization.plan import Plan, Source
from mha_deploy.quantization.products import Product
from mha_deploy.quantization.smoothing import smoothed
from mha_deploy.signature import Array

# Below this, a token's largest value is taken for 0; its reciprocal would not be finite.
_TINY = 1e-30


def rewritten(source: Source, plan: Plan) -> onnx.ModelProto:
    """The block with the products that the plan takes in int8."""
    model, weights = source.model, smoothed(source, plan)
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    writer = _Writer(plan.scheme, weights.multipliers, weights.ranges)
    by_node = {product.node: product for product in source.products}
    for name, array in weights.constants.items():
        writer.constant(name, array.astype(np.float32))
    for node in model.graph.node:
        product = by_node.get(label(node))
        if product is None:
            writer.nodes.append(node)
        elif product in plan.taken:
            writer.quantised(product, node.output[0], weights.products[product.node])
        else:
            writer.kept(node, weights.products[product.node])
    nodes = [NodeProto.FromString(node.SerializeToString()) for node in writer.nodes]
    used = {name for node in nodes for name in node.input}
    untouched = [each for each in model.graph.initializer if each.name not in writer.constants]
    initializers = [each for each in (*untouched, *writer.constants.values()) if each.name in used]
    del changed.graph.node[:], changed.graph.initializer[:], changed.graph.value_info[:]
    changed.graph.node.extend(nodes)
    changed.graph.initializer.extend(initializers)
    return changed


class _Writer:
    """Collects the nodes and the constants of the new graph."""

    def __init__(self, scheme: str, multipliers: Mapping[str, Array], ranges: Mapping[str, Ranges]) -> None:
        self._scheme, self._multipliers, self._ranges = scheme, multipliers, ranges
        self.nodes: list[NodeProto] = []
        self.constants: dict[str, TensorProto] = {}
        self._ready: set[str] = set()

    def constant(self, name: str, array: Array) -> str:
        self.constants[name] = numpy_helper.from_array(np.ascontiguousarray(array), name)
        return name

    def kept(self, node: NodeProto, weight: Array) -> None:
        """A product that stays in fp32; what was moved into its weights is in them."""
        weight_name = self.constant(f"{label(node)}/weight", weight.astype(np.float32))
        self._op("MatMul", [node.input[0], weight_name], [node.output[0]], label(node))

    def quantised(self, product: Product, out: str, weight: Array) -> None:
        source = product.activation
        if source not in self._ready:
            self._ready.add(source)
            self._prepare(source, self._multiplied(source))
        scale = np.abs(weight).max(axis=0) / 127
        scale = np.where(scale > 0, scale, 1.0).astype(np.float32)
        integers = np.clip(np.round(weight / scale), -127, 127).astype(np.int8)
        # ONNX Runtime fuses the product only where the zeros are there.
        zeros = np.zeros(len(scale), np.int8)
        names = [
            self.constant(f"{product.node}/weight", integers),
            self.constant(f"{product.node}/scale", scale),
            self.constant(f"{product.node}/zeros", zeros),
        ]
        write = self._matmul_integer if self._scheme == DYNAMIC else self._matmul
        write(product, out, names)

    def _multiplied(self, source: str) -> str:
        if source not in self._multipliers:
            return source
        multiplier = self.constant(f"{source}/unsmoothed", self._multipliers[source].astype(np.float32))
        return self._op("Mul", [source, multiplier], [f"{source}/smooth"])

    def _prepare(self, source: str, smooth: str) -> None:
        """Quantise an activation, once for all the products that read it."""
        parts = [f"{source}/integers", f"{source}/scale", f"{source}/zero"]
        if self._scheme == DYNAMIC:
            self._op("DynamicQuantizeLinear", [smooth], parts)
            return
        if self._scheme == STATIC:
            low, high = float(self._ranges[source].low.min()), float(self._ranges[source].high.max())
            scale = (high - low) / 255 or 1.0
            zero = np.clip(np.round(-low / scale), 0, 255)
        else:
            smooth = self._normalised(source, smooth)
            scale, zero = 1 / 127, np.float64(128)
        self.constant(parts[1], np.array(scale, np.float32))
        self.constant(parts[2], np.array(zero, np.uint8))
        self._op("QuantizeLinear", [smooth, *parts[1:]], parts[:1])
        self._op("DequantizeLinear", parts, [f"{source}/again"])

    def _normalised(self, source: str, smooth: str) -> str:
        """Every token divided by its largest value, so that one fixed scale fits all of them."""
        axis = self.constant(f"{source}/axis", np.array([-1], np.int64))
        tiny = self.constant(f"{source}/tiny", np.array(_TINY, np.float32))
        absolute = self._op("Abs", [smooth], [f"{source}/abs"])
        largest = self._op("ReduceMax", [absolute, axis], [f"{source}/max"])
        divisor = self._op("Max", [largest, tiny], [_divisor(source)])
        return self._op("Div", [smooth, divisor], [f"{source}/normal"])

    def _matmul(self, product: Product, out: str, names: list[str]) -> None:
        scaled = self._scheme == PER_TOKEN
        weight = f"{product.node}/real"
        self._op("DequantizeLinear", names, [weight], axis=1)
        made = f"{product.node}/normal" if scaled else out
        self._op("MatMul", [f"{product.activation}/again", weight], [made], product.node)
        if scaled:
            self._op("Mul", [made, _divisor(product.activation)], [out])

    def _matmul_integer(self, product: Product, out: str, names: list[str]) -> None:
        source, name = product.activation, product.node
        integers = [f"{source}/integers", names[0], f"{source}/zero", names[2]]
        self._op("MatMulInteger", integers, [f"{name}/sums"], name)
        self._op("Cast", [f"{name}/sums"], [f"{name}/real"], to=TensorProto.FLOAT)
        self._op("Mul", [f"{source}/scale", names[1]], [f"{name}/both"])
        self._op("Mul", [f"{name}/real", f"{name}/both"], [out])

    def _op(
        self, op_type: str, inputs: list[str], outputs: list[str], name: str = "", **attributes: int
    ) -> str:
        name = name or f"{outputs[0]}/{op_type}"
        node = helper.make_node(op_type, inputs, outputs, name=name)
        node.attribute.extend(helper.make_attribute(key, value) for key, value in attributes.items())
        self.nodes.append(node)
        return outputs[0]


def _divisor(source: str) -> str:
    return f"{source}/largest"
