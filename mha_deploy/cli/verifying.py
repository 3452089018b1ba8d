"""verify: hold what a bundle holds against PyTorch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from mha_deploy.errors import InputError
from mha_deploy.staging import interrupts_held

if TYPE_CHECKING:
    from mha_deploy.bundle import Bundle
    from mha_deploy.locating import LocateReport
    from mha_deploy.verification import VerifyReport


@click.command()
@click.argument("bundle", type=FOLDER)
@click.option("--artifact", "artifacts", multiple=True, help="Only this artifact (repeatable).")
@click.option("--fail-fast", is_flag=True, help="Stop at the first failure.")
@click.option("--locate", is_flag=True, help="Where one fails, name the node that is at fault.")
@click.option(
    "--keep-fp32-to",
    type=FOLDER,
    metavar="FILE",
    help="With --locate: write the nodes that have to be in fp32, for --keep-fp32.",
)
@placement_options
@json_option
def verify(
    *,
    bundle: Path,
    artifacts: tuple[str, ...],
    fail_fast: bool,
    locate: bool,
    keep_fp32_to: Path | None,
    as_json: bool,
    **where: Any,
) -> None:
    """Hold every artifact of BUNDLE against PyTorch. Exit code 1 where one fails."""
    with interrupts_held():
        from mha_deploy.bundle import Bundle
        from mha_deploy.verification import verify as run

    if keep_fp32_to and not locate:
        raise InputError("--keep-fp32-to writes what --locate finds; give both")
    opened = Bundle.load(bundle)
    with status_line() as progress:
        report = run(opened, artifacts, fail_fast=fail_fast, placement=placement(**where), progress=progress)
        faults = _located(opened, report, keep_fp32_to, progress) if locate and not report.passed else None
    if as_json:
        print_json(report.to_json() | ({"located": faults.to_json()} if faults else {}))
    else:
        from mha_deploy.render_verify import verify_tables

        verify_tables(console(), report)
        if faults:
            from mha_deploy.render_locate import locate_lines

            locate_lines(console(), faults)
    if not report.passed:
        sys.exit(1)


def _located(
    bundle: Bundle, report: VerifyReport, out: Path | None, progress: Callable[[str], None]
) -> LocateReport:
    from mha_deploy.cases import masked_real_cases, standard_cases
    from mha_deploy.locating import locate

    requests = bundle.real_inputs()
    cases = [*standard_cases(bundle.spec, requests), *masked_real_cases(bundle.spec, requests)]
    found = locate(bundle, report, cases, progress=progress)
    cures = [nodes for nodes in found.fp32 if nodes.cures]
    if out and cures:
        if len(cures) > 1:
            names = ", ".join(nodes.artifact for nodes in cures)
            raise InputError(
                f"--keep-fp32-to takes one artifact's nodes, not those of {names}; name one with --artifact"
            )
        cures[0].write(out)
    return found
