"""What is rewritten, and how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import onnx

from mha_deploy.errors import InputError
from mha_deploy.lowering.graph_edit import label
from mha_deploy.quantization.calibration import Ranges
from mha_deploy.quantization.products import Graph, Product, find_products, split_gemms
from mha_deploy.spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class Source:
    """The block in fp32, and the products in it."""

    model: onnx.ModelProto
    spec: AttentionSpec
    graph: Graph
    products: tuple[Product, ...]

    @classmethod
    def of(cls, model: onnx.ModelProto, spec: AttentionSpec) -> Source:
        """Raises:
        InputError: no product of an activation with constant weights in the graph.
        """
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        split_gemms(copy)
        products = find_products(copy)
        if not products:
            raise InputError("the graph has no MatMul or Gemm with constant weights: nothing to quantise")
        return cls(copy, spec, Graph(copy), products)

    def check_names(self, nodes: Sequence[str]) -> None:
        """Raises:
        InputError: one of `nodes` is no node of the graph.
        """
        known = {label(node) for node in self.model.graph.node}
        unknown = [name for name in nodes if name not in known]
        if unknown:
            raise InputError(
                f"no node {', '.join(map(repr, unknown))} to keep in fp32; int8 takes over "
                f"{', '.join(product.node for product in self.products)}"
            )


@dataclass(frozen=True, slots=True)
class Plan:
    """`taken` goes to int8 by `scheme`; activations in `alphas` are smoothed before that."""

    scheme: str
    taken: Sequence[Product]
    ranges: Mapping[str, Ranges]
    alphas: Mapping[str, float] = field(default_factory=dict)
