"""A foreign ONNX file against a bundle's reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from mha_deploy.bundle import Bundle
from mha_deploy.cases import Case
from mha_deploy.errors import GraphError
from mha_deploy.foreign.file_map import map_by_head
from mha_deploy.foreign.matching import BY_NAME, Pair, looks_like_mask, match_inputs, parse_names
from mha_deploy.foreign.onnx_file import ForeignFile, parse_dims, read_foreign
from mha_deploy.foreign.session import Foreign, in_fp32, runnable, twin_note
from mha_deploy.masks import form_of, from_keep
from mha_deploy.precision import Precision, numpy_dtype
from mha_deploy.ragged import Request
from mha_deploy.sessions import DEFAULT_PLACEMENT, Placement
from mha_deploy.signature import Array, Dim, Feeds, TensorSpec
from mha_deploy.spec import AttentionSpec
from mha_deploy.verification import (
    Bench,
    CaseResult,
    Judge,
    Observe,
    Planned,
    PropertyResult,
    Suite,
    VerifyReport,
    failed_case,
)
from mha_deploy.verification.properties import Property
from mha_deploy.verification.run import NO_INPUTS, given_cases, refuse_unjudged

_NO_MASK = "padding right, left and with holes, fully masked rows and garbage in padding"


@dataclass(frozen=True, slots=True)
class _Fit:
    """How a file and a bundle's block go together. `frozen` has the size of each axis that is fixed."""

    file: ForeignFile
    spec: AttentionSpec
    pairs: tuple[Pair, ...]
    all_kept: tuple[TensorSpec, ...]
    output: TensorSpec
    form: str
    frozen: Mapping[str, int]


def verify_file(
    bundle: Bundle,
    path: Path,
    *,
    input_names: Sequence[str] = (),
    output_name: str = "",
    mask_form: str = "",
    dims: Sequence[str] = (),
    max_relative_error: float = 0.0,
    names: Sequence[str] = (),
    inputs: Feeds = NO_INPUTS,
    placement: Placement = DEFAULT_PLACEMENT,
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
    observe: Observe = lambda _result, _map: None,
    planned: Planned = lambda _names: None,
) -> VerifyReport:
    """Hold the ONNX file at `path` against the bundle's reference on the standard cases.

    Inputs are matched by name, else by shape and dtype where only one fits, or as `input_names`
    ("ours=theirs") says. `mask_form` is "keep", "ignore" or "additive", by default what the mask
    input's dtype says. `dims` ("seq=16") narrow the bundle's own: an axis that the file freezes is a
    failure unless it is declared so. A file that does not load or run has failed too. `names`
    picks cases and properties, as in `verify`; `inputs`, `observe` and `planned` are as there.

    Raises:
        InputError: no such file, inputs or outputs that cannot be told apart, a dim that the bundle does
            not have, or a precision whose budget is not declared.
        MissingError: this machine lacks ONNX Runtime or a provider.
    """
    try:
        file = read_foreign(path)
    except GraphError as error:
        return _unloaded(bundle.spec, path, str(error))
    file.check_budget(max_relative_error)
    fit = _fit(
        bundle.spec,
        file,
        named=parse_names(input_names),
        output_name=output_name,
        mask_form=mask_form,
        dims=dims,
    )
    results = [_frozen(fit, bundle.spec, name, size) for name, size in fit.frozen.items()]
    judge = Judge(bundle.reference(), max_relative_error=max_relative_error)
    real = given_cases(fit.spec, inputs, _short_enough(bundle.real_inputs(), fit.spec))
    if not names:
        refuse_unjudged(path.name, file.precision, real)
    suite = Suite(fit.spec, judge.references, real=real, seed=seed, names=names)
    planned(suite.case_names)
    foreign = Foreign(file, fit.spec.signature, fit.output.name, partial(_translation, fit), placement)
    with runnable(file, placement) as runs:
        try:
            session = foreign.open(runs)
        except GraphError as error:
            return _unloaded(bundle.spec, path, str(error), file.precision)
        with session:
            bench = Bench(
                judge,
                session,
                path.name,
                progress=progress,
                observe=observe,
                draw=partial(map_by_head, bundle, foreign),
            )
            found = list(bench.results(*_checkable(fit, suite, file.precision)))
            providers = {path.name: session.provider}
    results += [result for result in found if isinstance(result, CaseResult)]
    held = tuple(result for result in found if isinstance(result, PropertyResult))
    not_checked = (*_not_checked(bundle.spec, fit), *twin_note(file, placement))
    notes = (f"inputs: {', '.join(map(str, fit.pairs))}", f"output: {fit.output}", file.judged)
    return VerifyReport(
        bundle.spec.name,
        tuple(results),
        providers,
        properties=held,
        notes=notes,
        not_checked=not_checked,
        seed=seed,
    )


def _fit(
    spec: AttentionSpec,
    file: ForeignFile,
    *,
    named: Sequence[tuple[str, str]],
    output_name: str,
    mask_form: str,
    dims: Sequence[str],
) -> _Fit:
    declared = parse_dims(dims, [dim.name for dim in spec.dims])
    spec = replace(spec, dims=tuple(declared.get(dim.name, dim) for dim in spec.dims))
    has_mask = spec.mask != "none"
    all_kept = () if has_mask else tuple(t for t in file.inputs if looks_like_mask(t))
    theirs = [tensor for tensor in file.inputs if tensor not in all_kept]
    pairs = match_inputs(spec.signature.inputs, theirs, named)
    fits = [t for t in file.outputs if len(t.shape) == 3 and t.shape[-1] == spec.d_model]
    mask = next((p.theirs for p in pairs if not p.ours.is_float), None)
    form = mask_form or (form_of(mask.dtype) if mask else "keep")
    frozen = _frozen_axes(pairs)
    narrowed = replace(spec, dims=tuple(_narrowed(dim, frozen) for dim in spec.dims))
    moved = {
        n: s for n, s in frozen.items() if (spec.signature.dim(n).min, spec.signature.dim(n).max) != (s, s)
    }
    return _Fit(file, narrowed, pairs, all_kept, file.output(output_name, fits), form, moved)


