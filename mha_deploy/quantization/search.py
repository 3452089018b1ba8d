"""Candidates one after another, cheapest first, until one passes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx

from mha_deploy import machine
from mha_deploy.benchmark import Estimate, Schedule, compare, measure, random_feeds, session_turn
from mha_deploy.bundle import CANONICAL, Bundle
from mha_deploy.cases import describe
from mha_deploy.errors import InputError
from mha_deploy.precision import Precision
from mha_deploy.quantization.calibration import Ranges, observe
from mha_deploy.quantization.candidate import Candidate, candidates
from mha_deploy.quantization.evidence import Sample, gather
from mha_deploy.quantization.plan import Source
from mha_deploy.quantization.report import KEPT, UNMEASURED, QuantizationReport, Tried
from mha_deploy.quantization.trial import Trials
from mha_deploy.ragged import Request
from mha_deploy.sessions import DEFAULT_PLACEMENT, Placement
from mha_deploy.sessions.onnx_runtime import OnnxRuntimeSession
from mha_deploy.verification import Judge


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked of an int8 form.

    `max_relative_error` is the budget on held-out real requests, as a share: 0.025 is 2.5 %. `scheme` is
    "dynamic" (scales from the values at hand), "static" (calibrated ones) or "auto", either. `keep_fp32`
    names nodes of the canonical graph that stay in fp32. `speed_seconds` is how long each candidate is
    timed, beside fp32; 0 leaves the speed unmeasured.

    Raises:
        InputError: a budget that is no share between 0 and 1, or a time below 0.
    """

    max_relative_error: float
    scheme: str = "auto"
    keep_fp32: Sequence[str] = ()
    speed_seconds: float = 0.6
    placement: Placement = DEFAULT_PLACEMENT

    def __post_init__(self) -> None:
        if not 0 < self.max_relative_error < 1:
            raise InputError(
                f"max_relative_error = {self.max_relative_error:g}; expected a share between 0 and 1: "
                "0.025 or 2.5%"
            )
        if not self.speed_seconds >= 0:
            raise InputError(f"speed_seconds = {self.speed_seconds}; expected 0 (not measured) or more")


def search(
    bundle: Bundle,
    requests: Sequence[Request],
    wanted: Wanted,
    folder: Path,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[QuantizationReport, Path]:
    """Try candidates until one passes; also where the graph of the last one tried lies, in `folder`.

    Raises:
        InputError: too few requests, an unknown scheme or node, or nothing left to quantise.
    """
    progress("calibrating")
    source = Source.of(onnx.load(str(bundle.artifact(CANONICAL).path(bundle.folder))), bundle.spec)
    source.check_names(wanted.keep_fp32)
    ordered = _distinct(candidates(wanted.scheme, source.graph, source.products), source, wanted)
    module = bundle.reference()
    evidence = gather(module, requests)
    activations = [product.activation for product in source.products]

    def ranges(samples: Sequence[Sample]) -> dict[str, Ranges]:
        feeds = [sample.case.feeds for sample in samples]
        return observe(source.model, activations, feeds, wanted.placement)

    trials = Trials(
        bundle=bundle,
        source=source,
        evidence=evidence,
        ranges=ranges(evidence.calibration),
        fit_ranges=ranges(evidence.fit),
        judge=Judge(module, max_relative_error=wanted.max_relative_error),
        keep_fp32=wanted.keep_fp32,
        max_relative_error=wanted.max_relative_error,
        folder=folder,
        placement=wanted.placement,
    )
    tried, paths = list[Tried](), list[Path]()
    for number, candidate in enumerate(ordered):
        progress(f"{number + 1} of {len(ordered)}: {candidate}")
        paths.append(folder / str(number) / "model.onnx")
        tried.append(trials.try_out(candidate, paths[-1]))
        if tried[-1].verdict == KEPT:
            break
    speeds, conditions = _speeds(bundle, paths, wanted, progress)
    report = QuantizationReport(
        subject=bundle.spec.name,
        max_relative_error=wanted.max_relative_error,
        calibration_requests=(len(requests) + 1) // 2,
        held_out_requests=len(requests) // 2,
        inputs="",
        tried=tuple(replace(each, time=time) for each, time in zip(tried, speeds, strict=True)),
        not_tried=tuple(ordered[len(tried) :]),
        fp32_bytes=sum(record.bytes for record in bundle.artifact(CANONICAL).files),
        speed_conditions=conditions,
    )
    return report, paths[-1]


def _distinct(ordered: Sequence[Candidate], source: Source, wanted: Wanted) -> list[Candidate]:
    """Of candidates that come to the same, the first: where nodes are kept, some differ by name only."""
    seen: dict[tuple[str, bool, tuple[Any, ...]], Candidate] = {}
    for candidate in ordered:
        taken = candidate.taken(source.products, wanted.keep_fp32)
        if taken:
            seen.setdefault((candidate.scheme, candidate.smooth, taken), candidate)
    if not seen:
        raise InputError(
            f"keeping {', '.join(wanted.keep_fp32)} in fp32 leaves nothing for int8; keep fewer nodes"
        )
    return list(seen.values())


def _speeds(
    bundle: Bundle, paths: Sequence[Path], wanted: Wanted, progress: Callable[[str], None]
) -> tuple[list[Estimate], dict[str, Any]]:
    """Time of each graph over that of fp32, in rounds in which all take turns, and what that stands on."""
    if not wanted.speed_seconds:
        return [UNMEASURED] * len(paths), {}
    sizes = {dim.name: dim.opt for dim in bundle.spec.dims}
    feeds = random_feeds(bundle.signature, sizes)
    schedule = Schedule(seconds=wanted.speed_seconds)
    with contextlib.ExitStack() as stack:
        fp32 = stack.enter_context(bundle.open_session(CANONICAL, wanted.placement))
        turns = [session_turn(CANONICAL, fp32, [feeds])]
        for path in paths:
            session = OnnxRuntimeSession(
                path,
                bundle.signature,
                name=path.parent.name,
                precision=Precision.INT8,
                placement=wanted.placement,
            )
            turns.append(session_turn(path.parent.name, stack.enter_context(session), [feeds]))
        base, *others = measure(turns, schedule, progress=lambda text: progress(f"speed: {text}")).values()
        conditions = {
            "sizes": describe(sizes),
            "provider": fp32.provider,
            "threads": wanted.placement.threads or machine.usable_cpus(),
            "protocol": schedule.to_json(),
            "fp32": base.to_json(),
            "machine": machine.describe(),
        }
    return [compare(base, samples).estimate for samples in others], conditions
