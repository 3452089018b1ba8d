"""bench: latency over a grid, two candidates against each other, a gate for CI."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mha_deploy.cli.shared import (
    FOLDER,
    OUT,
    FiniteRange,
    artifact_option,
    console,
    json_option,
    parse_grid,
    placement_in,
    placement_options,
    print_json,
    status_line,
    told_after,
)
from mha_deploy.errors import InputError
from mha_deploy.staging import interrupts_held, staged_file

if TYPE_CHECKING:
    from mha_deploy.benchmark import BenchReport
    from mha_deploy.bundle import Bundle


@click.command()
@click.argument("bundle", type=FOLDER, required=False)
@click.option("--grid", "grids", multiple=True, metavar="DIM=N,N", help="Sizes of a dim, as batch=1,8.")
@click.option("--seconds", type=FiniteRange(min=0.01), default=2.0, show_default=True, help="Per size.")
@click.option(
    "--rounds", type=click.IntRange(min=8), help="Rounds to spread them over.  [default: 8; --compare: 20]"
)
@click.option(
    "--compare",
    "compared",
    nargs=2,
    metavar="A B",
    help="Hold B against A: artifacts of BUNDLE, or DIR[:ARTIFACT]; with @threads=N, @device=cuda or "
    "@cuda-graphs after either.",
)
@click.option(
    "--baseline", type=FOLDER, help="A report by -o to hold this run against; exit code 1 if slower."
)
@click.option("--max-regression", metavar="SHARE", help="How much slower a size may become.  [default: 5%]")
@click.option("--profile", "profiled", is_flag=True, help="Also time the graph's nodes (ONNX Runtime).")
@click.option("--roofline", type=OUT, metavar="FILE.png", help="Also draw the sizes under the ceilings.")
@click.option("-o", "--out", type=OUT, help="Also write the JSON report, raw samples included.")
@artifact_option
@placement_options
@json_option
def bench(
    *,
    bundle: Path | None,
    grids: tuple[str, ...],
    rounds: int | None,
    compared: tuple[str, str] | None,
    out: Path | None,
    as_json: bool,
    seconds: float,
    **options: Any,
) -> None:
    """Report latency over a grid of sizes, beside ceilings of the same run.

    With --compare: the ratio of two candidates with its 99 % interval. With --baseline: a gate for CI.
    """
    with interrupts_held():
        from mha_deploy.bundle import Bundle

    measuring: dict[str, Any] = {"grid": parse_grid(grids), "seconds": seconds}
    if rounds:
        measuring["rounds"] = rounds
    home = Bundle.load(bundle) if bundle else None
    _check_together(options, compared=bool(compared))
    report: BenchReport | None = None
    if compared:
        data = _compare(home, compared, measuring, options, as_json=as_json)
    elif home:
        report, data = _bench(home, measuring, options, as_json=as_json)
    else:
        raise InputError("bench was given no bundle; name one, or two with --compare")
    if as_json:
        print_json(data)
    with told_after(failed=not data.get("gate", {"passed": True})["passed"]):
        if out:
            with staged_file(out) as staging:
                staging.write_text(json.dumps(data) + "\n", encoding="utf-8")
        if report and options["roofline"]:  # last: what fails here has cost no measurement
            from mha_deploy.benchmark import draw_roofline

            draw_roofline(report, options["roofline"])


def _check_together(options: dict[str, Any], *, compared: bool) -> None:
    """Refuse an option that would be passed over without a word."""
    given = [name for name in ("artifact", "baseline", "profiled", "roofline") if options[name]]
    if options["max_regression"] is not None:
        given.append("max-regression")
    if compared and given:
        raise InputError(
            f"--compare was given with --{given[0].removesuffix('d')}; it goes with --grid, --seconds, "
            "--rounds and a placement: leave the other out"
        )
    if "max-regression" in given and not options["baseline"]:
        raise InputError("--max-regression was given without --baseline, the report to hold this run against")


def _compare(
    home: Bundle | None,
    names: tuple[str, str],
    measuring: dict[str, Any],
    options: dict[str, Any],
    *,
    as_json: bool,
) -> dict[str, Any]:
    """Run and print a comparison; its data."""
    with interrupts_held():
        from mha_deploy.benchmark import candidate, contest

    a, b = (candidate(name, home, placement_in(options)) for name in names)
    with status_line() as progress:
        report = contest(a, b, **measuring, progress=progress)
    if not as_json:
        from mha_deploy.render_bench import contest_table

        contest_table(console(), report)
    return report.to_json()


def _bench(
    bundle: Bundle, measuring: dict[str, Any], options: dict[str, Any], *, as_json: bool
) -> tuple[BenchReport, dict[str, Any]]:
    """Run and print a grid, and its gate and profile where they are asked for; its report and data."""
    with interrupts_held():
        from mha_deploy.benchmark import bench as run
        from mha_deploy.benchmark import check_picture, check_profiled, gate, profile

    what = {"artifact": options["artifact"], "placement": placement_in(options)}
    baseline = options["baseline"]
    allowed = _share("5%" if options["max_regression"] is None else options["max_regression"])
    if options["roofline"]:
        check_picture(options["roofline"])
    if options["profiled"]:
        check_profiled(bundle, **what)
    with status_line() as progress:
        gated = gate(bundle, baseline, allowed, **measuring, **what, progress=progress) if baseline else None
        report = gated.report if gated else run(bundle, **measuring, **what, progress=progress)
        sizes = [cell.sizes for cell in report.cells] if options["profiled"] else []
        profiles = [profile(bundle, each, **what) for each in sizes]
    if not as_json:
        from mha_deploy.render_bench import bench_table, gate_table, profile_tables

        bench_table(console(), report)
        profile_tables(console(), profiles)
        if gated:
            gate_table(console(), gated)
    data = (gated or report).to_json() | {"profiles": [each.to_json() for each in profiles]}
    return report, data


def _share(text: str) -> float:
    number, percent, rest = text.partition("%")
    try:
        share = float(number) / 100
    except ValueError:
        share = -1.0
    if not percent or rest or not 0 <= share < float("inf"):
        raise InputError(f"--max-regression {text!r}; expected a share as 5%")
    return share
