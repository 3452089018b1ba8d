"""verify: hold what a bundle holds against PyTorch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from mha_deploy.cli.shared import (
    FOLDER,
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
        from mha_deploy.render_verify import verify_tables

        verify_tables(console(), report)
    if not report.passed:
        sys.exit(1)
