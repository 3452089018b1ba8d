"""The padding mask and what keeps padding out."""

from __future__ import annotations

from mutants.graph import CONTEXT, Graph, redirect
from mutants.mutant import PORTABLE, mutant


@mutant("padding kept and tokens masked")
def mask_inverted(g: Graph) -> list[str]:
    return [g.after(g.keep, "Not")]


@mutant("the mask of key i put on key i + 1")
def mask_shifted_by_one(g: Graph) -> list[str]:
    keep = g.keep
    readers = g.consumers(keep)
    ends = {n: g.constant([n], "int64") for n in (-1, 0, 3, 2**31)}
    last = g.put(readers, "Slice", keep, ends[-1], ends[2**31], ends[3])
    others = g.put(readers, "Slice", keep, ends[0], ends[-1], ends[3])
    shifted = g.put(readers, "Concat", last, others, axis=3)
    redirect(readers, keep, shifted)
    return [last, others, shifted]


@mutant("every sample masked as the first one")
def mask_of_the_first_sample(g: Graph) -> list[str]:
    return [g.after(g.keep, "Slice", *(g.constant([n], "int64") for n in (0, 1, 0)))]


@mutant("the mask read and ignored")
def mask_ignored(g: Graph) -> list[str]:
    return [g.after(g.keep, "Or", g.constant(True, "bool"))]


@mutant("a fully masked row left to the softmax", forms=(PORTABLE,))
def empty_row_guard_removed(g: Graph) -> list[str]:
    guard = g.producer(CONTEXT)
    guard.op_type = "Identity"
    guard.input[:] = [guard.input[1]]
    return [guard.name]


@mutant("the selection that keeps padding out removed")
def padding_guard_removed(g: Graph) -> list[str]:
    guard = g.node("node_where")
    return g.bypass(guard, guard.input[1])
