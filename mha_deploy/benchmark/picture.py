"""The roofline as a picture: every size of a report under the ceilings of its own run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mha_deploy.benchmark.bounds import COMPUTE, MEMORY, OVERHEAD
from mha_deploy.benchmark.report import BenchReport, Cell
from mha_deploy.errors import BenchError, MissingError
from mha_deploy.staging import staged_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".png", ".svg", ".pdf")
# Okabe and Ito's colours, which the colour-blind tell apart; a marker each, for print in grey.
_LOOKS = {COMPUTE: ("#0072B2", "o"), MEMORY: ("#D55E00", "s"), OVERHEAD: ("#009E73", "^")}
_ROOF = "#333333"


def check_picture(path: Path) -> None:
    """Raise, before anything is measured, where no picture could be drawn into `path`.

    Raises:
        BenchError: its suffix is none of SUFFIXES.
        MissingError: matplotlib is not installed.
    """
    if path.suffix not in SUFFIXES:
        raise BenchError(f"{path} is no picture's name; expected one that ends in {', '.join(SUFFIXES)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingError(
            "matplotlib is not installed, which draws the roofline; install it with: "
            "pip install 'mha-deploy[pictures]'"
        ) from error


def draw_roofline(report: BenchReport, path: Path) -> None:
    """Draw GFLOP/s over FLOPs a byte, both logarithmic, with a point for each size.

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
    left, right = _span([cell.flops / cell.traffic_bytes for cell in report.cells], report)
    _roofs(axes, report, left, right)
    _points(axes, report.cells)
    axes.set(xscale="log", yscale="log", xlim=(left, right))
    axes.margins(y=0.1)
    axes.set_xlabel("arithmetic intensity (FLOP per byte of inputs, outputs and weights)")
    axes.set_ylabel("GFLOP/s at the median latency")
    axes.set_title(
        f"{report.title}\n{report.machine['cpu']}; a point is a size, {' x '.join(report.cells[0].sizes)}",
        loc="left",
        fontsize=10,
    )
    axes.grid(visible=True, which="major", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False, fontsize=9, title="held back by")
    with staged_file(path) as staging:
        figure.savefig(staging)


def _span(intensities: Sequence[float], report: BenchReport) -> tuple[float, float]:
    """From left of every point and of both ridges to right of them."""
    roofs = report.ceilings
    ridges = [roofs.gflops / roofs.cache_gb_s, roofs.gflops / roofs.memory_gb_s]
    return min(*intensities, *ridges) / 2.5, max(*intensities, *ridges) * 3


def _roofs(axes: Axes, report: BenchReport, left: float, right: float) -> None:
    roofs = report.ceilings
    axes.hlines(roofs.gflops, roofs.gflops / roofs.cache_gb_s, right, colors=_ROOF, linewidth=1.6)
    axes.annotate(
        f"MatMul {roofs.gflops:,.0f} GFLOP/s",
        (right, roofs.gflops),
        xytext=(-4, 4),
        textcoords="offset points",
        ha="right",
        fontsize=9,
        color=_ROOF,
    )
    for name, bandwidth, style in (
        ("cache", roofs.cache_gb_s, "-"),
        ("memory", roofs.memory_gb_s, "--"),
    ):
        ridge = roofs.gflops / bandwidth
        ends = [left, ridge]
        axes.plot(ends, [end * bandwidth for end in ends], style, color=_ROOF, linewidth=1.6)
        axes.annotate(
            f"{name} {bandwidth:,.0f} GB/s",
            (left * 1.25, left * 1.25 * bandwidth),
            xytext=(-3, 5),
            textcoords="offset points",
            rotation=45,
            rotation_mode="anchor",
            transform_rotates_text=True,
            va="bottom",
            fontsize=9,
            color=_ROOF,
        )


def _points(axes: Axes, cells: Sequence[Cell]) -> None:
    for by, (color, marker) in _LOOKS.items():
        chosen = [cell for cell in cells if cell.bound.by == by]
        if not chosen:
            continue
        at: tuple[list[float], list[float]] = (
            [cell.flops / cell.traffic_bytes for cell in chosen],
            [cell.gflops for cell in chosen],
        )
        axes.scatter(*at, s=46, color=color, marker=marker, zorder=3, label=by)
    for cell, place in zip(cells, _places(cells), strict=True):
        axes.annotate(
            " x ".join(map(str, cell.sizes.values())),
            (cell.flops / cell.traffic_bytes, cell.gflops),
            xytext=place,
            textcoords="offset points",
            ha="left" if place[0] > 0 else "right",
            va="center",
            fontsize=8,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5},
        )


def _places(cells: Sequence[Cell]) -> list[tuple[int, int]]:
    """Where each label stands beside its point: left of the points that another has to its right."""

    def near(one: Cell, other: Cell) -> bool:
        across = math.log10(other.flops / other.traffic_bytes) - math.log10(one.flops / one.traffic_bytes)
        return 0 <= across < 0.25 and abs(math.log10(other.gflops / one.gflops)) < 0.08

    crowded: set[int] = set()
    for (i, one), (_, other) in itertools.permutations(enumerate(cells), 2):
        if near(one, other):
            crowded.add(i)
    return [(-7, 0) if i in crowded else (7, 0) for i in range(len(cells))]
