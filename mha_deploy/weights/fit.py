"""Which layout the names under a prefix follow, and all that does not fit the spec."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher

from mha_deploy.spec import PROJECTIONS, AttentionSpec
from mha_deploy.weights.checkpoint import Stored
from mha_deploy.weights.layouts import LAYOUTS, Layout, Source, linear
from mha_deploy.weights.reference import expected_shapes, possible_shapes

Entries = Mapping[str, Stored]

READABLE = ("float32", "float16", "bfloat16", "float64")


def dotted(prefix: str) -> str:
    """The prefix with the dot that people forget."""
    return f"{prefix}." if prefix and not prefix.endswith(".") else prefix


def under(names: Iterable[str], prefix: str) -> list[str]:
    """The full names under the prefix, `layer.1` not holding `layer.10`."""
    return [name for name in names if name.startswith(dotted(prefix))]


def candidates(names: Iterable[str]) -> list[Layout]:
    """The layouts that most of the four projection matrices speak for; at least two must be there.

    More than one only where layouts share those names (GPT-2 and nanoGPT), or where a tensor is
    missing that would tell them apart.
    """
    present = set(names)
    votes = [
        sum(len(source.targets) for source in layout.weights if source.name in present) for layout in LAYOUTS
    ]
    best = max(votes)
    return [layout for layout, vote in zip(LAYOUTS, votes, strict=True) if vote == best >= 2]


def refusals(layout: Layout, names: Iterable[str]) -> list[str]:
    """Reasons why a layer with these names is not the reference module's attention."""
    present = set(names)
    return [f"{name} is {reason}" for name, reason in layout.refused.items() if name in present]


def sources_for(layout: Layout, spec: AttentionSpec) -> list[Source]:
    """The stored tensors that a checkpoint which fits the spec holds."""
    wanted = expected_shapes(spec)
    return [
        source
        for source in (*layout.sources, *layout.norm_sources(spec.norm))
        if all(target in wanted for target in source.targets)
    ]


def problems(layout: Layout, entries: Entries, spec: AttentionSpec) -> list[str]:
    """One line for each tensor that is missing, left over or of a wrong shape or dtype."""
    wanted = sources_for(layout, spec)
    lines = _bias_problems(layout, entries, spec)
    for source in wanted:
        if source.name in entries:
            lines += _tensor_problems(source, entries[source.name], spec)
        elif source not in layout.biases:
            lines.append(_missing_problem(source, spec))
    known = {source.name for source in (*wanted, *layout.biases, *left_out(layout, entries, spec))}
    leftover = [name for name in entries if name not in known and not _is_buffer(layout, name, entries[name])]
    return lines + [_leftover_problem(layout, name, entries[name], spec) for name in leftover]


def left_out(layout: Layout, entries: Entries, spec: AttentionSpec) -> list[Source]:
    """The layout's own LayerNorm where the spec wants the attention without one: known, and not read."""
    if spec.norm != "none":
        return []
    return [source for source in linear(layout.norm, "norm") if source.name in entries]


def stored_shape(source: Source, spec: AttentionSpec) -> tuple[int, ...]:
    """The shape that the file should have; () where these sizes cannot be stacked."""
    parts = [possible_shapes(spec)[target] for target in source.targets]
    if any(part[1:] != parts[0][1:] for part in parts):
        return ()
    stacked = (sum(part[0] for part in parts), *parts[0][1:])
    return stacked[::-1] if source.transposed else stacked


def _missing_problem(source: Source, spec: AttentionSpec) -> str:
    shape = stored_shape(source, spec)
    needs = f"; the spec needs {list(shape)}" if shape else ""
    if source.targets[0].startswith("norm."):
        needs += f' for norm = "{spec.norm}": store it under this name, or set norm = "none" in [attention]'
    return f"{source.name} is missing{needs}"


