"""Projections of one input as one product: query, key and value where they share it.

    x W_q + b_q, x W_k + b_k, x W_v + b_v   ->   split(x [W_q W_k W_v] + [b_q b_k b_v])

One large product keeps more of the machine busy than three small ones, and starts its threads once.
Each column is the same sum of the same terms; a kernel may block a wider product differently.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from mha_deploy.lowering.graph_edit import (
    constants_of,
    drop_unread,
    is_default,
    label,
    only_readers,
    replace_all,
    used_names,
)
from mha_deploy.lowering.steps import Lowered, Step
from mha_deploy.signature import Array

SUFFIX = "fused_projections"


@dataclass(frozen=True, slots=True)
class Projection:
    """`product` = input x weight [in, out], and `add` [out] where a bias follows."""

    product: NodeProto
    weight: TensorProto
    add: NodeProto | None
    bias: TensorProto | None

    @property
    def result(self) -> str:
        return str((self.add or self.product).output[0])

    @property
    def width(self) -> int:
        return int(self.weight.dims[1])

    @property
    def bias_or_zero(self) -> Array:
        if self.bias is None:
            return np.zeros(self.width, helper.tensor_dtype_to_np_dtype(self.weight.data_type))
        return numpy_helper.to_array(self.bias)


def fuse_projections(model: onnx.ModelProto) -> Lowered:
    """The same model with the products of one tensor and several constant matrices as one product.

    Inputs, outputs and all other nodes stay, `source` metadata included. The model comes back as it is
    where no two products share their input.
    """
    groups = [group for group in projections(model) if len(group) > 1]
    if not groups:
        return Lowered(model, ())
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    taken, steps = used_names(model), list[Step]()
    nodes, gone = list(copy.graph.node), set[str]()
    for group in groups:
        first = next(i for i, node in enumerate(nodes) if node.output[0] == group[0].product.output[0])
        gone |= {each.output[0] for member in group for each in (member.product, member.add) if each}
        nodes[first:first] = _fused(copy, group, taken)
        steps += [_step(group)]
    kept = [node for node in nodes if node.output[0] not in gone or node.op_type == "Split"]
    replace_all(copy.graph.node, kept)
    drop_unread(copy)
    return Lowered(copy, tuple(steps))


def projections(model: onnx.ModelProto) -> list[list[Projection]]:
    """Projections by the tensor that they read and its dtype, in the graph's order."""
    graph = model.graph
    constants, readers = constants_of(model), only_readers(model)
    outputs = {value.name for value in graph.output}
    found = defaultdict[tuple[str, int], list[Projection]](list)
    for node in graph.node:
        weight = constants.get(node.input[1]) if is_default(node, "MatMul") else None
        if weight is None or len(weight.dims) != 2 or node.output[0] in outputs:
            continue
        add, bias = _bias(node, readers, constants, int(weight.dims[1]))
        found[node.input[0], weight.data_type].append(Projection(node, weight, add, bias))
    return list(found.values())


def _bias(
    product: NodeProto, readers: dict[str, NodeProto], constants: dict[str, TensorProto], width: int
) -> tuple[NodeProto | None, TensorProto | None]:
    """The addition of a vector that alone reads the product, and that vector."""
    add = readers.get(product.output[0])
    if add is None or not is_default(add, "Add"):
        return None, None
    (other,) = [name for name in add.input if name != product.output[0]]
    vector = constants.get(other)
    return (add, vector) if vector is not None and list(vector.dims) == [width] else (None, None)


def _fused(model: onnx.ModelProto, group: list[Projection], taken: set[str]) -> list[NodeProto]:
    """The nodes in the group's place; their constants join the model."""
    prefix = f"{label(group[0].product)}/{SUFFIX}"
    while prefix in taken:
        prefix += "_"
    taken.add(prefix)
    weights = np.concatenate([numpy_helper.to_array(each.weight) for each in group], axis=1)
    total = f"{prefix}/product"
    nodes = [helper.make_node("MatMul", [group[0].product.input[0], f"{prefix}/weight"], [total], name=total)]
    constants = {"weight": weights}
    if any(each.bias is not None for each in group):
        constants["bias"] = np.concatenate([each.bias_or_zero for each in group])
        nodes.append(helper.make_node("Add", [total, f"{prefix}/bias"], [f"{prefix}/sum"]))
        nodes[-1].name = total = f"{prefix}/sum"
    constants["widths"] = np.array([each.width for each in group], np.int64)
    results = [each.result for each in group]
    nodes.append(helper.make_node("Split", [total, f"{prefix}/widths"], results, name=f"{prefix}/split"))
    nodes[-1].attribute.append(helper.make_attribute("axis", -1))
    for node in nodes:
        node.metadata_props.extend(group[0].product.metadata_props)
    model.graph.initializer.extend(
        numpy_helper.from_array(array, f"{prefix}/{name}") for name, array in constants.items()
    )
    return nodes


def _step(group: list[Projection]) -> Step:
    names = ", ".join(label(each.product) for each in group)
    return Step(label(group[0].product), "fuse-projections", f"{names} read one tensor")
