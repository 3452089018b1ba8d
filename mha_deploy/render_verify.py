"""Verifications as tables."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mha_deploy.render import new_table, state
from mha_deploy.verification import (
    FEATURE_RULE,
    NOT_CHECKED,
    CaseResult,
    Hop,
    PropertyResult,
    VerifyReport,
)


def verify_tables(console: Console, report: VerifyReport) -> None:
    for hop in report.hops:
        title = f"{report.subject}: {hop.artifact} ({hop.precision.value}, {report.providers[hop.artifact]})"
        if hop.cases:
            dims = " x ".join(hop.nearest.sizes)
            _cases(console, f"{title} against {report.against}; size is {dims}", hop)
        if hop.properties:
            _properties(console, f"{title}: what must hold", hop)
    if len(report.hops) > 1:
        _hops(console, report)
    for artifact, reason in report.not_run.items():
        console.print(Text(f"not run: {artifact}: {reason}", "yellow"))
    _legend(console, report)
    for line in report.notes:
        console.print(Text(line, "dim"))
    for line in report.not_checked:
        console.print(Text(f"not checked: {line}", "yellow"))
    if report.stopped_at:
        console.print(
            Text(f"stopped at the first failure: {report.stopped_at}; the rest was not run", "yellow")
        )
    passed = sum(case.passed for case in report.cases)
    checked = [held for held in report.properties if held.outcome != NOT_CHECKED]
    held = sum(each.outcome == "passed" for each in checked)
    word = "PASSED" if report.passed else "FAILED"
    console.print(
        Text(
            f"{word}: {passed} of {len(report.cases)} cases passed, {held} of {len(checked)} properties held "
            f"(seed {report.seed})",
            "green" if report.passed else "bold red",
        )
    )


def _cases(console: Console, title: str, hop: Hop) -> None:
    gates = (">budget",) if hop.precision.is_integer else (">PyTorch", ">allowed")
    table = _wide_table(
        title,
        (
            "case",
            ">size",
            ">max err",
            *gates,
            ">needed",
            ">by feature",
            ">rel err",
            ">1-cos",
            ">dB",
            "worst at",
            "result",
        ),
    )
    for case in hop.cases:
        table.add_row(
            case.name,
            "x".join(map(str, case.sizes.values())),
            _scientific(case.max_abs_error),
            *_gates(case),
            _times(case.needed),
            _by_feature(case),
            _scientific(case.relative_error),
            f"{1 - case.cosine:.0e}" if math.isfinite(case.max_abs_error) else "-",
            f"{case.sqnr_db:.0f}" if math.isfinite(case.sqnr_db) else "-",
            ",".join(map(str, case.worst)),
            state(case.outcome, case.outcome),
        )
    console.print(table)
    for case in hop.cases:
        if case.note:
            console.print(state(f"{case.name}: {case.note}", case.outcome))


def _wide_table(title: str, columns: Sequence[str]) -> Table:
    table = new_table(title, columns, lines=box.SIMPLE_HEAD)
    table.padding = (0, 1, 0, 0)
    table.columns[0].no_wrap = True
    return table


def _gates(case: CaseResult) -> tuple[str, ...]:
    if case.max_relative_error:
        return (f"{case.max_relative_error:.1%}",)
    return (_scientific(case.yardstick), _scientific(case.allowed))


def _by_feature(case: CaseResult) -> str:
    """What the second gate needed, of what it allowed."""
    feature = case.by_feature
    if not feature.yardstick or not math.isfinite(feature.error + feature.allowed):
        return "-"
    return f"{feature.needed:.2f}/{feature.allowed / feature.yardstick:.1f}x"


def _properties(console: Console, title: str, hop: Hop) -> None:
    table = _wide_table(title, ("property", ">deviation", ">allowed", ">needed", ">relative", "result"))
    for held in hop.properties:
        table.add_row(held.name, *_deviation(held), _verdict(held))
    console.print(table)


def _deviation(held: PropertyResult) -> tuple[str, ...]:
    if math.isnan(held.deviation):
        return ("-", "-", "-", "-")
    limit = f"{held.max_relative_error:.1%}" if held.max_relative_error else _scientific(held.allowed)
    deviation = "0 (bit-exact)" if held.exact else _scientific(held.deviation)
    return (deviation, limit, _times(held.needed), "0" if held.exact else _scientific(held.relative))


def _verdict(held: PropertyResult) -> Text:
    told = f"{held.outcome}: {held.note}" if held.note else held.outcome
    return Text(told, "dim") if held.outcome == NOT_CHECKED else state(told, held.outcome)


def _hops(console: Console, report: VerifyReport) -> None:
    table = _wide_table(
        f"{report.subject}: error by hop",
        (
            "artifact",
            "precision",
            ">cases",
            ">properties",
            "nearest to its limit",
            ">needed",
            ">rel err",
            ">1-cos",
            ">dB",
            "result",
        ),
    )
    for hop in report.hops:
        checked = sum(held.outcome != NOT_CHECKED for held in hop.properties)
        told = hop.to_json()
        table.add_row(
            hop.artifact,
            hop.precision.value,
            f"{sum(case.passed for case in hop.cases)}/{len(hop.cases)}",
            f"{told['properties_held']}/{checked}",
            hop.nearest.name if hop.cases else "-",
            _times(hop.nearest.needed) if hop.cases else "-",
            _scientific(max((case.relative_error for case in hop.judged), default=math.nan)),
            f"{1 - min((case.cosine for case in hop.judged), default=math.nan):.0e}",
            f"{min((case.sqnr_db for case in hop.judged), default=math.nan):.0f}",
            state(hop.outcome, hop.outcome),
        )
    console.print(table)


def _legend(console: Console, report: VerifyReport) -> None:
    lines = [
        f"{report.rule}; yardstick (PyTorch) =",
        f"{report.yardstick};",
        "needed = error / yardstick. by feature: needed/allowed of the output feature whose",
        "root mean square error is nearest to its limit, which is",
        f"{FEATURE_RULE}.",
        "rel err: Frobenius norm. 1-cos: the row furthest off. dB: signal to noise.",
        "worst at: batch, position, feature. Padded query rows are not compared.",
    ]
    if any(hop.precision.is_integer for hop in report.hops):
        lines.append("Integer precisions have no yardstick: on real inputs rel err is held to the budget.")
    console.print("\n".join(lines), style="dim", highlight=False)


def _times(value: float) -> str:
    return f"{value:.2f}x" if math.isfinite(value) else "-"


def _scientific(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1e}"
