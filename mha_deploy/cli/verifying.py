"""verify: hold what a bundle holds against PyTorch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from mha_deploy.cli.shared import (
    FOLDER,
    SHARE,
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
@click.option("--case", "names", multiple=True, help="Only this case or property (repeatable).")
@click.option("--inputs", type=FOLDER, help="Real inputs (.npz or .safetensors).  [default: the bundle's]")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of random inputs.")
@click.option(
    "--max-relative-error",
    type=SHARE,
    default=0.0,
    help="Budget of integer precisions, as 2.5% or 0.025.  [default: the one each was accepted with]",
)
@click.option("--fail-fast", is_flag=True, help="Stop at the first failure.")
@placement_options
@json_option
def verify(
    *,
    bundle: Path,
    artifacts: tuple[str, ...],
    names: tuple[str, ...],
    inputs: Path | None,
    seed: int,
    max_relative_error: float,
    fail_fast: bool,
    as_json: bool,
    **where: Any,
) -> None:
    """Hold every artifact of BUNDLE against PyTorch. Exit code 1 where one fails."""
    with interrupts_held():
        from mha_deploy.bundle import Bundle
        from mha_deploy.tensor_files import read_tensors
        from mha_deploy.verification import verify as run

    with status_line() as progress:
        report = run(
            Bundle.load(bundle),
            artifacts,
            names=names,
            inputs=read_tensors(inputs) if inputs else {},
            seed=seed,
            max_relative_error=max_relative_error,
            fail_fast=fail_fast,
            placement=placement(**where),
            progress=progress,
        )
    if as_json:
        print_json(report.to_json())
    else:
        from mha_deploy.render_verify import verify_tables

        verify_tables(console(), report)
    if not report.passed:
        sys.exit(1)
