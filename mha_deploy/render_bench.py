"""bench as tables for people."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple

from rich.console import Console
from rich.text import Text

from mha_deploy.benchmark import BenchReport, ContestReport, GateReport, baseline, bounds, comparison
from mha_deploy.benchmark.operators import Profile
from mha_deploy.latency import CONFIDENCE, PERCENTILE_RULE, Interval, nearest_rank, samples_needed
from mha_deploy.render import milliseconds, new_table, size_text, versions_text


def bench_table(console: Console, report: BenchReport) -> None:
    table = new_table(
        report.title,
        (
            " x ".join(report.cells[0].sizes),
            ">p50 ms",
            f">{CONFIDENCE:.0%} interval",
            ">p90 ms",
            ">p99 ms",
            ">samples",
            ">tokens/s",
            ">GFLOP/s",
            ">GB/s",
            ">of ceiling",
        ),
    )
    for cell in report.cells:
        table.add_row(
            size_text(cell.sizes),
            milliseconds(cell.latency.p50_ms),
            _around(cell.p50_interval_ms, cell.latency.p50_ms),
            milliseconds(cell.latency.p90_ms),
            milliseconds(cell.latency.p99_ms),
            str(cell.latency.samples),
            f"{cell.tokens_per_s:,.0f}",
            f"{cell.gflops:.0f}",
            f"{cell.gb_s:.1f}",
            f"{cell.bound.by} {cell.bound.share:.0%}",
        )
    console.print(table)
    _stages(console, report)
    roofs, plan = report.ceilings, report.schedule
    _small(
        console,
        f"Percentiles by {PERCENTILE_RULE} from raw samples; '-' where there are too few (p99 needs "
        f"{samples_needed(0.99)}); interval over {plan.rounds} rounds; {plan.warm_up_runs} runs of warm-up "
        "apart.",
        f"Ceiling: {roofs.gflops:.0f} GFLOP/s, {roofs.what}, in the same rounds; memory "
        f"{roofs.memory_gb_s:.1f} GB/s, cache {roofs.cache_gb_s:.1f} GB/s, overhead "
        f"{roofs.overhead_ms * 1e3:.1f} us.",
        bounds.RULE,
    )
    _machine(console, report.machine, report.notices())


def _stages(console: Console, report: BenchReport) -> None:
    """The device's own times, for a session on one."""
    if not report.cells[0].stages:
        return
    table = new_table(
        f"on the device, its cache emptied before each run (p50 of {len(report.cells[0].stages)} runs)",
        (" x ".join(report.cells[0].sizes), ">copy in ms", ">compute ms", ">copy out ms"),
    )
    for cell in report.cells:
        columns = zip(*map(astuple, cell.stages), strict=True)
        medians = (milliseconds(nearest_rank(column, 0.5)) for column in columns)
        table.add_row(size_text(cell.sizes), *medians)
    console.print(table)


def contest_table(console: Console, report: ContestReport) -> None:
    first = report.comparisons[0][1]
    table = new_table(
        f"{first.a.name} against {first.b.name}",
        (
            " x ".join(report.comparisons[0][0]),
            ">A p50 ms",
            ">B p50 ms",
            ">B / A",
            f">{CONFIDENCE:.0%} interval",
            "answer",
        ),
    )
    for sizes, each in report.comparisons:
        table.add_row(
            size_text(sizes),
            milliseconds(each.a.latency.p50_ms),
            milliseconds(each.b.latency.p50_ms),
            f"{each.estimate.ratio:.3f}",
            _interval(each.estimate.interval),
            Text(_in_words(each), "bold" if each.answer == comparison.DIFFERENT else ""),
        )
    console.print(table)
    kept = "opened anew for every round" if report.reopened else "opened once"
    _small(
        console,
        f"{comparison.RULE}.",
        f"{report.schedule.rounds} rounds of A B B A or B A A B, drawn by chance; sessions {kept}; "
        f"A on {report.providers[0]}, B on {report.providers[1]}.",
    )
    _machine(console, report.machine, report.notices())


def gate_table(console: Console, report: GateReport) -> None:
    table = new_table(
        f"against {report.baseline}, at most {report.max_regression:.0%} slower",
        (
            " x ".join(report.judgements[0].sizes),
            ">before ms",
            ">now ms",
            ">now / before",
            f">{CONFIDENCE:.0%} interval",
            ">by the ceiling",
            f">{CONFIDENCE:.0%} interval",
            "result",
        ),
    )
    styles = {baseline.PASSED: "green", baseline.REGRESSION: "bold red"}
    for each in report.judgements:
        table.add_row(
            size_text(each.sizes),
            milliseconds(each.before_ms),
            milliseconds(each.now_ms),
            f"{each.timed.ratio:.3f}",
            _interval(each.timed.interval),
            f"{each.by_ceiling.ratio:.3f}",
            _interval(each.by_ceiling.interval),
            Text(each.outcome, styles.get(each.outcome, "yellow")),
        )
    console.print(table)
    _small(console, f"{baseline.RULE}.")
    console.print(_verdict(report))


def profile_tables(console: Console, profiles: Sequence[Profile]) -> None:
    for profile in profiles:
        table = new_table(
            f"operators at {size_text(profile.sizes)} (medians of {profile.runs} runs under the profiler)",
            ("operator", ">nodes", ">ms", ">of the run"),
        )
        kinds = {each.operator for each in profile.operators}
        groups = {kind: [o.median_ms for o in profile.operators if o.operator == kind] for kind in kinds}
        for kind, taken in sorted(groups.items(), key=lambda item: -sum(item[1])):
            table.add_row(kind, str(len(taken)), f"{sum(taken):.4f}", f"{sum(taken) / profile.run_ms:.1%}")
        between = profile.between_ms
        table.add_row("between nodes", "", f"{between:.4f}", f"{between / profile.run_ms:.1%}")
        console.print(table)


def _verdict(report: GateReport) -> Text:
    """The gate in one line; that nothing became slower is not said where nothing was shown."""
    sizes = len(report.judgements)
    open_, slower = report.count(baseline.INCONCLUSIVE), report.count(baseline.REGRESSION)
    if report.inconclusive:
        return Text(
            f"INCONCLUSIVE: none of {sizes} sizes was shown to be slower, and none to be as fast; measure "
            "for longer, or take a new baseline",
            "bold yellow",
        )
    words = f"{slower} of {sizes} sizes regressed" + (f", {open_} inconclusive" if open_ else "")
    return Text(f"PASSED: {words}", "green") if report.passed else Text(f"FAILED: {words}", "bold red")


def _interval(interval: Interval) -> str:
    return "-" if math.isnan(interval.low) else f"{interval.low:.3f} .. {interval.high:.3f}"


def _around(interval: Interval, middle: float) -> str:
    """The interval's ends relative to the figure that they stand around."""
    low, high = interval.low / middle - 1, interval.high / middle - 1
    return "-" if math.isnan(low) else f"{low:+.0%} {high:+.0%}"


def _in_words(each: comparison.Comparison) -> str:
    if each.answer != comparison.DIFFERENT:
        return each.answer
    slower, ratio = ("B", each.estimate.ratio) if each.estimate.ratio > 1 else ("A", 1 / each.estimate.ratio)
    return f"{each.answer}: {slower} takes {ratio:.2f}x as long"


def _machine(console: Console, host: Mapping[str, object], notices: Sequence[str]) -> None:
    _small(console, f"{host['cpu']}, {versions_text(host)}")
    for notice in notices:
        console.print(Text(f"notice: {notice}", "yellow"))


def _small(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, style="dim", highlight=False)
