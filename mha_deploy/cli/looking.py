"""inspect, doctor: commands that look and change nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from mha_deploy.cli.shared import FOLDER, console, json_option, print_json
from mha_deploy.staging import interrupts_held


@click.command()
@click.argument("bundle", type=FOLDER)
@json_option
def inspect(bundle: Path, as_json: bool) -> None:
    """Show what is in BUNDLE and where it came from."""
    with interrupts_held():
        from mha_deploy.bundle import Bundle

    loaded = Bundle.load(bundle)
    if as_json:
        print_json(loaded.manifest.to_json())
        return
    from mha_deploy.render import inspect_tables
    from mha_deploy.render_engine import passport_tables
    from mha_deploy.tensorrt.passport import Passport

    inspect_tables(console(), loaded)
    for artifact in loaded.artifacts:
        if "passport" in artifact.details:
            passport = Passport.from_json(artifact.details["passport"])
            passport_tables(console(), f"engine {artifact.name}", passport, bundle / artifact.files[0].file)


@click.command()
@json_option
def doctor(as_json: bool) -> None:
    """Show what this machine has and what each missing piece would bring. Exit code 3 on a problem."""
    with interrupts_held():
        from mha_deploy.doctor import examine

    findings = examine()
    if as_json:
        print_json([finding.to_json() for finding in findings])
    else:
        from mha_deploy.render import doctor_table

        doctor_table(console(), findings)
    if any(finding.state == "problem" for finding in findings):
        sys.exit(3)