def _frozen_axes(pairs: Sequence[Pair]) -> dict[str, int]:
    return {
        ours: theirs
        for pair in pairs
        if pair.ours.is_float
        for ours, theirs in zip(pair.ours.shape, pair.theirs.shape, strict=True)
        if isinstance(ours, str) and isinstance(theirs, int)
    }


def _narrowed(dim: Dim, frozen: Mapping[str, int]) -> Dim:
    return Dim(dim.name, *(frozen[dim.name],) * 3) if dim.name in frozen else dim


def _frozen(fit: _Fit, spec: AttentionSpec, name: str, size: int) -> CaseResult:
    dim = spec.signature.dim(name)
    note = (
        f"frozen at {size}, the bundle has {dim.min}..{dim.max}; the other cases run at {size} only "
        f"(--dim {name}={size} declares it)"
    )
    sizes = {dim.name: dim.opt for dim in fit.spec.dims}
    return failed_case(f"axis {name}", fit.file.path.name, fit.file.precision, sizes, note)


def _unloaded(
    spec: AttentionSpec, path: Path, why: str, precision: Precision = Precision.FP32
) -> VerifyReport:
    sizes = {dim.name: dim.opt for dim in spec.dims}
    result = failed_case("load", path.name, precision, sizes, why)
    return VerifyReport(
        spec.name, (result,), {path.name: "not loaded"}, not_checked=("anything: it did not load",)
    )


def _translation(fit: _Fit, *, twin: bool) -> Callable[[Feeds], dict[str, Array]]:
    spec = fit.spec

    def typed(tensor: TensorSpec) -> TensorSpec:
        return in_fp32(tensor) if twin else tensor

    def translate(feeds: Feeds) -> dict[str, Array]:
        first = feeds[spec.signature.inputs[0].name]
        sizes = spec.signature.check(feeds)
        queries, keys = first.shape[1], sizes[spec.key_axis]
        theirs = {}
        for pair in fit.pairs:
            tensor = typed(pair.theirs)
            if pair.ours.is_float:
                theirs[tensor.name] = feeds[pair.ours.name].astype(numpy_dtype(tensor.dtype))
            else:
                theirs[tensor.name] = from_keep(feeds[pair.ours.name], tensor, queries, fit.form)
        for tensor in fit.all_kept:
            kept = np.ones((len(first), keys), bool)
            theirs[tensor.name] = from_keep(kept, typed(tensor), queries, form_of(tensor.dtype))
        return theirs

    return translate


def _short_enough(requests: Sequence[Request], spec: AttentionSpec) -> list[Request]:
    """The requests that the narrowed dims take."""
    q, kv = (spec.signature.dim(axis).max for axis in (spec.query_axis, spec.key_axis))
    return [request for request in requests if request.q_len <= q and request.kv_len <= kv]


def _checkable(fit: _Fit, suite: Suite, precision: Precision) -> tuple[list[Case], list[Property]]:
    """What the file's inputs can show: where it takes no mask, what masks nothing."""
    cases, held = list(suite.cases(precision)), list(suite.properties)
    if fit.spec.mask == "none" or any(not pair.ours.is_float for pair in fit.pairs):
        return cases, held
    cases = [case for case in cases if all(_all_kept(feeds) for feeds, _ in case.draws)]
    unseen = "the file has no mask input"
    held = [p if all(map(_all_kept, p.feeds)) else replace(p, why_not=p.why_not or unseen) for p in held]
    return cases, held


def _all_kept(feeds: Feeds) -> bool:
    return all(array.all() for array in feeds.values() if array.dtype == bool)


def _not_checked(spec: AttentionSpec, fit: _Fit) -> list[str]:
    lines = []
    masks = [pair for pair in fit.pairs if not pair.ours.is_float]
    if spec.mask != "none" and not masks:
        lines.append(f"{_NO_MASK}: the file has no mask input")
    for pair in masks:
        lines.append(
            f"whether mask {pair.theirs.name!r} ({pair.theirs.dtype}) means what it was fed as, "
            f"{_FORMS[fit.form]}; --mask-form names another form"
        )
    lines += [f"masks: the bundle has none; {t.name!r} was fed as keeping everything" for t in fit.all_kept]
    guessed = [pair for pair in fit.pairs if pair.how not in (BY_NAME,)]
    if guessed:
        lines.append(f"the meaning of inputs beyond {', '.join(map(str, guessed))}")
    ignored = [tensor.name for tensor in fit.file.outputs if tensor != fit.output]
    if ignored:
        lines.append(f"outputs {', '.join(ignored)}: only {fit.output.name} is compared")
    for name, size in fit.frozen.items():
        lines.append(f"sizes of {name} other than {size}, at which the file is frozen")
    return [*lines, *fit.file.remarks]


_FORMS = {
    "keep": "True or 1 = keep",
    "ignore": "True or 1 = ignore",
    "additive": "0 = keep, the lowest number = ignore",
}
