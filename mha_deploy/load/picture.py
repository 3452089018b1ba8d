"""Latency by percentile as a picture: the tail stretched out, since the tail is the point."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mha_deploy.benchmark import check_picture
from mha_deploy.latency import samples_needed
from mha_deploy.load.report import QUANTILES, LoadReport
from mha_deploy.staging import staged_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which the colour-blind tell apart.
_LATENCY, _SERVICE, _LAG = "#0072B2", "#D55E00", "#009E73"


def draw_percentiles(report: LoadReport, path: Path) -> None:
    """Draw latency, service latency and send lag (ms, logarithmic) over the share of slower requests.

    A curve ends where there are too few samples above it to say more (see `samples_needed`).

    Raises:
        BenchError, MissingError: as `check_picture`.
        BundleError: the file cannot be written.
    """
    check_picture(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.6), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    records = report.records
    for samples, color, style, label in (
        (records.latency_ms(), _LATENCY, "-", "latency from the intended send"),
        (records.service_ms(), _SERVICE, "--", "from the real send"),
        (records.lag_ms(), _LAG, ":", "send lag of the generator"),
    ):
        _curve(axes, sorted(samples), color, style, label)
    axes.set(xscale="log", yscale="log")
    axes.invert_xaxis()
    axes.set_xticks([1 - q for q in QUANTILES.values()], list(QUANTILES), minor=False)
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("percentile")
    axes.set_ylabel("milliseconds")
    counts = ", ".join(f"{count} {name}" for name, count in report.outcomes.items() if count)
    verdict = "" if report.passed else f"\n{report.verdict}"
    axes.set_title(f"{report.target}\n{report.plan}\n{counts}{verdict}", loc="left", fontsize=9)
    axes.grid(visible=True, which="major", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    with staged_file(path) as staging:
        figure.savefig(staging)


def _curve(axes: Axes, ordered: list[float], color: str, style: str, label: str) -> None:
    count = len(ordered)
    ranks = [rank for rank in range(count // 2, count) if count >= samples_needed(rank / count)]
    if not ranks:
        return
    # A lag below the clock's step would be 0, which a logarithmic axis has no place for.
    values = [max(ordered[rank - 1], 1e-3) for rank in ranks]
    axes.plot([1 - rank / count for rank in ranks], values, style, color=color, linewidth=1.6, label=label)
