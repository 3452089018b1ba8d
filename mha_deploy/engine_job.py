"""One engine from one ONNX file: lowered where TensorRT needs it, built, recorded, cached by content."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import onnx

from mha_deploy import machine
from mha_deploy.errors import BundleError, CheckError, MhaDeployError
from mha_deploy.file_record import sha256_of
from mha_deploy.lowering import Lowered, lower_for_tensorrt, lower_to_portable
from mha_deploy.onnx_files import save
from mha_deploy.staging import make_folder, staged_file
from mha_deploy.tensorrt.backend import Backend, load_backend
from mha_deploy.tensorrt.build import BuiltPlan
from mha_deploy.tensorrt.graph import read_graph, stored_tensors
from mha_deploy.tensorrt.isolated import build_isolated
from mha_deploy.tensorrt.log import recording
from mha_deploy.tensorrt.messages import CompilerCrash
from mha_deploy.tensorrt.options import BuildOptions
from mha_deploy.tensorrt.passport import Passport, gpu_name, read_passport
from mha_deploy.tensorrt.progress import SILENT, Progress
from mha_deploy.typed import kept_in_fp32
from mha_deploy.variants import Status


@dataclass(frozen=True, slots=True)
class Job:
    """What to build, and what is known of it.

    `prove` holds a rewritten ONNX file against what `source` means and says how; it raises
    CheckError where they differ. `precision` is the one asked for, "" for the file's own; `keeps_fp32`
    where some products were asked for in fp32 beside it. `command` builds the same engine again. `folder`
    is written to within `held()`, which raises where it is no longer the one to write to.
    """

    source: Path
    folder: Path
    stem: str
    prove: Callable[[Path], str]
    checked: str
    precision: str
    weights_sha256: str
    command: str
    keeps_fp32: bool = False
    held: Callable[[], AbstractContextManager[object]] = nullcontext


@dataclass(frozen=True, slots=True)
class Engine:
    """A plan with its passport, in `folder`. `cached` says that it was there already."""

    name: str
    folder: Path
    plan: str
    passport: Passport
    cached: bool
    seconds: float
    log: str

    @property
    def path(self) -> Path:
        return self.folder / self.plan

    def to_json(self) -> dict[str, Any]:
        return {
            "engine": self.name,
            "plan": str(self.path),
            "cached": self.cached,
            "seconds": self.seconds,
            "log": self.log,
            **self.passport.to_json(),
        }


def run_job(
    job: Job, options: BuildOptions, *, progress: Progress = SILENT, status: Status = lambda _: None
) -> Engine:
    """The engine of `job`: from the cache where the same request was built before.

    Raises:
        GraphError: the file is no valid ONNX, or holds what has no form that TensorRT takes.
        CheckError: a rewrite changes what the graph computes, the engine is not in the precision
            asked for, or an attention is not fused where that was asked for.
        InputError: options that do not fit; MissingError: what this machine lacks.
    """
    backend = load_backend(options.backend)
    options.check(backend)
    read_graph(job.source)
    key = _key(job.source, options, backend)
    plan = job.folder / f"{job.stem}-{key[:12]}.plan"
    found = _cached(plan, key)
    if found:
        return Engine(job.stem, job.folder, plan.name, found, cached=True, seconds=0.0, log="")
    with job.held():
        make_folder(job.folder)
    with tempfile.TemporaryDirectory() as work, _logged(job) as log:
        lowered, built = _build(job, options, Path(work), progress, status)
        _refuse_other_precision(job, built)
        passport = _passport(job, key, built, lowered)
        with job.held():
            with staged_file(plan) as staging:
                staging.write_bytes(built.plan)
            passport.write(plan)
    return Engine(
        job.stem, job.folder, plan.name, passport, cached=False, seconds=built.seconds, log=str(log)
    )


@dataclass(frozen=True, slots=True)
class _Source:
    """The ONNX file that TensorRT gets, the rewrites that made it, and how it was checked."""

    path: Path
    steps: tuple[dict[str, str], ...]
    checked: str


def _build(
    job: Job, options: BuildOptions, work: Path, progress: Progress, status: Status
) -> tuple[_Source, BuiltPlan]:
    source = _rewritten(job, lower_for_tensorrt, work / "lowered.onnx", status)
    status("building")
    try:
        return source, build_isolated(source.path, options, progress=progress)
    except CompilerCrash as error:
        # The decomposed form of a valid graph may pass where the Attention operator does not.
        note = f"the portable form was built, since TensorRT's compiler failed on Attention: {error}"
        source = _rewritten(job, lower_to_portable, work / "portable.onnx", status)
        status("building the portable form")
        built = build_isolated(source.path, options, progress=progress)
        return source, replace(built, warnings=(note, *built.warnings))


def _rewritten(job: Job, lower: Callable[[onnx.ModelProto], Lowered], path: Path, status: Status) -> _Source:
    lowered = lower(onnx.load(str(job.source)))
    if not lowered.steps:
        return _Source(job.source, (), job.checked)
    save(lowered.model, path)
    status("proving the lowered graph")
    return _Source(path, tuple(asdict(step) for step in lowered.steps), job.prove(path))


def _refuse_other_precision(job: Job, built: BuiltPlan) -> None:
    """A strongly typed build keeps the file's types, so the file itself was of another precision."""
    taken = (job.precision, f"fp32+{job.precision}") if job.keeps_fp32 else (job.precision,)
    if job.precision and built.precision not in taken:
        raise CheckError(
            f"{job.precision} was asked for, but the engine computes in {built.precision}; "
            "nothing was written"
        )


