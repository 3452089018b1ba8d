"""export, build-engine: commands that make something."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mha_deploy.cli.keeping import keep_fp32_names, keep_fp32_option
from mha_deploy.cli.shared import FOLDER, console, json_option, layout_option, print_json, status_line
from mha_deploy.errors import InputError
from mha_deploy.staging import interrupts_held

if TYPE_CHECKING:
    from mha_deploy.engine_job import Engine
    from mha_deploy.tensorrt.options import BuildOptions
    from mha_deploy.tensorrt.progress import Progress


@click.command()
@click.argument("spec")
@click.option("-o", "--out", required=True, type=FOLDER, help="Folder of the bundle to write.")
@click.option("--weights", type=FOLDER, help="Checkpoint to use instead of the spec's.")
@click.option("--prefix", default="", help="Prefix of this layer's tensors in --weights.")
@click.option("--inputs", type=FOLDER, help="Packed real inputs for `verify` to use.")
@layout_option("packed adds a graph that projects real tokens only.")
@json_option
def export(
    *,
    spec: str,
    out: Path,
    weights: Path | None,
    prefix: str,
    inputs: Path | None,
    layout: str,
    as_json: bool,
) -> None:
    """Export SPEC (a preset's name or a TOML file) to ONNX and prove its dynamic axes."""
    with interrupts_held():
        from mha_deploy.pipeline import export as run

    if prefix and weights is None:
        raise InputError("--prefix picks a layer out of --weights; give both")
    with status_line() as progress:
        bundle = run(
            spec,
            out,
            weights=weights or "",
            prefix=prefix,
            inputs=inputs or "",
            layout=layout,
            progress=progress,
        )
    if as_json:
        print_json({"bundle": str(bundle.folder), **bundle.manifest.to_json()})
        return
    layout = bundle.manifest.provenance["checkpoint"]["layout"]
    proved = len(bundle.artifact().details["axes_proved_at"])
    click.echo(f"weights: {layout}")
    click.echo(f"axes: {', '.join(map(str, bundle.spec.dims))}; proved at {proved} sizes against PyTorch")
    for short in bundle.artifact().details["axes_not_reached"]:
        click.echo(f"not proved to its maximum, which is too large for this machine: {short}")
    for artifact in bundle.artifacts[1:]:
        click.echo(f"artifact: {artifact.name}, checked: {artifact.details['checked']}")
    click.echo(f"bundle: {bundle.folder}")


@click.command("build-engine")
@click.argument("source", type=FOLDER)
@click.option("--fp32", "precision", flag_value="fp32", help="Build in fp32.")
@click.option("--fp16", "precision", flag_value="fp16", help="Build in fp16, attention summed in fp32.")
@click.option("--bf16", "precision", flag_value="bf16", help="Build in bf16, attention summed in fp32.")
@click.option(
    "--io",
    type=click.Choice(["fp32", "same"]),
    default="fp32",
    show_default=True,
    help="Inputs and outputs in fp32, or in the engine's own precision.",
)
@keep_fp32_option
@layout_option("Padded batches, or real tokens with indices.")
@click.option("-o", "--out", type=FOLDER, help="Folder for the engine of an ONNX file.")
@click.option("--name", default="", help="Name of the engine.  [default: precision and backend]")
@click.option("--profile", "profiles", multiple=True, metavar="AXIS=MIN:OPT:MAX,...", help="Repeatable.")
@click.option(
    "--backend", type=click.Choice(["auto", "tensorrt", "tensorrt-rtx"]), default="auto", show_default=True
)
@click.option("--target-sm", metavar="sm80,sm89,...", help="GPUs to build for (TensorRT for RTX).")
@click.option(
    "--attention", type=click.Choice(["auto", "fused", "decompose"]), default="auto", show_default=True
)
@click.option("--tf32", is_flag=True, help="Allow TF32 in fp32 products.")
@click.option("--workspace", type=click.IntRange(min=0), default=0, metavar="BYTES", help="0: no limit.")
@click.option("--optimization-level", type=click.IntRange(0, 5), help="0 to 5.")
@click.option("--timing-cache", type=FOLDER, help="Timing cache to read (full TensorRT).")
@click.option("--refit", is_flag=True, help="A plan whose weights can be replaced.")
@click.option("--version-compatible", is_flag=True, help="A plan for later versions too (full TensorRT).")
@click.option("--hardware-compatible", is_flag=True, help="A plan for Ampere and later (full TensorRT).")
@json_option
def build_engine(**given: Any) -> None:
    """Build SOURCE, a bundle or an ONNX file, into a TensorRT engine; say what was fused and why not.

    Exit code 1 where --attention fused is not met or a check fails.
    """
    as_json = given.pop("as_json")
    with status_line() as status, _build_bar() as progress:
        engine = _build(given, status, progress)
    if as_json:
        print_json(engine.to_json())
        return
    from mha_deploy.render_engine import engine_tables

    engine_tables(console(), engine)


def _build(given: dict[str, Any], status: Any, progress: Progress) -> Engine:
    with interrupts_held():
        from mha_deploy.bundle import Bundle
        from mha_deploy.engines import build_engine as of_bundle
        from mha_deploy.engines import build_engine_from_file as of_file
        from mha_deploy.precision import Precision
        from mha_deploy.typed import Variant

    source, out, precision = given["source"], given["out"], given["precision"]
    options = _options(given)
    watch = {"name": given["name"], "progress": progress, "status": status}
    if source.is_dir():
        if out:
            raise InputError(f"{source} is a bundle, which keeps its engines itself; leave -o out")
        if not precision:
            raise InputError("name the engine's precision: --fp16, --bf16 or --fp32")
        kept = tuple(keep_fp32_names(given["keep_fp32"]))
        variant = Variant(Precision(precision), given["io"], given["layout"], kept)
        return of_bundle(Bundle.load(source), variant, options, given["profiles"], **watch)
    if given["io"] != "fp32" or given["keep_fp32"]:
        raise InputError("--io and --keep-fp32 are for bundles; an ONNX file is built as it is written")
    if given["layout"] != "padded":
        raise InputError("--layout is for bundles; an ONNX file keeps the layout that it has")
    if not out:
        raise InputError(f"{source} is no bundle; for an ONNX file give the engine's folder with -o")
    return of_file(source, out, options, given["profiles"], precision=precision or "", **watch)


def _options(given: dict[str, Any]) -> BuildOptions:
    from mha_deploy.tensorrt.options import BuildOptions
    from mha_deploy.tensorrt.targets import parse_targets

    level = given["optimization_level"]
    return BuildOptions(
        backend=given["backend"],
        targets=() if given["target_sm"] is None else parse_targets(given["target_sm"]),
        attention=given["attention"],
        tf32=given["tf32"],
        workspace_bytes=given["workspace"],
        optimization_level=-1 if level is None else level,
        refit=given["refit"],
        version_compatible=given["version_compatible"],
        hardware_compatible=given["hardware_compatible"],
        timing_cache=str(given["timing_cache"] or ""),
    )


@contextlib.contextmanager
def _build_bar() -> Iterator[Progress]:
    """TensorRT's own phases as a bar on stderr, where stderr is a terminal."""
    from mha_deploy.tensorrt.progress import SILENT

    if not sys.stderr.isatty():
        yield SILENT
        return
    from mha_deploy.render_engine import BuildBar

    with BuildBar() as bar:
        yield bar
