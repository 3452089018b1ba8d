"""A heat map as a picture, for people."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

from mha_deploy.errors import InputError, MissingError
from mha_deploy.signature import Array
from mha_deploy.staging import staged_file
from mha_deploy.verification.heatmap import HeatMap

_COLOURS = "viridis"  # perceptually uniform, and readable without colour vision
_NOT_COMPARED, _NOT_FINITE, _ALLOWED = "#e4e4e4", "#d62728", "#d62728"
_LINE = "#3b528b"
_MOST_LABELS = 24


def draw(found: HeatMap, path: Path) -> None:
    """Write `found` to `path` as PNG: positions down, columns across, colours on a log scale.

    Above and beside the map stand the largest errors of each column and of each position; the allowed
    error is marked on all three scales.

    Raises:
        MissingError: matplotlib is not installed.
        InputError: `path` does not end in .png.
        BundleError: the file cannot be written.
    """
    check_picture(path)
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(9.6, 8.2), dpi=150, layout="constrained")
        _compose(figure, found)
        with staged_file(path) as staging:
            figure.savefig(staging, format="png")


def check_picture(path: Path) -> None:
    """Say before any work that a picture cannot be drawn to `path`.

    Raises: as `draw`.
    """
    if path.suffix.lower() != ".png":
        raise InputError(f"--heat-map {path}; expected a file that ends in .png")
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingError(
            "a heat map needs matplotlib, which is not installed; install it with: "
            "pip install 'mha-deploy[pictures]'"
        )


def _compose(figure: Any, found: HeatMap) -> None:
    from matplotlib.colors import LogNorm

    axes = figure.subplot_mosaic(
        [["columns", ".", "."], ["map", "rows", "bar"]], width_ratios=(20, 4, 0.8), height_ratios=(1, 5)
    )
    low, high = _limits(found)
    image = _map(axes["map"], found, LogNorm(low, high, clip=True))
    _margins(axes, found, (low, high))
    bar = figure.colorbar(image, cax=axes["bar"])
    bar.set_label(f"max |error| of the {found.value} (log scale)")
    if low < found.allowed < high:
        bar.ax.axhline(found.allowed, color=_ALLOWED, linewidth=2)
    _legend(figure, found)
    figure.suptitle(_title(found), x=0.02, ha="left", fontsize=11, linespacing=1.5)


def _limits(found: HeatMap) -> tuple[float, float]:
    """Limits that hold the finite errors and the allowed one, over six decades at most."""
    seen = found.error[np.isfinite(found.error) & (found.error > 0)]
    marks = [m for m in (found.allowed,) if np.isfinite(m) and m > 0]
    values = [*([float(seen.min()), float(seen.max())] if seen.size else []), *marks] or [1e-8, 1e-7]
    low, high = max(min(values), max(values) / 1e6) / 1.3, max(values) * 1.3
    return min(low, high / 30), high  # at least one whole decade, so that each scale has numbers


def _map(axis: Any, found: HeatMap, norm: Any) -> Any:
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    colours = colormaps[_COLOURS].with_extremes(bad=_NOT_COMPARED)
    shown = np.ma.masked_invalid(found.error)
    image = axis.imshow(shown, aspect="auto", interpolation="nearest", cmap=colours, norm=norm)
    infinite = np.isinf(found.error)
    if infinite.any():
        overlay = np.ma.masked_where(~infinite, np.ones(infinite.shape))
        axis.imshow(overlay, aspect="auto", interpolation="nearest", cmap=ListedColormap([_NOT_FINITE]))
    positions, columns = found.error.shape
    step = -(-columns // _MOST_LABELS)
    rotated = max(map(len, found.labels)) * columns > 60
    axis.set_xticks(range(0, columns, step), found.labels[::step], rotation=45 if rotated else 0)
    axis.yaxis.get_major_locator().set_params(integer=True)
    axis.set(xlabel=found.axis, ylabel="query position")
    for colour, width in (("white", 3.0), ("black", 1.2)):
        axis.plot(*found.worst[::-1], "o", ms=13, mfc="none", mec=colour, mew=width)
    for side in ("top", "right"):
        axis.spines[side].set_visible(True)
    axis.set_ylim(positions - 0.5, -0.5)
    return image


def _legend(figure: Any, found: HeatMap) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [
        Line2D(
            [], [], marker="o", linestyle="", markerfacecolor="none", markeredgecolor="black", label="largest"
        )
    ]
    if np.isfinite(found.allowed):
        handles.append(Line2D([], [], color=_ALLOWED, linestyle="--", label=f"allowed: {found.allowed:.2g}"))
    if np.isnan(found.error).any():
        handles.append(Patch(color=_NOT_COMPARED, label="not compared (padding)"))
    if np.isinf(found.error).any():
        handles.append(Patch(color=_NOT_FINITE, label="NaN or inf"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)


def _margins(axes: Any, found: HeatMap, limits: tuple[float, float]) -> None:
    from matplotlib.ticker import NullFormatter

    positions, columns = found.error.shape
    above, beside = axes["columns"], axes["rows"]
    few = {"marker": "o"} if positions <= 2 * _MOST_LABELS else {}
    by_column, by_row = (_largest(found.error, axis, limits) for axis in (0, 1))
    above.plot(range(columns), by_column, color=_LINE, marker="o", ms=4, lw=0.8)
    beside.plot(by_row, range(positions), color=_LINE, ms=4, lw=0.8, **few)
    infinite = [np.flatnonzero(np.isinf(found.error).any(axis=axis)) for axis in (0, 1)]
    cross = {"color": _NOT_FINITE, "marker": "x", "linestyle": "", "clip_on": False}
    if len(infinite[0]):  # a line without points would lie in the figure's corner, and spoil the layout
        above.plot(infinite[0], np.full(len(infinite[0]), limits[1]), **cross)
        beside.plot(np.full(len(infinite[1]), limits[1]), infinite[1], **cross)
    above.set(yscale="log", ylim=limits, xlim=(-0.5, columns - 0.5), ylabel=f"max per\n{_one(found)}")
    beside.set(xscale="log", xlim=limits, ylim=(positions - 0.5, -0.5), xlabel="max per\nposition")
    above.set_xticks([])
    beside.set_yticks([])
    above.yaxis.set_minor_formatter(NullFormatter())
    beside.xaxis.set_minor_formatter(NullFormatter())
    if np.isfinite(found.allowed):
        above.axhline(found.allowed, color=_ALLOWED, linestyle="--")
        beside.axvline(found.allowed, color=_ALLOWED, linestyle="--")


def _largest(error: Array, axis: int, limits: tuple[float, float]) -> Array:
    """The largest finite error along `axis`, at least the lower limit; NaN where there is none."""
    largest = np.asarray(np.where(np.isfinite(error), error, -np.inf).max(axis=axis, initial=-np.inf))
    return np.where(np.isfinite(largest), np.maximum(largest, limits[0]), np.nan)


def _one(found: HeatMap) -> str:
    return "head" if found.axis == "head" else "group"


def _title(found: HeatMap) -> str:
    position, column = found.worst
    where = f"head {column}" if found.axis == "head" else f"{found.axis} {found.labels[column]}"
    size = f"{found.max_error:.2e}" if np.isfinite(found.max_error) else "not finite"
    lines = [
        f"{found.subject}: {found.artifact} ({found.precision.value}), case {found.case}",
        f"{found.value} of sample {found.sample} (of {found.samples}, from 0), against PyTorch in fp64",
        f"max |error| {size} at position {position}, {where}",
    ]
    if np.isfinite(found.allowed):
        lines[-1] += f"; allowed {found.allowed:.2e}"
    if found.why:
        lines.append(f"by output features, not by head: {found.why}")
    return "\n".join(lines)