def _key(source: Path, options: BuildOptions, backend: Backend) -> str:
    """Equal for equal requests: contents of the ONNX, options, backend and the versions of both tools."""
    request = {
        "onnx": [sha256_of(file) for file in (source, *external_files(source))],
        "options": {**options.to_json(), "backend": backend.name},
        "version": backend.version,
        "mha_deploy": machine.version("mha-deploy"),
    }
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()


def external_files(source: Path) -> list[Path]:
    """The files beside `source` that hold its weights, as its initializers name them."""
    model = onnx.load(str(source), load_external_data=False)
    names = {
        entry.value
        for tensor in stored_tensors(model)
        if tensor.data_location == onnx.TensorProto.EXTERNAL
        for entry in tensor.external_data
        if entry.key == "location"
    }
    return [source.parent / name for name in sorted(names)]


def _cached(plan: Path, key: str) -> Passport | None:
    if not plan.is_file():
        return None
    try:
        passport = read_passport(plan)
    except BundleError:
        return None
    whole = passport.key == key and sha256_of(plan) == passport.plan_sha256
    return passport if whole else None


def _passport(job: Job, key: str, built: BuiltPlan, source: _Source) -> Passport:
    graph, precision = read_graph(source.path), job.precision or built.precision
    return Passport(
        key=key,
        backend=built.backend.name,
        version=built.backend.version,
        targets=built.targets,
        gpu="" if built.backend.has_targets else gpu_name(),
        precision=precision,
        onnx_file=job.source.name,
        onnx_sha256=sha256_of(job.source),
        weights_sha256=job.weights_sha256 or _external_sha256(job.source),
        plan_sha256=hashlib.sha256(built.plan).hexdigest(),
        plan_bytes=len(built.plan),
        inputs=tuple(map(str, graph.inputs)),
        outputs=tuple(value.name for value in graph.model.graph.output),
        profiles=tuple(profile.to_json() for profile in built.options.profiles),
        options={**built.options.to_json(), "backend": built.backend.name},
        attentions=tuple(asdict(verdict) for verdict in built.attentions),
        decomposed=built.decomposed,
        activation_bytes=built.activation_bytes,
        lowering=source.steps,
        kept_fp32=tuple(kept_in_fp32(source.path)) if precision in ("fp16", "bf16") else (),
        checked=source.checked,
        warnings=built.warnings,
        command=job.command,
    )


def _external_sha256(source: Path) -> str:
    """One hash over the weights outside of the file; "" where all are inside."""
    files = external_files(source)
    return hashlib.sha256("".join(map(sha256_of, files)).encode()).hexdigest() if files else ""


@contextmanager
def _logged(job: Job) -> Iterator[Path]:
    """TensorRT's log in a file, named by the error where the build fails."""
    file = job.folder / "logs" / f"{job.stem}.log"
    with recording() as log:
        try:
            yield file
        except MhaDeployError as error:
            if log.lines:
                error.args = (f"{error} (full log: {file})",)
            raise
        finally:
            if log.lines:
                with job.held():
                    make_folder(file.parent)
                    with staged_file(file) as staging:
                        staging.write_text(f"{log}\n", encoding="utf-8")
