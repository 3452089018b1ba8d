"""optimize: the fastest engine that passes, or another ONNX form of what a bundle holds."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from mha_deploy.cli.keeping import keep_fp32_names, keep_fp32_option
from mha_deploy.cli.shared import (
    FOLDER,
    POSITIVE,
    SHARE,
    console,
    json_option,
    parse_grid,
    placement,
    placement_options,
    print_json,
    status_line,
)
from mha_deploy.errors import InputError
from mha_deploy.staging import interrupts_held

UNPLACED = {"device": "cpu", "threads": 0, "fallback": None, "cuda_graphs": False}


@click.command()
@click.argument("bundle", type=FOLDER)
@click.option("--allow", default="", metavar="PRECISION,...", help="Choose among bf16, fp16, int8 as well.")
@click.option("--grid", multiple=True, metavar="DIM=SIZES", help="Sizes to be fast at, as seq=16,128.")
@click.option(
    "--seconds",
    type=POSITIVE,
    help="Measured at each size, all candidates together.  [default: 3]",
)
@click.option("--portable", is_flag=True, help="Make the opset 20 form, without an Attention operator.")
@click.option(
    "--precision",
    type=click.Choice(["fp16", "bf16", "int8"]),
    help="Make the form in 16 bits, attention core in fp32; or quantised, if that passes on real inputs.",
)
@click.option("--max-relative-error", type=SHARE, help="Budget of int8 on real inputs, as 2.5% or 0.025.")
@click.option("--inputs", type=FOLDER, help="Packed real inputs for int8.  [default: the bundle's own]")
@click.option("--scheme", type=click.Choice(["auto", "dynamic", "static"]), help="Scales of int8.")
@keep_fp32_option
@placement_options
@json_option
def optimize(
    *,
    bundle: Path,
    allow: str,
    grid: tuple[str, ...],
    seconds: float | None,
    portable: bool,
    precision: str | None,
    max_relative_error: float | None,
    inputs: Path | None,
    scheme: str | None,
    keep_fp32: tuple[str, ...],
    as_json: bool,
    **where: Any,
) -> None:
    """Find the fastest way to run BUNDLE's block on this machine, among those that pass their check.

    `infer`, `bench` and `serve` run it here from then on. What was found before is not measured again.

    With --portable or --precision, that ONNX form is made instead, and joins the bundle where it
    passes; with --allow int8 a search takes it in. Exit code 1 where nothing passes.
    """
    of_int8 = max_relative_error is not None or inputs or scheme
    of_search = allow or grid or seconds is not None or where != UNPLACED
    if portable and precision:
        raise InputError("--portable and --precision make two forms; ask for one at a time")
    if (portable or precision) and of_search:
        raise InputError(
            "--allow, --grid, --seconds and where to run are for the search, which --portable and "
            "--precision leave out; run optimize once for the form and once for the search"
        )
    if of_int8 and precision != "int8":
        raise InputError("--max-relative-error, --inputs and --scheme are for --precision int8")
    if keep_fp32 and not precision:
        raise InputError("--keep-fp32 is for --precision fp16, bf16 or int8")
    if portable:
        _portable(bundle, as_json=as_json)
        return
    if not precision:
        _search(bundle, allow, grid, seconds, where, as_json=as_json)
        return
    names = keep_fp32_names(keep_fp32)
    if precision in ("fp16", "bf16"):
        _typed(bundle, precision, names, as_json=as_json)
        return
    if max_relative_error is None:
        raise InputError(
            "int8 has no PyTorch run to be held to; declare its budget: --max-relative-error 2.5%"
        )
    _int8(bundle, max_relative_error, inputs, scheme or "auto", names, as_json=as_json)


def _search(
    folder: Path,
    allow: str,
    grid: tuple[str, ...],
    seconds: float | None,
    where: dict[str, Any],
    *,
    as_json: bool,
) -> None:
    with interrupts_held():
        from mha_deploy.bundle import Bundle
        from mha_deploy.precision import Precision
        from mha_deploy.search import SECONDS
        from mha_deploy.search import optimize as run

    allowed = [name.strip() for name in allow.split(",") if name.strip()]
    wrong = [name for name in allowed if name not in ("fp32", "bf16", "fp16", "int8")]
    if wrong:
        raise InputError(f"--allow {allow!r} has {', '.join(wrong)}; expected some of bf16, fp16, int8")
    with status_line() as status:
        report = run(
            Bundle.load(folder),
            allow=[Precision(name) for name in allowed],
            grid=parse_grid(grid),
            seconds=SECONDS if seconds is None else seconds,
            placement=placement(**where),
            progress=status,
        )
    if as_json:
        print_json(report.to_json())
        return
    from mha_deploy.render_search import search_tables

    search_tables(console(), report)


def _portable(folder: Path, *, as_json: bool) -> None:
    with interrupts_held():
        from mha_deploy.bundle import Bundle
        from mha_deploy.variants import portable_artifact

    with status_line() as status:
        artifact, lowered = portable_artifact(Bundle.load(folder), status)
    if as_json:
        print_json(artifact.to_json())
        return
    for step in lowered.steps:
        click.echo(f"{step.rule} at {step.node}: {step.why}")
    click.echo(f"checked: {artifact.details['checked']}")
    click.echo(f"artifact: {artifact.name} ({folder / artifact.files[0].file})")


def _typed(folder: Path, precision: str, keep_fp32: list[str], *, as_json: bool) -> None:
    with interrupts_held():
        from mha_deploy.bundle import Bundle
        from mha_deploy.precision import Precision
        from mha_deploy.typed import Variant
        from mha_deploy.variants import typed_artifact

    variant = Variant(Precision(precision), keep_fp32=tuple(keep_fp32))
    with status_line() as status:
        artifact = typed_artifact(Bundle.load(folder), variant, status)
    if as_json:
        print_json(artifact.to_json())
        return
    click.echo(f"in fp32: {', '.join(artifact.details['kept_fp32'])}")
    click.echo(f"checked: {artifact.details['checked']}")
    click.echo(f"artifact: {artifact.name} ({folder / artifact.files[0].file})")


def _int8(
    folder: Path, budget: float, inputs: Path | None, scheme: str, keep_fp32: list[str], *, as_json: bool
) -> None:
    with interrupts_held():
        from mha_deploy.bundle import Bundle
        from mha_deploy.quantization import Wanted, quantize
        from mha_deploy.ragged import unpack
        from mha_deploy.tensor_files import read_tensors

    bundle = Bundle.load(folder)
    requests = unpack(bundle.spec, read_tensors(inputs)) if inputs else ()
    with status_line() as status:
        report = quantize(bundle, Wanted(budget, scheme, keep_fp32), requests, status)
    if as_json:
        print_json(report.to_json())
    else:
        from mha_deploy.render_quantization import quantization_tables

        quantization_tables(console(), report)
        if report.passed:
            file = bundle.artifact(report.artifact).files[0].file
            click.echo(f"artifact: {report.artifact} ({folder / file})")
    if not report.passed:
        sys.exit(1)
