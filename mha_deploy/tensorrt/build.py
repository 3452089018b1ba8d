"""An ONNX file to a TensorRT plan: strongly typed, without TF32 unless asked, with a verdict."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mha_deploy.errors import GraphError, MissingError
from mha_deploy.tensorrt.attentions import Attention, find_attentions
from mha_deploy.tensorrt.backend import Backend, load_backend
from mha_deploy.tensorrt.graph import Graph, read_graph
from mha_deploy.tensorrt.lint import LintError, lint, parser_findings
from mha_deploy.tensorrt.log import Handle, Log, recording, stderr_into
from mha_deploy.tensorrt.messages import (
    NoAttentionKernel,
    RefusedError,
    explain,
    misuse,
    unused_inputs,
)
from mha_deploy.tensorrt.options import BuildOptions
from mha_deploy.tensorrt.profiles import ShapeRange, profiles_for_graph
from mha_deploy.tensorrt.progress import SILENT, Progress, Stop, interruptible, make_monitor
from mha_deploy.tensorrt.targets import resolve_targets
from mha_deploy.tensorrt.verdict import AttentionVerdict, judge, why_not

_ACTIVATION = re.compile(r"Total Activation Memory: (\d+) bytes")


@dataclass(frozen=True, slots=True)
class BuiltPlan:
    """A plan and what is known of it.

    `precision` is that of the weights in the ONNX file ("fp16", or "fp16+fp32" when mixed), which a
    strongly typed build keeps; `weight_bytes` has the shares. `decomposed` says that attention
    operators were allowed to be taken apart. `targets` is () for TensorRT's own choice.
    `activation_bytes` is TensorRT's figure for the largest profile, 0 when it gave none.
    `timing_cache` is what full TensorRT measured, b"" unless one was asked for.
    """

    plan: bytes = field(repr=False)
    backend: Backend
    options: BuildOptions
    attentions: tuple[AttentionVerdict, ...]
    decomposed: bool
    precision: str
    weight_bytes: tuple[tuple[str, int], ...]
    warnings: tuple[str, ...]
    activation_bytes: int
    log: tuple[str, ...] = field(repr=False)
    seconds: float
    timing_cache: bytes = field(default=b"", repr=False)

    @property
    def targets(self) -> tuple[str, ...]:
        return self.options.targets

    @property
    def fused(self) -> int:
        """How many attentions are computed in one fused kernel."""
        return sum(verdict.fused for verdict in self.attentions)


@dataclass(frozen=True, slots=True)
class _Job:
    backend: Backend
    graph: Graph
    options: BuildOptions
    shapes: tuple[Mapping[str, ShapeRange], ...]
    attentions: tuple[Attention, ...]
    progress: Progress


def build_plan(onnx_path: Path, options: BuildOptions, *, progress: Progress = SILENT) -> BuiltPlan:
    """Build `onnx_path`. Nothing is written to disk; Ctrl-C cancels the build.

    Wrap the call in `log.recording()` to have the library's messages when it fails.

    Raises:
        GraphError: the file is no valid ONNX, or holds what TensorRT refuses or drops (LintError).
        ProfileError, TargetError, BuildError: the options do not fit the graph.
        CompilerCrash: TensorRT failed inside on a valid graph; a decomposed form of it may pass.
        NoAttentionKernel: `attention="fused"` and an attention has no fused kernel.
        MissingError: TensorRT, or a GPU that the options need, is not here.
    """
    backend = load_backend(options.backend)
    options.check(backend)
    graph = read_graph(Path(onnx_path))
    findings = lint(graph)
    if findings:
        raise LintError(findings)
    if not options.profiles:
        profiles_for_graph(graph.inputs, ())  # raises when the graph needs one
    shapes = tuple(profile.shapes(graph.inputs) for profile in options.profiles)
    job = _Job(backend, graph, options, shapes, find_attentions(graph), progress)
    _refuse_without_attention(job)
    started = time.monotonic()
    stop = Stop()
    with recording() as log, stderr_into(log), interruptible(stop):
        built, decomposed, notes = _with_retry(job, stop)
    return _report(job, built, log, notes, decomposed=decomposed, seconds=time.monotonic() - started)


def _with_retry(job: _Job, stop: Stop) -> tuple[_Attempt, bool, tuple[str, ...]]:
    """The first attempt that builds, whether it was free to decompose, and what to say about it."""
    if job.options.attention == "decompose":
        return _attempt(job, stop, decomposable=True), True, ()
    try:
        return _attempt(job, stop, decomposable=False), False, ()
    except NoAttentionKernel as error:
        blocked = _unfusable(job.attentions)
        if job.options.attention == "fused":
            raise NoAttentionKernel(f"--attention fused: {blocked or error}") from error
        note = f"no fused attention kernel, so TensorRT decomposed: {blocked or error}"
        return _attempt(job, stop, decomposable=True), True, (note,)


def _unfusable(attentions: Sequence[Attention]) -> str:
    """The operators that the graph itself shows to have no kernel; TensorRT does not name them."""
    reasons = [(a.name, why_not(a, decomposable=False)) for a in attentions if a.operator]
    return "; ".join(f"{name} ({reason})" for name, reason in reasons if not reason.startswith("mask"))


def _refuse_without_attention(job: _Job) -> None:
    if job.options.attention == "fused" and not job.attentions:
        raise NoAttentionKernel(
            f"--attention fused: no attention was found in {job.graph.path.name}, neither an operator nor "
            "MatMul-Softmax-MatMul; leave the option out to build it all the same."
        )


@dataclass(frozen=True, slots=True)
class _Attempt:
    plan: bytes
    timing_cache: bytes
    log: Log


def _attempt(job: _Job, stop: Stop, *, decomposable: bool) -> _Attempt:
    """One build from a fresh builder.

    Raises:
        MhaDeployError: what the log of this attempt stands for.
    """
    module = job.backend.module
    with recording() as log:
        builder = _make_builder(job.backend, log)
        network = builder.create_network(job.backend.network_flags())
        _parse(job, network, log)
        if decomposable:
            _allow_decomposition(module, network)
        config = builder.create_builder_config()
        _configure(job, builder, config, log)
        config.progress_monitor = make_monitor(module, job.progress, stop)
        # A wish to stop that came while parsing has no step to meet it.
        plan = None if stop.wanted else builder.build_serialized_network(network, config)
        if stop.raised:
            raise stop.raised[0]
        if stop.wanted:
            raise KeyboardInterrupt
        _refuse_unused(log)
        ignored = misuse(log.errors)
        if plan is None or ignored:
            raise explain(log.errors if plan is None else ignored)
        cache = bytes(config.get_timing_cache().serialize()) if job.options.timing_cache else b""
        return _Attempt(bytes(plan), cache, log)


def _make_builder(backend: Backend, log: Log) -> Handle:
    try:
        return backend.module.Builder(backend.logger)
    except (TypeError, RuntimeError) as error:  # the bindings' way to say that they got nothing
        said = log.errors[0] if log.errors else str(error)
        raise MissingError(f"{backend} does not start on this machine: {said}") from error


def _parse(job: _Job, network: Handle, log: Log) -> None:
    parser = job.backend.module.OnnxParser(network, job.backend.logger)
    if not parser.parse_from_file(str(job.graph.path)):
        error = explain(log.errors)
        findings = parser_findings(job.backend, job.graph) if isinstance(error, RefusedError) else ()
        raise LintError(findings) if len(findings) > 1 else error
    for i in range(network.num_inputs):
        tensor = network.get_input(i)
        if tensor.is_shape_tensor:
            raise GraphError(
                f"input {tensor.name!r} holds a shape, for which --profile has no syntax; compute the shape "
                "inside the graph from the other inputs."
            )


def _refuse_unused(log: Log) -> None:
    """The builder warns of an input that no layer reads, then builds without it."""
    unused = unused_inputs(log.warnings)
    if unused:
        raise RefusedError(
            f"TensorRT does not use input {', '.join(map(repr, unused))}: what is fed there would be ignored "
            "without a word. Remove the input from the graph, or express what it does with other operators."
        )


def _allow_decomposition(module: Handle, network: Handle) -> None:
    for i in range(network.num_layers):
        layer = network.get_layer(i)
        if layer.type == module.LayerType.ATTENTION_INPUT:
            layer.__class__ = module.IAttentionInputLayer  # the bindings return the base class
            layer.attention.decomposable = True


def _configure(job: _Job, builder: Handle, config: Handle, log: Log) -> None:
    module, options = job.backend.module, job.options
    flags = module.BuilderFlag
    # TF32 is on by default and would round fp32 products to 10 bits.
    (config.set_flag if options.tf32 else config.clear_flag)(flags.TF32)
    if options.workspace_bytes:
        config.set_memory_pool_limit(module.MemoryPoolType.WORKSPACE, options.workspace_bytes)
    if options.targets:
        targets = resolve_targets(job.backend, options.targets)
        config.num_compute_capabilities = len(targets)
        for i, target in enumerate(targets):
            config.set_compute_capability(target, i)
    if options.optimization_level != -1:
        config.builder_optimization_level = options.optimization_level
    for wanted, flag in ((options.refit, "REFIT"), (options.version_compatible, "VERSION_COMPATIBLE")):
        if wanted:
            config.set_flag(getattr(flags, flag))
    if options.hardware_compatible:
        config.hardware_compatibility_level = module.HardwareCompatibilityLevel.AMPERE_PLUS
    if options.timing_cache:
        file = Path(options.timing_cache)
        cache = config.create_timing_cache(file.read_bytes() if file.exists() else b"")
        config.set_timing_cache(cache, False)
    for shapes in job.shapes:
        _add_profile(builder, config, shapes, log)


def _add_profile(builder: Handle, config: Handle, shapes: Mapping[str, ShapeRange], log: Log) -> None:
    profile = builder.create_optimization_profile()
    for name, range_ in shapes.items():
        profile.set_shape(name, *range_)
    if config.add_optimization_profile(profile) < 0:
        raise explain(log.errors)


def _report(
    job: _Job, built: _Attempt, log: Log, notes: tuple[str, ...], *, decomposed: bool, seconds: float
) -> BuiltPlan:
    verdicts = judge(job.attentions, built.plan, profiles=max(1, len(job.shapes)), decomposable=decomposed)
    unfused = [f"{v.name} ({v.reason})" for v in verdicts if not v.fused]
    if job.options.attention == "fused" and unfused:
        raise NoAttentionKernel(f"--attention fused: not fused: {'; '.join(unfused)}")
    activation = [int(size) for size in _ACTIVATION.findall(str(built.log))]
    return BuiltPlan(
        plan=built.plan,
        backend=job.backend,
        options=job.options,
        attentions=verdicts,
        decomposed=decomposed,
        precision=job.graph.precision,
        weight_bytes=job.graph.weight_bytes,
        warnings=(*notes, *dict.fromkeys(built.log.warnings)),
        activation_bytes=max(activation, default=0),
        log=tuple(map(str, log.lines)),
        seconds=seconds,
        timing_cache=built.timing_cache,
    )
