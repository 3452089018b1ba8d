"""The block as ONNX in one precision: what a strongly typed engine is built from.

Precision is a property of the file. The graph is exported from the reference module in that
precision, with the attention core (scores, softmax, product with the values) in fp32 between two
casts: TensorRT still fuses it, and 16-bit sums over long rows lose what the softmax needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import onnx
import torch
from onnx import TensorProto, shape_inference
from torch import Tensor
from torch.nn import functional

from mha_deploy.attention import MultiHeadAttention
from mha_deploy.errors import InputError
from mha_deploy.graph import write_graph
from mha_deploy.islands import keep_in_fp32
from mha_deploy.onnx_files import INLINE_LIMIT, check_graph
from mha_deploy.packed import LAYOUTS, graph_signature
from mha_deploy.packed_attention import PackedAttention
from mha_deploy.precision import Precision
from mha_deploy.signature import Signature
from mha_deploy.spec import AttentionSpec

IO_FORMS = ("fp32", "same")
ISLANDS = "-islands"  # at the end of the name of a form that keeps some nodes in fp32
TYPED = (Precision.FP32, Precision.FP16, Precision.BF16)


@dataclass(frozen=True, slots=True)
class Variant:
    """A precision, by member or name, the form of inputs and outputs (fp32, or the "same" as it), and
    the layout of tokens: "padded", or "packed" (see `packed`).

    `keep_fp32` names nodes of the typed graph that compute in fp32 all the same, beside the attention
    core, which always does.

    Raises:
        InputError: another precision, form or layout, or nodes to keep in fp32 where all are.
    """

    precision: Precision
    io: str = "fp32"
    layout: str = "padded"
    keep_fp32: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.precision in list(Precision):
            object.__setattr__(self, "precision", Precision(self.precision))
        if self.precision not in TYPED or self.io not in IO_FORMS:
            raise InputError(
                f"precision {self.precision} with io {self.io!r}; "
                "expected fp32, fp16 or bf16 with io fp32 or same"
            )
        if self.layout not in LAYOUTS:
            raise InputError(f"layout {self.layout!r}; expected one of {', '.join(LAYOUTS)}")
        if self.keep_fp32 and self.precision is Precision.FP32:
            raise InputError(
                "every node computes in fp32 already; name nodes to keep in it with fp16 or bf16"
            )
        object.__setattr__(self, "keep_fp32", tuple(sorted(set(self.keep_fp32))))

    @property
    def name(self) -> str:
        """The artifact's: "fp16", "fp16-io", "packed" (in fp32), "packed-fp16", "fp16-islands"."""
        parts = ["packed"] if self.layout == "packed" else []
        parts += [] if parts and self.precision is Precision.FP32 else [self.precision.value]
        return "-".join(parts) + ("" if self.io == "fp32" else "-io") + (ISLANDS if self.keep_fp32 else "")

    def signature(self, spec: AttentionSpec) -> Signature:
        """Of this variant's graph of `spec`.

        Raises:
            SpecError: the block has no packed layout, and that is asked for.
        """
        of = graph_signature(spec) if self.layout == "packed" else spec.signature
        return of if self.io == "fp32" else of.at(self.precision)


class TypedAttention(MultiHeadAttention):
    """The reference in another precision, between casts where its inputs and outputs stay fp32."""

    def __init__(self, module: MultiHeadAttention, variant: Variant) -> None:
        super().__init__(module.spec)
        self.load_state_dict(module.state_dict())
        self.dtype: torch.dtype = getattr(torch, variant.precision.dtype_name)
        self.io_dtype = torch.float32 if variant.io == "fp32" else self.dtype
        self.to(self.dtype)

    def fused(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
        """In fp32, and with heads of one size: TensorRT takes no others, and fuses only what stands
        right between the casts, so zeros are added before them."""
        size, context_size = q.shape[-1], v.shape[-1]
        wide = max(size, context_size)
        q, k, v = (functional.pad(x, (0, wide - x.shape[-1])) if x.shape[-1] < wide else x for x in (q, k, v))
        context = functional.scaled_dot_product_attention(
            q.float(),
            k.float(),
            v.float(),
            attn_mask=keep,
            scale=size**-0.5,
            enable_gqa=self.spec.num_kv_heads != self.spec.num_heads,
        )
        return context.to(q.dtype)[..., :context_size]

    def forward(self, *inputs: Tensor) -> Tensor:
        typed = (x.to(self.dtype) if x.is_floating_point() else x for x in inputs)
        return super().forward(*typed).to(self.io_dtype)


class TypedPackedAttention(TypedAttention, PackedAttention):
    """The same over packed tokens: casts of the one around the forward of the other."""


def write_typed(
    module: MultiHeadAttention, variant: Variant, path: Path, inline_limit: int = INLINE_LIMIT
) -> None:
    """Export `module` in the variant's precision and layout to `path`.

    Raises:
        SpecError: the block has no packed layout, and that is asked for.
        GraphError, FrozenAxisError: as `graph.write_graph`.
        InputError: the graph has no node of a name to keep in fp32.
    """
    signature = variant.signature(module.spec)
    kind = TypedPackedAttention if variant.layout == "packed" else TypedAttention
    write_graph(kind(module, variant), signature, path, inline_limit)
    if variant.keep_fp32:
        weights = {name: tensor.numpy() for name, tensor in module.state_dict().items()}
        keep_in_fp32(path, variant.keep_fp32, weights)
        check_graph(path, signature)


def kept_in_fp32(path: Path) -> list[str]:
    """What a 16-bit graph computes in fp32 all the same, by node, and which inputs and outputs stay fp32."""
    graph = shape_inference.infer_shapes(onnx.load(str(path), load_external_data=False)).graph
    values = {v.name: v.type.tensor_type.elem_type for v in (*graph.value_info, *graph.input, *graph.output)}
    interface = [value.name for value in (*graph.input, *graph.output)]
    kept = [
        f"{node.op_type} {node.name}"
        for node in graph.node
        if node.op_type != "Cast" and any(values.get(name) == TensorProto.FLOAT for name in node.output)
    ]
    return kept + [f"graph value {name}" for name in interface if values[name] == TensorProto.FLOAT]
