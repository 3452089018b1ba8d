"""Options and output that several commands have in common."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mha_deploy.errors import BundleError, InputError, MhaDeployError
from mha_deploy.targets import check_target

if TYPE_CHECKING:
    from mha_deploy.sessions import Placement

FOLDER = click.Path(path_type=Path)


class OutPath(click.Path):
    """A file to write, in a folder that is there, or a stream: said before the work whose result it takes."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        check_target(Path(value))
        if Path(value).is_dir():
            raise BundleError(f"cannot write {value}: it is a folder")
        return super().convert(value, param, ctx)


OUT = OutPath()


class FiniteRange(click.FloatRange):
    """A number in a range, without nan and inf, which click lets pass."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            raise InputError(f"{param.opts[0] if param else self.name} {value}; expected a finite number")
        return number


POSITIVE = FiniteRange(min=0, min_open=True)


class Share(click.ParamType[float]):
    """A share: 2.5% and 0.025 are the same."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value).strip()
        try:
            share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            share = -1.0
        if not 0 <= share < 1:
            self.fail(f"{text!r}; expected a share below 1, as 2.5% or 0.025", param, ctx)
        return share


SHARE = Share()
json_option = click.option("--json", "as_json", is_flag=True, help="Print the report as JSON on stdout.")
artifact_option = click.option("--artifact", default="", help="Artifact to run.  [default: the best one]")


def layout_option(text: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    layouts = click.Choice(["padded", "packed"])
    return click.option("--layout", type=layouts, default="padded", show_default=True, help=text)


def placement_options(command: Callable[..., None]) -> Callable[..., None]:
    options = (
        click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True),
        click.option("--threads", type=click.IntRange(min=0), default=0, help="0: every core allowed."),
        click.option(
            "--fallback", type=click.Choice(["cpu"]), help="Device that will do where it is missing."
        ),
        click.option("--cuda-graphs", is_flag=True, help="Replay a shape's launches as one, on a GPU."),
    )
    for option in reversed(options):
        command = option(command)
    return command


PLACED = ("device", "threads", "fallback", "cuda_graphs")  # the names of `placement_options`


def placement_in(options: Mapping[str, Any]) -> Placement:
    """The placement that a command's options give, among others."""
    return placement(**{name: options[name] for name in PLACED})


def placement(device: str, threads: int, fallback: str | None, *, cuda_graphs: bool) -> Placement:
    from mha_deploy.sessions import Placement

    return Placement(device, threads, fallback or "", cuda_graphs)


@contextlib.contextmanager
def told_after(*, failed: bool) -> Iterator[None]:
    """Files of a report are written, which itself is out. Where it `failed` the exit code is 1, also when one
    of them cannot be written."""
    try:
        yield
    except MhaDeployError as error:
        if not failed:
            raise
        click.echo(f"error: {error}", err=True)
    if failed:
        sys.exit(1)


def print_json(data: object) -> None:
    click.echo(json.dumps(data, indent=1, ensure_ascii=False))


def console() -> Any:
    """stdout at a width that holds the tables where it is no terminal."""
    from rich.console import Console

    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120
    return Console(width=width, markup=False)


@contextlib.contextmanager
def status_line() -> Iterator[Callable[[str], None]]:
    """A line on stderr that says what is going on, where stderr is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True).status("") as status:
        yield status.update


def parse_grid(texts: tuple[str, ...]) -> dict[str, list[int]]:
    """Sizes by dim name from texts as "batch=1,8"."""
    grid: dict[str, list[int]] = {}
    for text in texts:
        name, _, sizes = text.partition("=")
        if name in grid:
            raise InputError("--grid names one dim twice; give all its sizes in one, as batch=1,8")
        try:
            grid[name] = [int(size) for size in sizes.split(",")]
        except ValueError as error:
            raise InputError(f"--grid {text!r}; expected a dim and its sizes, as batch=1,8") from error
    return grid
