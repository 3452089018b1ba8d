"""load as tables for people."""

from __future__ import annotations

import math

from rich.console import Console
from rich.text import Text

from mha_deploy.latency import PERCENTILE_RULE, samples_needed
from mha_deploy.load import CheckReport, LoadReport, SearchReport
from mha_deploy.load.report import FAILURE_RULE, QUANTILES, VALIDITY_RULE
from mha_deploy.render import milliseconds, new_table, versions_text


def load_tables(console: Console, report: LoadReport) -> None:
    """One run."""
    table = new_table(
        f"{report.target}: {report.plan}",
        ("milliseconds", *(f">{name}" for name in QUANTILES), ">max", ">samples"),
    )
    rows = {
        "latency from the intended send": report.latency,
        "from the real send": report.service,
        "send lag of the generator": report.lag,
    }
    for name, spread in rows.items():
        figures = [milliseconds(value) for value in spread.percentiles_ms.values()]
        table.add_row(name, *figures, milliseconds(spread.max_ms), f"{spread.samples:,}")
    console.print(table)
    counts = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in report.outcomes.items())
    console.print(
        f"{report.planned:,} requests: {counts}\n{report.answered_per_s:,.1f} answers/s, "
        f"{report.tokens_per_s:,.0f} tokens/s over {report.wall_s:.2f} s; the generator used "
        f"{report.generator_cpu:.0%} of a core at {report.machine['generator_priority']} priority",
        highlight=False,
    )
    for note, count in report.notes.items():
        console.print(Text(f"{count:,} x {note}", "yellow"))
    _check(console, report.check)
    _closing(console, report)
    console.print(Text(report.verdict, "green" if report.passed else "bold red"))


def search_tables(console: Console, report: SearchReport) -> None:
    """Every rate that was tried, in ascending order, and the highest that held."""
    table = new_table(
        f"{report.alone.target}: the highest rate at p99 <= {report.target_p99_ms:g} ms",
        (">requests/s", ">p50 ms", ">p99 ms", ">answered", ">lag p99 ms", "result"),
    )
    table.add_row("one at a time", *_figures(report.alone), "")
    for trial in sorted(report.trials, key=lambda trial: trial.rate_per_s):
        result = Text("holds", "green") if trial.held else Text(trial.why_not, "yellow")
        table.add_row(f"{trial.rate_per_s:,.1f}", *_figures(trial.report), result)
    console.print(table)
    checks = [report.alone.check, *(trial.report.check for trial in report.trials)]
    _check(console, next((check for check in checks if not check.passed), checks[0]))
    _closing(console, report.alone)
    above = "" if report.failed_per_s in (0.0, math.inf) else f"; {report.failed_per_s:,.1f} does not"
    by = ", for the generator's sake and not the target's" if report.limited_by_generator else ""
    word = f"{report.rate_per_s:,.1f} requests/s hold p99 <= {report.target_p99_ms:g} ms{above}{by}"
    if not report.rate_per_s:
        word = f"no rate held p99 <= {report.target_p99_ms:g} ms{above}{by}"
    console.print(Text(word, "green" if report.passed else "bold red"))
    for failure in report.failures:
        console.print(Text(f"FAILED: {failure}", "bold red"))


def _figures(run: LoadReport) -> tuple[str, str, str, str]:
    return (
        milliseconds(run.latency.percentiles_ms["p50"]),
        milliseconds(run.latency.percentiles_ms["p99"]),
        f"{run.outcomes['answered']:,} of {run.planned:,}",
        milliseconds(run.lag.percentiles_ms["p99"]),
    )


def _check(console: Console, check: CheckReport) -> None:
    error = ""
    if not math.isnan(check.max_abs_error):
        error = f", largest error {check.max_abs_error:.1e}, allowed {check.allowed:.1e}"
    line = (
        f"answers: {check.sampled - check.failed} of {check.sampled} sampled are right{error} ({check.rule})"
    )
    console.print(Text(line, "" if check.passed else "bold red"))
    if not check.passed:
        console.print(Text(f"first: {check.first_failure}", "bold red"))


def _closing(console: Console, report: LoadReport) -> None:
    console.print(
        f"Percentiles by {PERCENTILE_RULE} from raw samples of answered requests; '-' where there are too "
        f"few (p99 needs {samples_needed(0.99)}); {VALIDITY_RULE}; {FAILURE_RULE}.\n{report.machine['cpu']}, "
        f"{versions_text(report.machine)}",
        style="dim",
        highlight=False,
    )
