"""optimize: another ONNX form of what a bundle holds."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from mha_deploy.cli.keeping import keep_fp32_names, keep_fp32_option
from mha_deploy.cli.shared import FOLDER, SHARE, console, json_option, print_json, status_line
from mha_deploy.errors import InputError
from mha_deploy.staging import interrupts_held


@click.command()
@click.argument("bundle", type=FOLDER)
@click.option("--portable", is_flag=True, help="Opset 20 without an Attention operator.")
@click.option(
    "--precision",
    type=click.Choice(["fp16", "bf16", "int8"]),
    help="16 bits with the attention core in fp32; or quantised, where that passes on real inputs.",
)
@click.option("--max-relative-error", type=SHARE, help="Budget of int8 on real inputs, as 2.5% or 0.025.")
@click.option("--inputs", type=FOLDER, help="Packed real inputs for int8.  [default: the bundle's own]")
@click.option("--scheme", type=click.Choice(["auto", "dynamic", "static"]), help="Scales of int8.")
@keep_fp32_option
@json_option
def optimize(
    *,
    bundle: Path,
    portable: bool,
    precision: str | None,
    max_relative_error: float | None,
    inputs: Path | None,
    scheme: str | None,
    keep_fp32: tuple[str, ...],
    as_json: bool,
) -> None:
    """Make another ONNX form of BUNDLE's block and check it against PyTorch.

    Exit code 1 where it does not pass: the bundle then stays as it is.
    """
    if portable == bool(precision):
        raise InputError(
            "say which form to make: --portable (opset 20, no Attention operator) or --precision "
            "fp16, bf16 or int8"
        )
    if portable:
        if max_relative_error is not None or inputs or scheme or keep_fp32:
            raise InputError("--max-relative-error, --inputs, --scheme and --keep-fp32 are for --precision")
        _portable(bundle, as_json=as_json)
        return
    names = keep_fp32_names(keep_fp32)
    if precision in ("fp16", "bf16"):
        if max_relative_error or inputs or scheme:
            raise InputError("--max-relative-error, --inputs and --scheme are for --precision int8")
        _typed(bundle, precision, names, as_json=as_json)
        return
    if max_relative_error is None:
        raise InputError(
            "int8 has no PyTorch run to be held to; declare its budget: --max-relative-error 2.5%"
        )
    _int8(bundle, max_relative_error, inputs, scheme or "auto", names, as_json=as_json)


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
            file = Bundle.load(folder).artifact(report.artifact).files[0].file
            click.echo(f"artifact: {report.artifact} ({folder / file})")
    if not report.passed:
        sys.exit(1)