def _tensor_problems(source: Source, stored: Stored, spec: AttentionSpec) -> list[str]:
    lines = []
    if stored.dtype not in READABLE:
        lines.append(
            f"{source.name} is {stored.dtype}; expected {', '.join(READABLE)}: "
            "quantised weights are not read, give the floating-point checkpoint"
        )
    shape = stored_shape(source, spec)
    if not shape:
        lines.append(
            f"{source.name} {list(stored.shape)} stacks matrices of one input width, but the spec has "
            f"d_model = {spec.d_model}, kdim = {spec.kdim}, vdim = {spec.vdim}"
        )
    elif stored.shape != shape:
        stacked = f" ({', '.join(source.targets)} stacked)" if len(source.targets) > 1 else ""
        lines.append(
            f"{source.name} is {list(stored.shape)}; the spec needs {list(shape)}{stacked}"
            + _one_head_hint(source, stored, spec)
        )
    return lines


def _one_head_hint(source: Source, stored: Stored, spec: AttentionSpec) -> str:
    """Articles print Linear(d_model, d_k) where d_k is per head and the layer needs h * d_k."""
    if source.targets != ("query.weight",) or stored.shape != (spec.head_dim, spec.d_model):
        return ""
    return (
        f": this is one head of {spec.head_dim}, Linear(d_model, d_k) without the factor h, which makes no "
        f"multi-head layer; make it Linear(d_model, h * d_k) and train again, or set num_heads = 1 and "
        f"head_dim = {spec.head_dim}"
    )


def _bias_problems(layout: Layout, entries: Entries, spec: AttentionSpec) -> list[str]:
    held = {target for source in layout.biases if source.name in entries for target in source.targets}
    found = tuple(projection for projection in PROJECTIONS if f"{projection}.bias" in held)
    if found == spec.bias:
        return []
    extra = [name for name in found if name not in spec.bias]
    lacking = [name for name in spec.bias if name not in found]
    said = [f"the file has a bias for {', '.join(extra)} and the spec none"] if extra else []
    said += [f"the spec has a bias for {', '.join(lacking)} and the file none"] if lacking else []
    return [f"{'; '.join(said)}: set {_bias_line(found)} in [attention]"]


def _bias_line(found: tuple[str, ...]) -> str:
    if found in ((), PROJECTIONS):
        return f"bias = {'true' if found else 'false'}"
    return "bias = [" + ", ".join(f'"{name}"' for name in found) + "]"


def _is_buffer(layout: Layout, name: str, stored: Stored) -> bool:
    return layout.buffers.get(name) == len(stored.shape)


def _leftover_problem(layout: Layout, name: str, stored: Stored, spec: AttentionSpec) -> str:
    hint = ""
    if name.startswith(f"{layout.norm}."):
        kinds = " or ".join(f'norm = "{kind}"' for kind in layout.norm_kinds)
        hint = f'; a LayerNorm here needs {kinds} in [attention], which has norm = "{spec.norm}"'
    return f"{name} {list(stored.shape)} is left over: the block has no place for it{hint}"


def suggestion(names: Iterable[str], prefix: str) -> str:
    """The prefixes that hold a whole layout, nearest to the given one first, as the end of a message."""
    present = set(names)
    found = {
        name.removesuffix(layout.weights[0].name)
        for layout in LAYOUTS
        for name in present
        if f".{name}".endswith(f".{layout.weights[0].name}")
    }
    whole = [
        start
        for start in found
        if start != dotted(prefix)
        and any(all(start + source.name in present for source in layout.weights) for layout in LAYOUTS)
    ]
    if not whole:
        return ""
    ordered = sorted(sorted(whole, key=_natural), key=lambda start: -_likeness(start, prefix))
    shown = " or ".join(f"--prefix '{start}'" for start in ordered[:3])
    return f"; did you mean {shown}" + (f" (or {len(whole) - 3} more)" if len(whole) > 3 else "") + "?"


def _likeness(start: str, prefix: str) -> float:
    return SequenceMatcher(None, start, prefix).ratio()


def _natural(text: str) -> list[str | int]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", text)]
