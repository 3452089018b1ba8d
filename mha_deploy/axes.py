"""Proof that a graph follows its dynamic axes, and the name of the axis and the node where it does not."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import onnx

from mha_deploy.cases import Case, describe, lattice_cases, sized_case
from mha_deploy.errors import CheckError, FrozenAxisError, GraphError
from mha_deploy.graph import traced_sizes
from mha_deploy.sessions import Session
from mha_deploy.sessions.onnx_runtime import OnnxRuntimeSession
from mha_deploy.signature import Signature, Sizes, TensorSpec
from mha_deploy.spec import AttentionSpec
from mha_deploy.verification import CaseResult, Judge, as_inputs

# A graph that does not follow an axis, or is not the block, is off by orders of magnitude; whether it
# is as accurate as it should be is `verify`'s question, with the exact gate.
GROSS = 10.0
# Their output's shape does not follow their input's, and need not.
_SHAPE_ENDS_HERE = ("Shape", "Size", "Reduce")


def prove_axes(
    path: Path,
    session: Session,
    spec: AttentionSpec,
    judge: Judge,
    progress: Callable[[str], None] = lambda _: None,
) -> list[CaseResult]:
    """Run `session`, the graph at `path`, over sizes it was not traced at, and compare with PyTorch.

    An error of up to GROSS times what `verify` allows is let pass here.

    Raises:
        FrozenAxisError: naming the axis that the graph does not follow, and the node.
        CheckError: the graph follows its axes, but an answer is wrong.
    """

    def name_frozen_axis() -> None:
        _name_frozen_axis(path, session, spec, judge)

    return prove_sizes(session, spec, judge, progress, name_frozen_axis)


def prove_sizes(
    session: Session,
    spec: AttentionSpec,
    judge: Judge,
    progress: Callable[[str], None] = lambda _: None,
    explain: Callable[[], None] = lambda: None,
) -> list[CaseResult]:
    """`prove_axes` of a session whose graph has other inputs than `spec`, so that no node is named.

    `explain` may raise a better error than the one that is raised here.

    Raises:
        CheckError: an answer is wrong.
    """
    results = []
    for case in lattice_cases(spec):
        progress(f"proving {case.name}")
        failure = _failure(session, judge, case)
        if isinstance(failure, str):
            explain()
            raise CheckError(f"the exported graph is wrong at {case.name}: {failure}")
        results.append(failure)
    return results


def _failure(session: Session, judge: Judge, case: Case) -> CaseResult | str:
    """The result where `case` is what PyTorch computes, GROSS beyond the gate at most, or what is wrong."""
    try:
        result = judge(session, session.name, case)
    except (GraphError, FrozenAxisError) as error:
        return str(error)
    if result.max_abs_error <= GROSS * result.allowed:
        return result
    return f"error {result.max_abs_error:.3g}, allowed {result.allowed:.3g} {result.note}".rstrip()


def _name_frozen_axis(path: Path, session: Session, spec: AttentionSpec, judge: Judge) -> None:
    """Move one axis at a time away from the sizes that the export traced; raise for one that fails."""
    traced = {
        name: min(max(size, spec.signature.dim(name).min), spec.signature.dim(name).max)
        for name, size in traced_sizes(spec.signature).items()
    }
    if isinstance(_failure(session, judge, sized_case(spec, traced)), str):
        return  # wrong even there: not a matter of axes
    for dim in spec.dims:
        # Below and above: a slice to the traced length is right at every shorter one.
        for size in {dim.min, min(traced[dim.name] + 1, dim.max), dim.max} - {traced[dim.name]}:
            moved = {**traced, dim.name: size}
            failure = _failure(session, judge, sized_case(spec, moved))
            if isinstance(failure, str):
                node = _failing_node(failure) or _stuck_node(path, session.signature, spec, traced, moved)
                raise FrozenAxisError(
                    f"axis {dim.name!r} is frozen{node}: the graph is right at {describe(traced)}, the "
                    f"sizes it was traced at, but not at {describe(moved)}: {failure}"
                )


def _failing_node(failure: str) -> str:
    """The node that ONNX Runtime's message names."""
    found = re.search(r"running (\w+) node\. Name:'([^']*)'", failure)
    return f" at node {found[2]!r} ({found[1]})" if found else ""


def _stuck_node(path: Path, signature: Signature, spec: AttentionSpec, one: Sizes, other: Sizes) -> str:
    """The first node whose input follows the change of sizes and whose output does not."""
    model = onnx.load(str(path))
    names = [name for node in model.graph.node for name in node.output if name]
    outputs = {value.name for value in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in outputs)
    exposed = path.with_name(f".exposed-{path.name}")
    onnx.save(model, str(exposed))
    try:
        before, after = (
            _shapes(exposed, signature, names, sized_case(spec, sizes)) for sizes in (one, other)
        )
    finally:
        exposed.unlink()
    for node in model.graph.node:
        moved = any(before.get(name) != after.get(name) for name in node.input)
        still = all(before[name] == after[name] for name in node.output)
        if moved and still and not node.op_type.startswith(_SHAPE_ENDS_HERE):
            return f" at node {node.name!r} ({node.op_type})"
    return ""


def _shapes(path: Path, signature: Signature, names: list[str], case: Case) -> dict[str, tuple[int, ...]]:
    exposed = Signature(signature.inputs, tuple(TensorSpec(name, "", ()) for name in names), signature.dims)
    feeds = as_inputs(case.feeds, signature)
    with _Unchecked(path, exposed) as session:
        values = session.run(feeds)
    return {name: array.shape for name, array in {**feeds, **values}.items()}


class _Unchecked(OnnxRuntimeSession):
    """Values inside a graph have shapes that no signature describes."""

    def _check_outputs(self, outputs: dict[str, object], sizes: Sizes) -> None:  # type: ignore[override]
        pass
