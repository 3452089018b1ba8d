"""The command line: parse, call one library function, print the report, exit.

Exit codes: 0 done; 1 a check failed; 2 bad input or usage; 3 this machine lacks what was asked for;
130 interrupted. `--json` prints the report's data on stdout; progress goes to stderr.

    making.py    export, build-engine
    optimizing.py optimize
    verifying.py verify; its options in verify_options.py
    running.py   infer
    benching.py  bench
    serving.py   serve
    loading.py   load
    looking.py   inspect, doctor
    shared.py    options and output that they have in common
"""

from __future__ import annotations

import io
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

import click

from mha_deploy.cli.benching import bench
from mha_deploy.cli.loading import load
from mha_deploy.cli.looking import doctor, inspect
from mha_deploy.cli.making import build_engine, export
from mha_deploy.cli.optimizing import optimize
from mha_deploy.cli.running import infer
from mha_deploy.cli.serving import serve
from mha_deploy.cli.verifying import verify
from mha_deploy.errors import MhaDeployError, MissingError

# torch's words where a tensor does not fit.
_OUT_OF_MEMORY = re.compile("allocate memory|Storage size calculation overflowed")


class Pipeline(click.Group):
    """Commands in the order of the pipeline, and every expected failure as one line."""

    def list_commands(self, _ctx: click.Context) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # a name that the terminal cannot show is no failure
                stream.reconfigure(errors="backslashreplace")
        try:
            return _interruptible(super().invoke, ctx)
        except MhaDeployError as error:
            _tell(ctx, str(error))
            ctx.exit(error.exit_code)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not _OUT_OF_MEMORY.search(str(error)):
                raise
            _tell(ctx, f"not enough memory on this machine: {_first_line(error)}")
            ctx.exit(MissingError.exit_code)
        except KeyboardInterrupt:
            click.echo("interrupted; nothing was left half-written", err=True)
            ctx.exit(130)


def _tell(ctx: click.Context, message: str) -> None:
    """The error that is being handled as one line, under its traceback where --debug asks for that."""
    if ctx.params.get("debug"):
        click.echo(traceback.format_exc(), err=True, nl=False)
    click.echo(f"error: {message}", err=True)


def _interruptible(run: Callable[[click.Context], Any], ctx: click.Context) -> Any:
    """A Ctrl-C stays one, whatever libraries make of the KeyboardInterrupt that reaches them.

    What the command itself makes of the signal and leaves so stays.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        return run(ctx)
    pressed: list[int] = []

    def press(number: int, frame: FrameType | None) -> None:
        pressed.append(number)
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, press)
    try:
        return run(ctx)
    except Exception:
        if pressed:
            raise KeyboardInterrupt from None
        raise
    finally:
        if signal.getsignal(signal.SIGINT) is press:
            signal.signal(signal.SIGINT, before)


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), "it was used up")


@click.group(cls=Pipeline, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show the traceback of an error too.")
@click.version_option(package_name="mha-deploy")
def main(debug: bool) -> None:
    """From a PyTorch attention block to a verified, fast, served engine."""


for command in (export, optimize, build_engine, verify, infer, bench, serve, load, inspect, doctor):
    main.add_command(command)
