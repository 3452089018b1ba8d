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
    """Show what is in BUNDLE, or in a folder of engines, and where it came from."""
    with interrupts_held():
        from mha_deploy.bundle import Bundle
        from mha_deploy.manifest import FILE_NAME
        from mha_deploy.tensorrt.passport import SUFFIX, Passport, read_passport

    engines = {path.name.removesuffix(SUFFIX): path for path in sorted(bundle.glob(f"*{SUFFIX}"))}
    if engines and not (bundle / FILE_NAME).is_file():
        plans = {name: bundle / f"{name}.plan" for name in engines}
        passports = {name: read_passport(plan) for name, plan in plans.items()}
        if as_json:
            print_json({name: passport.to_json() for name, passport in passports.items()})
            return
    else:
        loaded = Bundle.load(bundle)
        if as_json:
            print_json(loaded.manifest.to_json())
            return
        built = [artifact for artifact in loaded.artifacts if "passport" in artifact.details]
        plans = {artifact.name: bundle / artifact.files[0].file for artifact in built}
        passports = {each.name: Passport.from_json(each.details["passport"]) for each in built}
        from mha_deploy.render import inspect_tables

        inspect_tables(console(), loaded)
    from mha_deploy.render_engine import passport_tables

    for name, passport in passports.items():
        passport_tables(console(), f"engine {name}", passport, plans[name])


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
