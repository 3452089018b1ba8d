"""Files that do not load or do not run."""

from __future__ import annotations

from onnx import TensorProto

from mutants.graph import Graph, redirect
from mutants.mutant import mutant


@mutant("a cast to fp16 with no way back", runs=False)
def fp16_cast_left_open(g: Graph) -> list[str]:
    return [g.after(g.add_of("key").output[0], "Cast", to=TensorProto.FLOAT16)]


@mutant("the mask under another name", runs=False)
def mask_renamed(g: Graph) -> list[str]:
    redirect(list(g.graph.node), "mask", "keep")
    next(value for value in g.graph.input if value.name == "mask").name = "keep"
    return []


@mutant("an operator that nobody has", runs=False)
def operator_unknown(g: Graph) -> list[str]:
    product = g.product_of("output")
    product.op_type = "MatrixMul"
    return [product.name]


@mutant("a weight missing", runs=False)
def weight_missing(g: Graph) -> list[str]:
    product = g.product_of("value")
    g.forget(product.input[1])
    return [product.name]


@mutant("the file cut off in its middle", runs=False, on_bytes=lambda data: data[: len(data) // 2])
def file_cut_short(g: Graph) -> list[str]:
    return []
