"""load: how long users wait at a given rate, and which rate is too much."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from mha_deploy.cli.shared import (
    FOLDER,
    OUT,
    PLACED,
    POSITIVE,
    FiniteRange,
    artifact_option,
    console,
    json_option,
    placement_in,
    placement_options,
    print_json,
    status_line,
    told_after,
)
from mha_deploy.errors import InputError
from mha_deploy.staging import interrupts_held, staged_file

if TYPE_CHECKING:
    from mha_deploy.bundle import Bundle
    from mha_deploy.load import LoadReport, Plan, SearchReport
    from mha_deploy.load.target import Target
    from mha_deploy.runner import BatchRunner

_LEAST = 460  # a p99 takes 459 samples
# Options that something makes void, by what that is called in a message.
_VOID = {
    "a URL": ("workers", "mode"),
    "a URL without --bundle": ("artifact", *PLACED),
    "a DIR": ("bundle", "model", "token_file", "allow_remote"),
    "--trace": ("requests", "seconds", "lengths", "arrivals", "burst_shape"),
    "--concurrency": ("seconds", "arrivals", "burst_shape"),
    "--requests": ("seconds",),
    "no --arrivals burst": ("burst_shape",),
    "no --p99-ms": ("tolerance",),
    "--check 0": ("bundle",),
}


@click.command()
@click.argument("target", metavar="URL|DIR")
@click.option("--rate", type=POSITIVE, help="Open loop: requests a second.")
@click.option(
    "--arrivals", type=click.Choice(["poisson", "constant", "burst"]), default="poisson", show_default=True
)
@click.option("--burst-shape", type=FiniteRange(0, 1, min_open=True), default=0.25, show_default=True)
@click.option("--trace", type=FOLDER, help='Open loop, from JSON lines {"at_s": 0.25, "length": 31}.')
@click.option("--concurrency", type=click.IntRange(min=1), help="Closed loop: requests at a time.")
@click.option("--p99-ms", type=POSITIVE, help="Find the highest rate whose p99 is at most this.")
@click.option("--tolerance", type=POSITIVE, default=0.05, show_default=True, help="How near, as a share.")
@click.option(
    "--lengths",
    default="lognormal:27:2:160",
    show_default=True,
    help="fixed:N, uniform:LOW:HIGH, lognormal:MEAN:LOW:HIGH[:SIGMA], file:PATH.",
)
@click.option("--requests", type=click.IntRange(min=1), help="How many.  [default: --rate x --seconds]")
@click.option("--seconds", type=POSITIVE, default=10.0, show_default=True, help="Of an open loop.")
@click.option("--warm-up", type=click.IntRange(min=0), default=50, show_default=True, help="Requests before.")
@click.option("--check", "sample", type=click.IntRange(min=0), default=32, show_default=True, help="Answers.")
@click.option("--max-in-flight", type=click.IntRange(min=1), default=1024, show_default=True)
@click.option("--timeout-ms", type=POSITIVE, help="Deadline of every request.  [default: none]")
@click.option("--drain", type=POSITIVE, default=10.0, show_default=True, help="Seconds to wait at the end.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--model", default="", help="Of a server.  [default: the only one]")
@click.option("--bundle", type=FOLDER, help="What a server serves: its answers are checked against this.")
@click.option("--token-file", default="", help="File with the server's token; else MHA_DEPLOY_TOKEN.")
@click.option("--allow-remote", is_flag=True, help="Allow a server on another machine.")
@click.option("--workers", type=click.IntRange(min=0), default=0, help="Of a DIR: sessions; 0: measured.")
@click.option("--mode", type=click.Choice(["exact", "fast"]), default="exact", show_default=True)
@click.option("--picture", type=OUT, metavar="FILE.png", help="Also draw latency by percentile.")
@click.option("-o", "--out", type=OUT, help="Also write the JSON report, raw samples included.")
@artifact_option
@placement_options
@json_option
def load(*, target: str, picture: Path | None, out: Path | None, as_json: bool, **options: Any) -> None:
    """Load a server (URL) or a bundle in this process (DIR), and report how long requests waited.

    Latency counts from when a request was meant to be sent. One of --rate, --trace, --concurrency and
    --p99-ms says how requests come.

    Exit code 1, and the last lines say why: INVALID (the generator was late or at its end, so that the
    run does not count); FAILED (no request was answered; one was lost, to an error or a connection that
    ended, or got no answer or was not sent at all; or an answer is wrong); or no rate held. Refusals (503,
    429) and deadlines (504) are counted, and alone fail no run in which anything was answered.
    """
    kinds = [name for name in ("rate", "trace", "concurrency", "p99_ms") if options[name] is not None]
    if len(kinds) != 1:
        raise InputError(
            f"load was given {len(kinds)} of --rate, --trace, --concurrency and --p99-ms; give one of them"
        )
    _check_together(target, options)
    if picture and options["p99_ms"]:
        raise InputError("--picture draws one run, but --p99-ms makes many; draw it with --rate")
    with interrupts_held():
        from mha_deploy.benchmark import check_picture
        from mha_deploy.load import LoadReport, draw_percentiles

    if picture:
        check_picture(picture)
    report = _searched(target, options) if options["p99_ms"] else _ran(target, options)
    # Figures first: a file that cannot be written costs no run.
    if as_json:
        print_json(report.to_json())
    else:
        _print(report)
    with told_after(failed=not report.passed):
        if out:
            with staged_file(out) as staging:
                staging.write_text(json.dumps(report.to_json(samples=True)) + "\n", encoding="utf-8")
        if picture and isinstance(report, LoadReport):
            draw_percentiles(report, picture)


def _check_together(target: str, options: dict[str, Any]) -> None:
    """Refuse an option that would be passed over without a word."""
    remote = "://" in target
    holds = {
        "a URL": remote,
        "a URL without --bundle": remote and not options["bundle"],
        "a DIR": not remote,
        "--trace": options["trace"] is not None,
        "--concurrency": options["concurrency"] is not None,
        "--requests": options["requests"] is not None,
        "no --arrivals burst": options["arrivals"] != "burst",
        "no --p99-ms": options["p99_ms"] is None,
        "--check 0": options["sample"] == 0,
    }
    source = click.get_current_context().get_parameter_source
    for what, void in _VOID.items():
        given = [name for name in void if holds[what] and source(name) is ParameterSource.COMMANDLINE]
        if given:
            raise InputError(
                f"--{given[0].replace('_', '-')} was given with {what}, where it changes nothing; leave it "
                "out"
            )


def _print(report: LoadReport | SearchReport) -> None:
    from mha_deploy.load import LoadReport
    from mha_deploy.render_load import load_tables, search_tables

    if isinstance(report, LoadReport):
        load_tables(console(), report)
    else:
        search_tables(console(), report)


def _ran(name: str, options: dict[str, Any]) -> LoadReport:
    """One run, by --rate, --trace or --concurrency."""
    plan = _plan(options)
    ends = int(plan.lengths.min()), int(plan.lengths.max())
    with _target(name, ends, options) as (target, run), status_line() as progress:
        progress(f"{plan.requests:,} requests to {target.name}")
        return run(plan)


def _searched(name: str, options: dict[str, Any]) -> SearchReport:
    """Runs at many rates, by --p99-ms."""
    from mha_deploy.load import find_rate, parse_lengths

    lengths = parse_lengths(options["lengths"]).values
    with _target(name, (min(lengths), max(lengths)), options) as (_, run), status_line() as progress:

        def run_at(rate: float) -> LoadReport:
            return run(_plan({**options, "rate": rate}))

        progress("one request at a time")
        alone = run(_plan({**options, "concurrency": 1, "requests": _LEAST}))
        return find_rate(run_at, alone, options["p99_ms"], tolerance=options["tolerance"], progress=progress)


def _plan(options: dict[str, Any]) -> Plan:
    from mha_deploy.load import Arrivals, closed_plan, open_plan, parse_lengths, trace_plan

    if options["trace"]:
        return trace_plan(options["trace"])
    lengths, rate, seed = parse_lengths(options["lengths"]), options["rate"], options["seed"]
    if options["concurrency"]:
        return closed_plan(options["concurrency"], lengths, options["requests"] or 2000, seed)
    count = options["requests"] or max(1, round(min(rate * options["seconds"], 1e18)))
    if options["p99_ms"]:
        count = max(count, _LEAST)
    return open_plan(Arrivals(options["arrivals"], rate, options["burst_shape"]), lengths, count, seed)


@contextmanager
def _target(
    name: str, ends: tuple[int, int], options: dict[str, Any]
) -> Iterator[tuple[Target, Callable[[Plan], LoadReport]]]:
    """A server or a runner over a folder, for lengths between `ends`, and what runs a plan against it."""
    from mha_deploy.bundle import Bundle
    from mha_deploy.load import Checker, LoadOptions, ReferenceChecker, RunnerTarget, run_load, server_target
    from mha_deploy.load.server import check_folder
    from mha_deploy.serving import read_token

    driving = LoadOptions(
        warm_up=options["warm_up"],
        sample=options["sample"],
        max_in_flight=options["max_in_flight"],
        drain_s=options["drain"],
        seed=options["seed"],
    )
    shortest, longest = ends
    timeout_s = (options["timeout_ms"] or float("inf")) / 1e3
    remote, checker, artifact = "://" in name, Checker(), options["artifact"]
    if not remote:
        check_folder(name)
    home = options["bundle"] if remote else Path(name)
    bundle = Bundle.load(home) if home else None
    if bundle and options["sample"]:
        checker = ReferenceChecker(bundle, artifact, placement_in(options))

    def run(plan: Plan) -> LoadReport:
        return run_load(target, plan, driving, checker)

    target: Target
    if remote:
        target = server_target(
            name,
            longest,
            shortest=shortest,
            model=options["model"],
            timeout_us=0 if timeout_s == float("inf") else max(1, round(timeout_s * 1e6)),
            token=read_token(options["token_file"]),
            allow_remote=options["allow_remote"],
            seed=options["seed"],
        )
        yield target, run
        return
    assert bundle is not None
    with _runner(bundle, artifact, options) as runner:
        target = RunnerTarget(runner, longest, shortest=shortest, timeout_s=timeout_s, seed=options["seed"])
        yield target, run


def _runner(bundle: Bundle, artifact: str, options: dict[str, Any]) -> BatchRunner:
    from mha_deploy.runner import BatchRunner, RunnerOptions

    where = placement_in(options)
    rules = RunnerOptions(workers=options["workers"], threads=options["threads"], mode=options["mode"])
    return BatchRunner.over(bundle, artifact, placement=where, options=rules)
