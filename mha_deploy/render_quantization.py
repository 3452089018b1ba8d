"""The search for an int8 form as a table."""

from __future__ import annotations

import math

from rich.console import Console
from rich.text import Text

from mha_deploy.quantization import QuantizationReport, Tried
from mha_deploy.render import new_table, state
from mha_deploy.verification import FAILED, PASSED


def quantization_tables(console: Console, report: QuantizationReport) -> None:
    table = new_table(
        f"{report.subject}: int8 within {report.max_relative_error:.2%} of PyTorch in fp64",
        (
            "candidate",
            ">held-out real",
            ">worst cosine",
            ">SQNR dB",
            ">random inputs",
            ">mate moves it",
            ">bytes",
            ">speed",
            "result",
        ),
    )
    for each in report.tried:
        passed = each.verdict == "kept"
        table.add_row(
            str(each.candidate),
            f"{each.errors.relative:.2%}",
            f"{each.errors.cosine:.4f}",
            f"{each.errors.sqnr_db:.1f}",
            f"{each.random_errors.relative:.2%}",
            f"{each.batch_drift:.1%}" if each.batch_dependent else f"{each.batch_drift:.0e}",
            f"{each.bytes:,}",
            _speed(each),
            state(each.verdict + (f": {each.note}" if each.note else ""), PASSED if passed else FAILED),
        )
    console.print(table)
    console.print("\n".join(_footnotes(report)), style="dim", highlight=False)
    word = "KEPT" if report.passed else "NOT KEPT"
    console.print(Text(f"{word}: {report.conclusion}", "green" if report.passed else "bold red"))


def _speed(tried: Tried) -> str:
    interval = tried.time.interval
    if not math.isfinite(tried.speed):
        return "-"
    return f"{tried.speed:.2f}x ({1 / interval.high:.2f}-{1 / interval.low:.2f})"


def _footnotes(report: QuantizationReport) -> list[str]:
    notes = [
        f"Calibrated on {report.calibration_requests} requests of {report.inputs}, judged on the "
        f"{report.held_out_requests} others: Frobenius norm of the",
        "error over that of the truth, and the row whose direction is furthest off. Random inputs have the",
        "same sizes and masks; they decide nothing. A mate ten times as loud joins the batch of a request.",
    ]
    if report.not_tried:
        notes.append(f"Not tried, since they cost more: {len(report.not_tried)}.")
    if report.speed_conditions:
        held = report.speed_conditions
        notes += [
            f"Speed: time of fp32 ({report.fp32_bytes:,} bytes) over this one's, with a 99 % interval,",
            f"at {held['sizes']}, {held['provider']}, {held['threads']} threads, {held['machine']['cpu']}.",
        ]
    return notes
