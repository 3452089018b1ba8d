"""Verifications as tables."""

from __future__ import annotations

import math

from rich.console import Console
from rich.text import Text

from mha_deploy.render import axes, new_table, scientific, sizes, state
from mha_deploy.verification import VerifyReport


def verify_tables(console: Console, report: VerifyReport) -> None:
    for artifact, provider in report.providers.items():
        cases = [case for case in report.cases if case.artifact == artifact]
        table = new_table(
            f"{report.subject}: {artifact} ({cases[0].precision.value}, {provider}) against {report.against}",
            (
                "case",
                axes(cases[0].sizes),
                ">max |error|",
                ">allowed",
                ">yardstick",
                ">needed",
                ">relative",
                "result",
            ),
        )
        for case in cases:
            table.add_row(
                case.name,
                sizes(case.sizes),
                scientific(case.max_abs_error),
                scientific(case.allowed),
                scientific(case.yardstick),
                f"{case.needed:.2f}x" if math.isfinite(case.needed) else "-",
                scientific(case.relative_error),
                state(case.outcome + (f": {case.note}" if case.note else ""), case.outcome),
            )
        console.print(table)
    for artifact, reason in report.not_run.items():
        console.print(Text(f"not run: {artifact}: {reason}", "yellow"))
    console.print(
        f"{report.rule}; yardstick = {report.yardstick}; needed = error / yardstick.{report.left_out}",
        style="dim",
        highlight=False,
    )
    for line in report.notes:
        console.print(Text(line, "dim"))
    for line in report.not_checked:
        console.print(Text(f"not checked: {line}", "yellow"))
    passed = sum(case.passed for case in report.cases)
    word = "PASSED" if report.passed else "FAILED"
    console.print(
        Text(f"{word}: {passed} of {len(report.cases)} cases", "green" if report.passed else "bold red")
    )
