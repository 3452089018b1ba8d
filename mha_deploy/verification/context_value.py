"""The attention context before the output projection, made an output of an ONNX file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mha_deploy.signature import Array

# What may stand between the output projection and the graph's output.
_AFTER = {
    "Add", "Cast", "Concat", "DequantizeLinear", "Identity", "LayerNormalization", "Mul", "QuantizeLinear",
    "Reshape", "SkipLayerNormalization", "Squeeze", "Transpose", "Unsqueeze",
}  # fmt: skip
# What may stand between a stored weight and the product that uses it.
_OF_A_WEIGHT = {"Cast", "DequantizeLinear", "Identity", "Transpose"}
_PRODUCTS = {"MatMul", "Gemm", "FusedMatMul", "FusedGemm", "MatMulInteger", "MatMulIntegerToFloat",
             "DynamicQuantizeMatMul", "QLinearMatMul", "MatMulNBits"}  # fmt: skip


def expose_context(source: Path, target: Path, output: str, sizes: tuple[int, int]) -> str:
    """Write `source` to `target` with the value that its output projection reads as one more output.

    `sizes` are that projection's (heads x value_dim, d_model). Returns the value's name; "" and no
    file where the graph has no product with a stored weight of these sizes before `output`.
    """
    import onnx

    model = onnx.load(str(source))
    makes = {name: node for node in model.graph.node for name in node.output if name}
    weights = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    for node in _last_products(output, makes):
        if any(_stored(name, makes, weights) in (sizes, sizes[::-1]) for name in node.input[1:]):
            context = _floating(node.input[0], makes)
            if context not in {value.name for value in model.graph.output}:
                model.graph.output.append(onnx.ValueInfoProto(name=context))
            large = model.ByteSize() > 1 << 30
            onnx.save(model, str(target), save_as_external_data=large)
            return context
    return ""


def _last_products(output: str, makes: dict[str, Any]) -> Iterator[Any]:
    """The products that `output` is made of, the nearest first, none behind another one."""
    level, seen = [output], set[str]()
    while level:
        nodes = [makes[name] for name in level if name in makes and name not in seen]
        seen.update(level)
        yield from (node for node in nodes if node.op_type in _PRODUCTS)
        level = [name for node in nodes if node.op_type in _AFTER for name in node.input if name]


def _stored(name: str, makes: dict[str, Any], weights: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    """The sizes of the stored matrix that `name` is, through casts and the like; () where it is none."""
    while name not in weights and name in makes and makes[name].op_type in _OF_A_WEIGHT:
        name = makes[name].input[0]
    return weights.get(name, ())


def _floating(name: str, makes: dict[str, Any]) -> str:
    """The value before it was quantised for an integer product."""
    while name in makes and makes[name].op_type in ("DynamicQuantizeLinear", "QuantizeLinear"):
        name = makes[name].input[0]
    return str(name)


def arrangements(context: Array, batch: int, queries: int) -> Iterator[Array]:
    """`context` as [batch, query, heads x value_dim], in the orders that exporters leave it in."""
    width = context.shape[-1]
    if context.size != batch * queries * width:
        return
    yield context.reshape(batch, queries, width)
    yield context.reshape(queries, batch, width).swapaxes(0, 1)
