"""The options of verify beyond those of other commands."""

from __future__ import annotations

from collections.abc import Callable

import click

from mha_deploy.cli.shared import FOLDER, OUT


def foreign_options(command: Callable[..., None]) -> Callable[..., None]:
    """Options for files that something else made."""
    options = (
        click.option("--onnx", type=FOLDER, help="Hold this ONNX file against the bundle's reference."),
        click.option(
            "--reference",
            default="",
            metavar="FILE.py:FACTORY",
            help="Hold TARGET, an ONNX file, against the torch.nn.Module that FACTORY() returns; its forward "
            "takes the file's inputs in order. The code of FILE.py is run.",
        ),
        click.option("--against", type=FOLDER, help="Hold TARGET, an ONNX file, against this one."),
        click.option(
            "--dim",
            "dims",
            multiple=True,
            metavar="DIM=MIN:OPT:MAX",
            help="Sizes to test an axis at, or the one that it is frozen at (repeatable).",
        ),
        click.option(
            "--input-name",
            "input_names",
            multiple=True,
            metavar="OURS=THEIRS",
            help="Which input of the bundle, or of the file that is right, an input of the other takes.",
        ),
        click.option("--output-name", default="", help="Which output of the ONNX file to compare."),
        click.option(
            "--mask-form",
            type=click.Choice(["keep", "ignore", "additive"]),
            help="How the ONNX file's mask reads: True or 1 = keep, = ignore, or 0 and lowest.  [default: as "
            "its dtype says, additive where it is floating point, else keep]",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def report_options(command: Callable[..., None]) -> Callable[..., None]:
    options = (
        click.option("--junit", type=OUT, metavar="FILE", help="Also write the report as JUnit XML."),
        click.option(
            "--heat-map",
            type=OUT,
            metavar="FILE.png",
            help="Also draw the error of the worst case over position and head.",
        ),
        click.option("--heat-map-case", default="", metavar="CASE", help="The case to draw."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def locate_options(command: Callable[..., None]) -> Callable[..., None]:
    options = (
        click.option("--locate", is_flag=True, help="Where an artifact fails, name the node at fault."),
        click.option(
            "--keep-fp32-to",
            type=OUT,
            metavar="FILE",
            help="With --locate: write the nodes that have to be in fp32, for --keep-fp32.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command
