"""verify and infer: commands that run what a bundle holds."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from mha_deploy.cli.shared import (
    FOLDER,
    artifact_option,
    console,
    json_option,
    placement,
    placement_options,
    print_json,
    status_line,
)
from mha_deploy.staging import interrupts_held


@click.command()
@click.argument("bundle", type=FOLDER)
@click.option("--artifact", "artifacts", multiple=True, help="Only this artifact (repeatable).")
@placement_options
@json_option
def verify(bundle: Path, artifacts: tuple[str, ...], as_json: bool, **where: Any) -> None:
    """Hold every artifact of BUNDLE against PyTorch. Exit code 1 where one fails."""
    with interrupts_held():
        from mha_deploy.bundle import Bundle
        from mha_deploy.verification import verify as run

    with status_line() as progress:
        report = run(Bundle.load(bundle), artifacts, placement=placement(**where), progress=progress)
    if as_json:
        print_json(report.to_json())
    else:
        from mha_deploy.render import verify_tables

        verify_tables(console(), report)
    if not report.passed:
        sys.exit(1)


@click.command()
@click.argument("bundle", type=FOLDER)
@click.argument("inputs", type=FOLDER)
@click.option("-o", "--out", required=True, type=FOLDER, help="File of answers (.npz or .safetensors).")
@click.option(
    "--mask-form",
    type=click.Choice(["keep", "ignore", "additive"]),
    default="keep",
    show_default=True,
    help="How the mask of padded inputs reads: True = keep, True = ignore, or 0 and -inf.",
)
@artifact_option
@placement_options
@json_option
def infer(
    *,
    bundle: Path,
    inputs: Path,
    out: Path,
    mask_form: str,
    artifact: str,
    as_json: bool,
    **where: Any,
) -> None:
    """Run batched inference on INPUTS: padded arrays, or packed requests with their lengths."""
    with interrupts_held():
        from mha_deploy.bundle import Bundle
        from mha_deploy.inference import infer as run
        from mha_deploy.tensor_files import check_suffix, read_tensors, write_tensors

    check_suffix(out)
    answers = run(
        Bundle.load(bundle),
        read_tensors(inputs),
        artifact,
        mask_form=mask_form,
        placement=placement(**where),
    )
    write_tensors(out, {"y": answers.y})
    if as_json:
        print_json({"out": str(out), "shape": list(answers.y.shape), **answers.report.to_json()})
        return
    from mha_deploy.render import infer_table

    infer_table(console(), answers.report)
    click.echo(f"answers: {out} (y {list(answers.y.shape)})")
