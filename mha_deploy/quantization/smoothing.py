"""Outliers moved from activations into weights, so that both fit eight bits.

X W = (X / f) (f W) for any factor f of each input feature. With f = max|X|^alpha / max|W|^(1 - alpha)
the two share the range: Xiao et al., "SmoothQuant" (2023), equation 4. The division costs nothing where
it goes into what comes before: the scale and bias of a LayerNorm, or the value projection, since
attention mixes positions and not features. Elsewhere it is one multiplication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from onnx import NodeProto

from mha_deploy.lowering.graph_edit import is_default
from mha_deploy.quantization.calibration import Ranges
from mha_deploy.quantization.plan import Plan, Source
from mha_deploy.quantization.products import Graph, Product, largest_by_row
from mha_deploy.signature import Array
from mha_deploy.spec import AttentionSpec

_SMALLEST = 1e-5


def factors(largest: Array, weights: Array, alpha: float) -> Array:
    """f of each feature from max|X| and max|W| [features], with a geometric mean of 1.

    A feature that is always 0, in X or in W, says nothing: it keeps what the others have on average.
    """
    known = (largest > 0) & (weights > 0)
    f = np.ones(len(largest))
    f[known] = np.maximum(largest[known] ** alpha / weights[known] ** (1 - alpha), _SMALLEST)
    if known.any():
        f[known] /= np.exp(np.log(f[known]).mean())
    return f.astype(np.float32)


@dataclass(slots=True)
class Weights:
    """The weights of a graph's products by node, and other constants by name, as they are changed."""

    products: dict[str, Array]
    constants: dict[str, Array] = field(default_factory=dict)
    # By activation: what it is multiplied with before it is quantised.
    multipliers: dict[str, Array] = field(default_factory=dict)
    ranges: dict[str, Ranges] = field(default_factory=dict)


def smoothed(source: Source, plan: Plan) -> Weights:
    """Weights, multipliers and ranges after each activation in `plan.alphas` was smoothed at its alpha."""
    graph, spec, products = source.graph, source.spec, source.products
    made = Weights({p.node: graph.array(p.weight) for p in products}, ranges=dict(plan.ranges))
    for activation in dict.fromkeys(product.activation for product in plan.taken):
        if activation not in plan.alphas:
            continue
        readers = [product for product in products if product.activation == activation]
        sharing = [product for product in plan.taken if product.activation == activation]
        value = _value_before(graph, products, readers)
        largest = plan.ranges[activation].largest
        weights = largest_by_row([made.products[product.node] for product in sharing])
        if value:
            shared = _by_value_feature(largest, spec), _by_value_feature(weights, spec)
            f = factors(*shared, plan.alphas[activation])
            _divide_value(graph, made, value, f)
            f, moved = _by_context_feature(f, spec), readers
        else:
            f = factors(largest, weights, plan.alphas[activation])
            moved = readers if _divide_norm(graph, made, activation, readers, f) else sharing
            if moved is sharing:
                made.multipliers[activation] = 1 / f
        for product in moved:
            made.products[product.node] = made.products[product.node] * f[:, None]
        made.ranges[activation] = plan.ranges[activation].divided(f)
    return made


def _divide_norm(graph: Graph, made: Weights, activation: str, readers: Sequence[Product], f: Array) -> bool:
    """Whether a LayerNorm makes `activation`, for these products only, and took the division."""
    norm = graph.made_by.get(activation)
    if norm is None or not is_default(norm, "LayerNormalization"):
        return False
    constants = [name for name in norm.input[1:] if name]
    alone = all(graph.only_reader(name) is not None for name in constants)
    if len(graph.readers(activation)) != len(readers) or not alone or activation in graph.outputs:
        return False
    for name in constants:
        made.constants[name] = graph.array(name) / f
    return True


def _value_before(graph: Graph, products: Sequence[Product], readers: Sequence[Product]) -> Product | None:
    """The value product whose features are those that `readers`, the output product alone, read."""
    if [product.role for product in readers] != ["output"]:
        return None
    node = _followed(graph, readers[0].activation)
    if node is None or not is_default(node, "Attention"):
        return None
    values = [product for product in products if product.role == "value"]
    above = _followed(graph, node.input[2])
    if len(values) != 1 or above is None or values[0].weight not in above.input:
        return None
    return values[0]


def _followed(graph: Graph, name: str) -> NodeProto | None:
    """The node above `name` that is no change of shape and no addition of a bias, read by nothing else."""
    while graph.only_reader(name) is not None and name in graph.made_by:
        node: NodeProto = graph.made_by[name]
        biased = is_default(node, "Add") and node.input[1] in graph.constants
        if not (is_default(node, "Reshape", "Transpose") or biased):
            return node
        name = node.input[0]
    return None


def _divide_value(graph: Graph, made: Weights, value: Product, f: Array) -> None:
    """Divide what the value product makes, its bias included."""
    made.products[value.node] = made.products[value.node] / f
    product = next(n for n in graph.made_by.values() if value.weight in n.input)
    reader = graph.only_reader(product.output[0])
    if reader is not None and is_default(reader, "Add"):
        made.constants[reader.input[1]] = graph.array(reader.input[1]) / f


def _by_value_feature(largest: Array, spec: AttentionSpec) -> Array:
    """Maxima by context feature [heads x value_dim] as maxima by the value feature that makes it."""
    groups = spec.num_heads // spec.num_kv_heads
    found: Array = largest.reshape(spec.num_kv_heads, groups, spec.value_dim).max(axis=1).reshape(-1)
    return found


def _by_context_feature(f: Array, spec: AttentionSpec) -> Array:
    """The inverse: query heads of one group read the same value head."""
    groups = spec.num_heads // spec.num_kv_heads
    return np.repeat(f.reshape(spec.num_kv_heads, 1, spec.value_dim), groups, axis=1).reshape(-1)
