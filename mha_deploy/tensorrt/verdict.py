"""Which attentions a plan computes in one fused kernel, and why the others are not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mha_deploy.tensorrt.attentions import Attention
from mha_deploy.tensorrt.plan import FUSED_KERNEL, fused_layers, has_known_text

# Head sizes with a fused kernel, as found on sm75 to sm121; sizes between multiples of 8 are padded.
FUSED_HEADS = range(16, 257)
FUSED_PRECISIONS = ("fp16", "bf16", "fp8")


@dataclass(frozen=True, slots=True)
class AttentionVerdict:
    """`fused` is what the plan proves; `kernel` is "" and `reason` says why not where it is not."""

    name: str
    fused: bool
    kernel: str
    reason: str


def judge(
    attentions: Sequence[Attention], plan: bytes, *, profiles: int, decomposable: bool
) -> tuple[AttentionVerdict, ...]:
    """One verdict per attention; fused means in the code of every one of the `profiles`."""
    if not has_known_text(plan):
        return tuple(_without_text(attention, decomposable=decomposable) for attention in attentions)
    kernels = Counter(name for layers in fused_layers(plan) for name in layers)
    names = Counter(attention.name for attention in attentions)
    verdicts = []
    for attention in attentions:
        found, wanted = kernels[attention.name], profiles * names[attention.name]
        if found >= wanted:
            verdicts.append(AttentionVerdict(attention.name, True, FUSED_KERNEL, ""))
        else:
            part = f" (fused in {found} of {wanted} places)" if found else ""
            reason = why_not(attention, decomposable=decomposable) + part
            verdicts.append(AttentionVerdict(attention.name, False, "", reason))
    return tuple(verdicts)


def _without_text(attention: Attention, *, decomposable: bool) -> AttentionVerdict:
    """A plan that does not list its kernels in the known form."""
    if attention.operator and not decomposable:
        reason = "TensorRT builds an attention operator that may not be decomposed only with a fused kernel"
        return AttentionVerdict(attention.name, True, "unknown", reason)
    return AttentionVerdict(attention.name, False, "", "unknown: this plan does not list its kernels")


def why_not(attention: Attention, *, decomposable: bool) -> str:
    """The reason, as far as the graph tells, that an attention has no fused kernel."""
    precision, head, value = attention.precision, attention.head_dim, attention.value_dim
    if precision and precision not in FUSED_PRECISIONS:
        advice = "" if attention.operator else "; casts to fp32 fuse only around the Attention operator"
        return f"precision: {precision} attention has no fused kernel, fp16 and bf16 have{advice}"
    if head and head not in FUSED_HEADS:
        return f"head size: {head}, fused kernels take {FUSED_HEADS[0]} to {FUSED_HEADS[-1]}"
    if head and value and head != value:
        return f"head size: value heads of {value} with query/key heads of {head}"
    if attention.operator and decomposable:
        return "decomposed: TensorRT was free to take it apart and did"
    if attention.operator:
        return f"mask: no fused kernel with this mask ({attention.mask})"
    return "decomposed: TensorRT did not recognise this MatMul-Softmax-MatMul as attention"
