"""A foreign ONNX file against the PyTorch module that it was made from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from mha_deploy.cases import Case
from mha_deploy.errors import GraphError, InputError
from mha_deploy.foreign.drawing import Drawing, Drawn, named, sizes_of
from mha_deploy.foreign.file_map import map_by_output
from mha_deploy.foreign.onnx_file import ForeignFile, dims_of, read_foreign
from mha_deploy.foreign.session import Foreign, in_fp32, runnable, twin_note
from mha_deploy.masks import narrowed
from mha_deploy.precision import Precision, numpy_dtype
from mha_deploy.sessions import DEFAULT_PLACEMENT, Placement
from mha_deploy.signature import LARGEST, Array, Dim, Feeds, Signature
from mha_deploy.verification import (
    OUT_OF_RANGE,
    Bench,
    CaseResult,
    Judge,
    Observe,
    Planned,
    VerifyReport,
    failed_case,
)


def verify_against_module(
    path: Path,
    reference: str,
    *,
    dims: Sequence[str] = (),
    output_name: str = "",
    max_relative_error: float = 0.0,
    names: Sequence[str] = (),
    placement: Placement = DEFAULT_PLACEMENT,
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
    observe: Observe = lambda _result, _map: None,
    planned: Planned = lambda _names: None,
) -> VerifyReport:
    """Hold the ONNX file at `path` against the module of `reference`, "file.py:factory".

    The factory returns a torch.nn.Module with the file's weights, whose forward takes the file's
    inputs in the file's order; its code runs here. Truth is that module in fp64, the yardstick ten of
    its runs at the file's precision. `dims` ("seq=1:128:512") give ranges, else every axis is 1..8..32.
    Rows where the module itself is not finite, as those of a query with nothing to look at often are,
    are not compared, and the case says how many. A file that does not load or run has failed.
    `names` picks cases, all where empty; `observe` and `planned` are as in `verify`.

    Raises:
        InputError: no such file, a reference that cannot be loaded or run, an unknown dim or output, or
            an integer precision, which takes real inputs.
        MissingError: this machine lacks ONNX Runtime or a provider.
    """
    from mha_deploy.foreign.module import ModuleReference, load_module

    module = load_module(reference)
    against = f"{Path(reference.rpartition(':')[0]).name}:{reference.rpartition(':')[2]} in PyTorch fp64"
    try:
        file = read_foreign(path)
    except GraphError as error:
        result = failed_case("load", path.name, Precision.FP32, {}, str(error))
        return VerifyReport(path.name, (result,), {path.name: "not loaded"}, against=against)
    file.check_budget(max_relative_error)
    if file.precision.is_integer:
        raise InputError(
            f"{path.name} has integer products, which are judged on real inputs: hold it against a bundle, "
            f"verify BUNDLE --onnx {path.name} --inputs FILE"
        )
    ranges = dims_of(file, dims)
    output = file.output(output_name, file.outputs[:1])
    signature = _signature(file)
    judged = ModuleReference(module, signature, file.outputs.index(output))
    truth = judged.open("fused", Precision.FP64)

    def takes(feeds: Feeds) -> None:
        truth.run(feeds)

    drawing = Drawing(file, ranges, takes, seed)
    notes = (f"output: {output}", f"dims: {', '.join(map(str, ranges)) or 'none'}", file.judged)
    foreign = Foreign(file, signature, output.name, partial(_typed, file), placement)
    results = []
    with runnable(file, placement) as runs:
        try:
            session = foreign.open(runs)
        except GraphError as error:
            results = [failed_case("load", path.name, file.precision, sizes_of(ranges), str(error))]
            return VerifyReport(
                path.name, tuple(results), {path.name: "not loaded"}, against=against, notes=notes
            )
        with session:
            bench = Bench(
                Judge(judged, max_relative_error=max_relative_error),
                session,
                path.name,
                progress=progress,
                observe=observe,
                draw=partial(map_by_output, judged, foreign),
            )
            cases = drawing.cases(names)
            planned([drawn.name for drawn in cases])
            for drawn in cases:
                progress(f"{path.name}: {drawn.name}")
                case, lost = _case(drawn, truth.run(drawn.feeds)["y"])
                results.append(_result(bench, case, lost))
            providers = {path.name: session.provider}
    not_checked = (*_not_checked(file, drawing, output.name), *twin_note(file, placement))
    return VerifyReport(
        path.name,
        tuple(results),
        providers,
        against=against,
        notes=notes,
        not_checked=not_checked,
        seed=seed,
    )


def _case(drawn: Drawn, truth: Array) -> tuple[Case, str]:
    """The case over the rows where the module is finite, and what to say of the others."""
    rows = np.asarray(np.isfinite(truth).all(axis=-1))
    lost = rows.size - int(rows.sum())
    said = f"{lost} of {rows.size} rows not compared: the module is not finite there" if lost else ""
    return Case(drawn.name, drawn.sizes, drawn.feeds, rows), said


def _result(bench: Bench, case: Case, lost: str) -> CaseResult:
    if not case.compared.any():
        result = failed_case(case.name, bench.artifact, bench.session.precision, case.sizes, lost)
        return replace(result, outcome=OUT_OF_RANGE)
    result = bench.case(case)
    return replace(result, note="; ".join(filter(None, (result.note, lost))))


def _signature(file: ForeignFile) -> Signature:
    """The file's inputs, floating point in fp32. Which sizes go together is for the file to say."""
    axes = dict.fromkeys(a for tensor in file.inputs for a in tensor.shape if isinstance(a, str))
    inputs = tuple(replace(t, dtype="float32") if t.is_float else t for t in file.inputs)
    return Signature(inputs, (), tuple(Dim(axis, 1, 1, LARGEST) for axis in axes))


def _typed(file: ForeignFile, *, twin: bool) -> Callable[[Feeds], dict[str, Array]]:
    dtypes = {t.name: numpy_dtype((in_fp32(t) if twin else t).dtype) for t in file.inputs}
    return lambda feeds: {name: narrowed(array, dtypes[name]) for name, array in feeds.items()}


def _not_checked(file: ForeignFile, drawing: Drawing, output: str) -> list[str]:
    lines = []
    if not file.is_attention:
        lines.append(
            "masks and a sharp softmax: no attention was found in the file, so its cases were skipped"
        )
    elif not drawing.masks:
        lines.append("padding right, left and with holes, and fully masked rows: the file has no mask input")
    else:
        lines.append("garbage in padding: whether a module looks there is its own to say")
    if drawing.guessed:
        lines.append(f"the meaning of {named(drawing.guessed)} beyond a name: drawn as a mask")
    if drawing.integers:
        lines.append(
            f"values of integer inputs {named(drawing.integers)} beyond those drawn, whole numbers from 1 to "
            "an axis' size"
        )
    ignored = [tensor.name for tensor in file.outputs if tensor.name != output]
    if ignored:
        lines.append(f"outputs {named(ignored)}: only {output} is compared")
    fixed = [
        f"{tensor.name} axis {position} = {axis}"
        for tensor in file.inputs
        for position, axis in enumerate(tensor.shape[: -1 if tensor.is_float else None])
        if isinstance(axis, int) and axis != 1
    ]
    if fixed:
        lines.append(f"other sizes than the file is frozen at: {named(fixed)}")
    return [*lines, *file.remarks]
