"""`build-engine`: a bundle, or any ONNX file, to a TensorRT engine that is known to be what was asked for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mha_deploy.bundle import CANONICAL, Bundle, on_one_export
from mha_deploy.engine_job import Engine, Job, run_job
from mha_deploy.errors import CheckError, InputError
from mha_deploy.file_record import FileRecord
from mha_deploy.manifest import Artifact
from mha_deploy.packed import LAYOUTS
from mha_deploy.proof import prove_same
from mha_deploy.tensorrt.backend import load_backend
from mha_deploy.tensorrt.graph import read_graph
from mha_deploy.tensorrt.options import BuildOptions
from mha_deploy.tensorrt.passport import SUFFIX, rebuild_command
from mha_deploy.tensorrt.profiles import Profile, profiles_for, profiles_for_graph
from mha_deploy.tensorrt.progress import SILENT, Progress
from mha_deploy.typed import IO_FORMS, ISLANDS, TYPED, Variant
from mha_deploy.variants import PORTABLE, Status, check_numerically, typed_artifact

DEFAULT_OPTIONS = BuildOptions()
# Names of ONNX forms that a bundle has, or gets when one is asked for.
RESERVED = {CANONICAL, PORTABLE} | {
    f"{Variant(precision, io, layout).name}{islands}{twin}"
    for precision in TYPED
    for io in IO_FORMS
    for layout in LAYOUTS
    for islands in ("", ISLANDS)
    for twin in ("", "-twin")
}


@on_one_export
def build_engine(
    bundle: Bundle,
    variant: Variant,
    options: BuildOptions = DEFAULT_OPTIONS,
    profiles: Sequence[str] = (),
    *,
    name: str = "",
    progress: Progress = SILENT,
    status: Status = lambda _: None,
) -> Engine:
    """Build the bundle's block as a TensorRT engine in `variant`'s precision, and record it in the bundle.

    The typed ONNX is made from the reference module, checked against PyTorch and built strongly
    typed. `profiles` are texts such as "batch=1:8:32,seq=1:128:512"; without any, the spec's dims
    are the profile. `name` is the artifact's, by default precision and backend.

    Raises: as `engine_job.run_job`, and
        BundleError: the bundle was exported again meanwhile.
        CheckError: the typed ONNX does not pass its precision's yardstick.
    """
    _check_name(name, bundle)
    backend = load_backend(options.backend)
    options = replace(options, profiles=profiles_for(variant.signature(bundle.spec), profiles))
    options.check(backend)
    artifact = typed_artifact(bundle, variant, status)

    def prove(path: Path) -> str:
        return str(check_numerically(bundle, variant, path))

    job = Job(
        source=artifact.path(bundle.folder),
        folder=bundle.folder / "engines",
        stem=name or f"{variant.name}-{backend.name}",
        prove=prove,
        checked=str(artifact.details.get("checked", "proved at export")),
        precision=variant.precision.value,
        weights_sha256=bundle.manifest.weights.sha256,
        command=rebuild_command("BUNDLE", [*_variant_flags(variant), *_flags(options, profiles, name)]),
        keeps_fp32=bool(variant.keep_fp32),
        held=bundle.held,
    )
    engine = run_job(job, options, progress=progress, status=status)
    _record(bundle, engine, variant)
    return engine


def build_engine_from_file(
    onnx_file: Path,
    out: Path,
    options: BuildOptions = DEFAULT_OPTIONS,
    profiles: Sequence[str] = (),
    *,
    precision: str = "",
    name: str = "",
    progress: Progress = SILENT,
    status: Status = lambda _: None,
) -> Engine:
    """Build any ONNX file, in the precision that it is written in, to `out`.

    What TensorRT refuses is lowered first, and the lowered graph run against the original in ONNX
    Runtime. `precision`, where given, must be the file's own.

    Raises: as `engine_job.run_job`, and
        InputError: the file is of another precision than asked for.
    """
    _check_name(name)
    graph = read_graph(onnx_file)
    if precision and precision != graph.precision:
        raise InputError(
            f"{precision} was asked for, but {onnx_file.name} is written in {graph.precision}, and an engine "
            f"has its file's precision; export the model in {precision}, or leave the option out"
        )
    options = replace(options, profiles=profiles_for_graph(graph.inputs, profiles))

    def prove(path: Path) -> str:
        proof = prove_same(onnx_file, path, graph.inputs, _small_sizes(options.profiles))
        if not proof.proved:
            raise CheckError(
                f"what TensorRT refuses in {onnx_file.name} was rewritten, but the rewrite cannot be proved: "
                f"{proof.note}; nothing was built"
            )
        return proof.note

    job = Job(
        source=onnx_file,
        folder=out,
        stem=name or f"{onnx_file.stem}-{load_backend(options.backend).name}",
        prove=prove,
        checked="not checked: built as it is",
        precision=precision,
        weights_sha256="",
        command=rebuild_command(onnx_file.name, ["-o", out.name, *_flags(options, profiles, name)]),
    )
    return run_job(job, options, progress=progress, status=status)


def _small_sizes(profiles: Sequence[Profile]) -> list[dict[str, int]]:
    """Two sizes in each profile to compare at: its smallest, and a little above it."""
    if not profiles:
        return [{}]
    return [
        {dim.name: min(dim.min + more, dim.max) for dim in profile.dims}
        for profile in profiles
        for more in (0, 6)
    ]


def _variant_flags(variant: Variant) -> list[str]:
    flags = [f"--{variant.precision.value}", *(["--io", variant.io] if variant.io != "fp32" else [])]
    flags += ["--layout", variant.layout] if variant.layout != "padded" else []
    return flags + (["--keep-fp32", ",".join(variant.keep_fp32)] if variant.keep_fp32 else [])


def _flags(options: BuildOptions, profiles: Sequence[str], name: str) -> list[str]:
    """The options that differ from the defaults, as `build-engine` takes them."""
    flags = ["--name", name] if name else []
    flags += ["--backend", options.backend] if options.backend != "auto" else []
    flags += [part for text in profiles for part in ("--profile", text)]
    flags += ["--target-sm", ",".join(options.targets)] if options.targets else []
    flags += ["--attention", options.attention] if options.attention != "auto" else []
    flags += ["--workspace", str(options.workspace_bytes)] if options.workspace_bytes else []
    level = options.optimization_level
    flags += ["--optimization-level", str(level)] if level != -1 else []
    for field in ("tf32", "refit", "version_compatible", "hardware_compatible"):
        flags += [f"--{field.replace('_', '-')}"] if getattr(options, field) else []
    return flags


def _record(bundle: Bundle, engine: Engine, variant: Variant) -> None:
    """Put the engine into the manifest. A plan of that name before it stays in the folder, as cache."""
    plan = f"engines/{engine.plan}"
    passport = str(Path(plan).with_suffix(SUFFIX))
    artifact = Artifact(
        name=engine.name,
        runtime=engine.passport.backend,
        precision=variant.precision,
        signature=variant.signature(bundle.spec),
        files=(FileRecord.of(bundle.folder, plan), FileRecord.of(bundle.folder, passport)),
        details={"passport": engine.passport.to_json()},
        layout=variant.layout,
    )
    bundle.record(artifact)


def _check_name(name: str, bundle: Bundle | None = None) -> None:
    """A name is part of file names, and must not be that of something else in the bundle.

    Raises:
        InputError: it is.
    """
    if name and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise InputError(f"--name {name!r}; expected letters, digits, '.', '_' and '-'")
    taken = [a for a in bundle.artifacts if a.name == name and "passport" not in a.details] if bundle else []
    if taken or name in RESERVED:
        raise InputError(f"--name {name!r} is the name of an ONNX form of the block; give the engine another")
