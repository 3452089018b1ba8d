"""verify: hold what a bundle holds, or any ONNX file, against what is right."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from mha_deploy.cli.verify_options import foreign_options, locate_options, report_options
from mha_deploy.errors import InputError
from mha_deploy.staging import interrupts_held

if TYPE_CHECKING:
    from mha_deploy.locating import LocateReport
    from mha_deploy.verification import VerifyReport
    from mha_deploy.verification.heatmap import Chosen

# What each way to verify takes of the options that not all of them take, by the library's names.
_TAKES = {
    "": {"artifacts", "names", "inputs", "seed", "max_relative_error", "fail_fast"},
    "--onnx": {
        "input_names",
        "output_name",
        "mask_form",
        "dims",
        "names",
        "inputs",
        "seed",
        "max_relative_error",
    },
    "--reference": {"output_name", "dims", "names", "seed", "max_relative_error"},
    "--against": {"input_names", "dims", "max_relative_error"},
}
_FLAGS = {"names": "--case", "artifacts": "--artifact", "dims": "--dim", "input_names": "--input-name"}


@click.command()
@click.argument("target", type=FOLDER)
@click.option("--artifact", "artifacts", multiple=True, help="Only this artifact (repeatable).")
@click.option("--case", "names", multiple=True, help="Only this case or property (repeatable).")
@click.option("--inputs", type=FOLDER, help="Real inputs (.npz or .safetensors).  [default: the bundle's]")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of random inputs.")
@click.option(
    "--max-relative-error",
    type=SHARE,
    default=0.0,
    help="Error budget where there is no yardstick, as for integer precisions: 2.5% or 0.025.  [default: the "
    "one each was accepted with]",
)
@click.option("--fail-fast", is_flag=True, help="Stop at the first failure.")
@foreign_options
@report_options
@locate_options
@placement_options
@json_option
def verify(
    *,
    target: Path,
    onnx: Path | None,
    reference: str,
    against: Path | None,
    junit: Path | None,
    heat_map: Path | None,
    heat_map_case: str,
    locate: bool,
    keep_fp32_to: Path | None,
    as_json: bool,
    device: str,
    threads: int,
    fallback: str | None,
    cuda_graphs: bool,
    **options: Any,
) -> None:
    """Hold every artifact of the bundle TARGET against PyTorch. Exit code 1 where one fails.

    With --onnx: hold any ONNX file with the bundle's inputs against the bundle's reference. TARGET may be
    an ONNX file instead; --reference or --against then says what is right.
    """
    with interrupts_held():
        from mha_deploy.verification.heatmap import Chosen
        from mha_deploy.verification.junit import write_junit
        from mha_deploy.verification.picture import check_picture

    ways = {"--onnx": onnx, "--reference": reference, "--against": against}
    way, held = _way(target, ways, options)
    if heat_map:
        if way == "--against":
            raise InputError("--heat-map shows an error against a reference; --against has another file")
        check_picture(heat_map)
    elif heat_map_case:
        raise InputError("--heat-map-case names the case that --heat-map draws; give both")
    _check_locating(way, keep_fp32_to, locate=locate)
    chosen = Chosen(heat_map_case)
    if options["inputs"]:
        from mha_deploy.tensor_files import read_tensors

        options["inputs"] = read_tensors(options["inputs"])
    taken = {name: options[name] for name in _TAKES[way] if options[name]}
    taken["placement"] = placement(device, threads, fallback, cuda_graphs=cuda_graphs)
    with status_line() as progress:
        report = _run(way, target, held, chosen, progress=progress, **taken)
        faults = _located(target, report, taken, progress) if locate and not report.passed else None
    if faults and keep_fp32_to:
        faults.write_keep_fp32(keep_fp32_to)
    if as_json:
        print_json(report.to_json() | ({"located": faults.to_json()} if faults else {}))
    else:
        from mha_deploy.render_verify import verify_tables

        verify_tables(console(), report)
        if faults:
            from mha_deploy.render_locate import locate_lines

            locate_lines(console(), faults)
    if junit:
        write_junit(report, junit)
    if heat_map:
        _draw(chosen, heat_map)
    if not report.passed:
        sys.exit(1)


def _way(target: Path, ways: dict[str, Any], options: dict[str, Any]) -> tuple[str, Any]:
    """Which way to verify was asked for, and what for, once the options and TARGET go with it."""
    asked = [name for name, value in ways.items() if value]
    if len(asked) > 1:
        raise InputError(f"{' and '.join(asked)}: give one of them, each says what is right")
    way = asked[0] if asked else ""
    if target.suffix == ".onnx" and way not in ("--reference", "--against"):
        raise InputError(
            f"{target} is an ONNX file; say what is right: --reference FILE.py:FACTORY or --against "
            "OTHER.onnx, or give a bundle and this file as --onnx"
        )
    foreign = [name for name, value in options.items() if value and name not in _TAKES[way]]
    if foreign:
        flag = _FLAGS.get(foreign[0], f"--{foreign[0].replace('_', '-')}")
        raise InputError(f"{flag} does not go with {way or 'the artifacts of a bundle'}")
    return way, ways.get(way)


def _check_locating(way: str, keep_fp32_to: Path | None, *, locate: bool) -> None:
    if locate and way:
        raise InputError(f"--locate looks into the artifacts of a bundle; it does not go with {way}")
    if keep_fp32_to and not locate:
        raise InputError("--keep-fp32-to writes what --locate finds; give both")


def _located(
    target: Path, report: VerifyReport, options: dict[str, Any], progress: Callable[[str], None]
) -> LocateReport:
    """Where the artifacts of `report` go wrong, on the cases that they met."""
    with interrupts_held():
        from mha_deploy.bundle import Bundle
        from mha_deploy.locating import locate
        from mha_deploy.verification import References, suite_of

    bundle = Bundle.load(target)
    of_suite = {name: options[name] for name in ("names", "inputs", "seed") if name in options}
    suite = suite_of(bundle, References(bundle.reference()), **of_suite)
    budget = options.get("max_relative_error", 0.0)
    return locate(bundle, report, suite.cases, max_relative_error=budget, progress=progress)


def _run(way: str, target: Path, held: Any, chosen: Chosen, **options: Any) -> VerifyReport:
    if way == "--reference":
        from mha_deploy.foreign import verify_against_module

        return verify_against_module(target, held, observe=chosen.see, planned=chosen.check, **options)
    if way == "--against":
        from mha_deploy.foreign import verify_against_file

        return verify_against_file(target, held, **options)
    with interrupts_held():
        from mha_deploy.bundle import Bundle

    bundle = Bundle.load(target)
    if way == "--onnx":
        from mha_deploy.foreign import verify_file

        return verify_file(bundle, held, observe=chosen.see, planned=chosen.check, **options)
    from mha_deploy.verification import verify as run

    return run(bundle, observe=chosen.see, planned=chosen.check, **options)


def _draw(chosen: Chosen, path: Path) -> None:
    """The heat map, where anything came to numbers; a report of failures stands without one."""
    from mha_deploy.verification.picture import draw

    if not chosen.any:
        click.echo("no heat map: nothing came to numbers", err=True)
        return
    with status_line() as progress:
        progress("drawing the heat map")
        draw(chosen.make(), path)
