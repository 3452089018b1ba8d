"""A search as tables."""

from __future__ import annotations

import math

from rich.console import Console
from rich.text import Text

from mha_deploy.latency import PERCENTILE_RULE
from mha_deploy.render import milliseconds, new_table, size_text, state, versions_text
from mha_deploy.search import RULE, SearchReport
from mha_deploy.search.report import Measured, Tried


def search_tables(console: Console, report: SearchReport) -> None:
    table = new_table(
        f"{report.subject}: candidates ({', '.join(report.allowed)} allowed)",
        ("candidate", "precision", ">error, of allowed", ">time / choice", "verdict"),
    )
    for each in report.tried:
        verdict = each.verdict
        table.add_row(
            each.name,
            each.precision.value,
            f"{verdict.error_ratio:.2f}" if verdict and math.isfinite(verdict.error_ratio) else "-",
            _factor(report.against_choice(each.name)),
            _verdict(report, each),
        )
    console.print(table)
    for size in report.measured:
        _size_table(console, report, size)
    for notice in report.notices():
        console.print(Text(notice, "yellow"))
    reused = f" {report.reused} of {len(report.measured)} sizes from search.json." if report.reused else ""
    console.print(
        f"{RULE}.\ntime / choice: geometric mean over the sizes. p50 and p99 by "
        f"{PERCENTILE_RULE}; '-': too few samples. Of ceiling: of a plain fp32 MatMul in the same rounds. "
        f"heat = clearly slower in a short heat.{reused}\n{report.machine['cpu']}, "
        f"{versions_text(report.machine)}",
        style="dim",
        highlight=False,
    )
    console.print(Text(f"chosen: {report.artifact}", "bold green"))


def _size_table(console: Console, report: SearchReport, size: Measured) -> None:
    table = new_table(
        f"{' x '.join(size.sizes)} = {size_text(size.sizes)}",
        ("candidate", ">time / best", ">p50 ms", ">p99 ms", ">tokens/s", ">of ceiling", ""),
    )
    chosen = report.route.at(size.length)
    for name in sorted(size.timings, key=lambda name: size.timings[name].ratio):
        timing = size.timings[name]
        table.add_row(
            name,
            f"{timing.ratio:.2f}",
            milliseconds(timing.p50_ms),
            milliseconds(timing.p99_ms),
            f"{size.tokens_per_s(name):,.0f}",
            f"{size.ceiling_share(name):.0%}",
            state("chosen", "passed") if name == chosen else Text("" if timing.final else "heat", "dim"),
        )
    console.print(table)


def _factor(value: float) -> str:
    return f"{value:.2f}x" if math.isfinite(value) else "-"


def _verdict(report: SearchReport, tried: Tried) -> Text:
    if tried.name in (report.route.short, report.route.long):
        if report.route.single:
            return state("chosen", "passed")
        limit = report.route.up_to_length
        where = f"up to length {limit}" if tried.name == report.route.short else f"beyond length {limit}"
        return state(f"chosen {where}", "passed")
    return state(tried.outcome, tried.outcome)
