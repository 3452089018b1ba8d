"""The command line: parse, call one library function, print the report, exit.

Exit codes: 0 done; 1 a check failed; 2 bad input or usage; 3 this machine lacks what was asked for;
130 interrupted. `--json` prints the report's data on stdout; progress goes to stderr.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mha_deploy.errors import InputError, MhaDeployError

if TYPE_CHECKING:
    from mha_deploy.sessions import Placement

json_option = click.option("--json", "as_json", is_flag=True, help="Print the report as JSON on stdout.")
artifact_option = click.option("--artifact", default="", help="Artifact to run.  [default: the best one]")
FOLDER = click.Path(path_type=Path)


def placement_options(command: Callable[..., None]) -> Callable[..., None]:
    options = (
        click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True),
        click.option("--threads", type=click.IntRange(min=0), default=0, help="0: every core allowed."),
        click.option(
            "--fallback", type=click.Choice(["cpu"]), help="Device that will do where it is missing."
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


class Pipeline(click.Group):
    """Commands in the order of the pipeline, and every expected failure as one line."""

    def list_commands(self, _ctx: click.Context) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except MhaDeployError as error:
            if ctx.params.get("debug"):
                raise
            click.echo(f"error: {error}", err=True)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo("interrupted; nothing was changed", err=True)
            ctx.exit(130)


@click.group(cls=Pipeline, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.version_option(package_name="mha-deploy")
def main(debug: bool) -> None:
    """From a PyTorch attention block to a verified, fast, served engine."""


@main.command()
@click.argument("spec")
@click.option("-o", "--out", required=True, type=FOLDER, help="Folder of the bundle to write.")
@click.option("--weights", type=FOLDER, help="Checkpoint to use instead of the spec's.")
@click.option("--prefix", default="", help="Prefix of this layer's tensors in --weights.")
@click.option("--inputs", type=FOLDER, help="Packed real inputs for `verify` to use.")
@json_option
def export(
    *, spec: str, out: Path, weights: Path | None, prefix: str, inputs: Path | None, as_json: bool
) -> None:
    """Export SPEC (a preset's name or a TOML file) to ONNX and prove its dynamic axes."""
    from mha_deploy.pipeline import export as run

    if prefix and weights is None:
        raise InputError("--prefix picks a layer out of --weights; give both")
    with _progress() as progress:
        bundle = run(spec, out, weights=weights or "", prefix=prefix, inputs=inputs or "", progress=progress)
    if as_json:
        _print_json({"bundle": str(bundle.folder), **bundle.manifest.to_json()})
        return
    layout = bundle.manifest.provenance["checkpoint"]["layout"]
    proved = len(bundle.artifact().details["axes_proved_at"])
    click.echo(f"weights: {layout}")
    click.echo(f"axes: {', '.join(map(str, bundle.spec.dims))}; proved at {proved} sizes against PyTorch")
    click.echo(f"bundle: {bundle.folder}")


@main.command()
@click.argument("bundle", type=FOLDER)
@click.option("--artifact", "artifacts", multiple=True, help="Only this artifact (repeatable).")
@placement_options
@json_option
def verify(bundle: Path, artifacts: tuple[str, ...], as_json: bool, **where: Any) -> None:
    """Hold every artifact of BUNDLE against PyTorch. Exit code 1 where one fails."""
    from mha_deploy.bundle import Bundle
    from mha_deploy.verification import verify as run

    with _progress() as progress:
        report = run(Bundle.load(bundle), artifacts, placement=_placement(**where), progress=progress)
    if as_json:
        _print_json(report.to_json())
    else:
        from mha_deploy.render import verify_tables

        verify_tables(_console(), report)
    if not report.passed:
        sys.exit(1)


@main.command()
@click.argument("bundle", type=FOLDER)
@click.argument("inputs", type=FOLDER)
@click.option("-o", "--out", required=True, type=FOLDER, help="File of answers (.npz or .safetensors).")
@click.option("--token-budget", type=click.IntRange(min=1), default=512, show_default=True)
@click.option(
    "--mask-form",
    type=click.Choice(["keep", "ignore", "additive"]),
    default="keep",
    show_default=True,
    help="How the mask of padded inputs reads: True = keep, True = ignore, or 0 and -inf.",
)
@artifact_option
@placement_options
@json_option
def infer(
    *,
    bundle: Path,
    inputs: Path,
    out: Path,
    token_budget: int,
    mask_form: str,
    artifact: str,
    as_json: bool,
    **where: Any,
) -> None:
    """Run batched inference on INPUTS: padded arrays, or packed requests with their lengths."""
    from mha_deploy.bundle import Bundle
    from mha_deploy.inference import infer as run
    from mha_deploy.tensor_files import check_suffix, read_tensors, write_tensors

    check_suffix(out)
    answers = run(
        Bundle.load(bundle),
        read_tensors(inputs),
        artifact,
        token_budget=token_budget,
        mask_form=mask_form,
        placement=_placement(**where),
    )
    write_tensors(out, {"y": answers.y})
    if as_json:
        _print_json({"out": str(out), "shape": list(answers.y.shape), **answers.report.to_json()})
        return
    from mha_deploy.render import infer_table

    infer_table(_console(), answers.report)
    click.echo(f"answers: {out} (y {list(answers.y.shape)})")


@main.command()
@click.argument("bundle", type=FOLDER)
@click.option("--grid", "grids", multiple=True, metavar="DIM=N,N", help="Sizes of a dim, as batch=1,8.")
@click.option("--seconds", type=click.FloatRange(min=0.01), default=2.0, show_default=True, help="Per size.")
@click.option("-o", "--out", type=FOLDER, help="Also write the JSON report, raw samples included.")
@artifact_option
@placement_options
@json_option
def bench(
    *,
    bundle: Path,
    grids: tuple[str, ...],
    seconds: float,
    out: Path | None,
    artifact: str,
    as_json: bool,
    **where: Any,
) -> None:
    """Report latency over a grid of sizes, beside a MatMul ceiling of the same run."""
    from mha_deploy.benchmark import bench as run
    from mha_deploy.bundle import Bundle
    from mha_deploy.staging import staged_file

    grid = dict(_grid(text) for text in grids)
    with _progress() as progress:
        report = run(
            Bundle.load(bundle),
            artifact,
            grid=grid,
            seconds=seconds,
            placement=_placement(**where),
            progress=progress,
        )
    if out:
        with staged_file(out) as staging:
            staging.write_text(json.dumps(report.to_json()) + "\n", encoding="utf-8")
    if as_json:
        _print_json(report.to_json())
        return
    from mha_deploy.render import bench_table

    bench_table(_console(), report)


@main.command()
@click.argument("bundle", type=FOLDER)
@json_option
def inspect(bundle: Path, as_json: bool) -> None:
    """Show what is in BUNDLE and where it came from."""
    from mha_deploy.bundle import Bundle

    loaded = Bundle.load(bundle)
    if as_json:
        _print_json(loaded.manifest.to_json())
        return
    from mha_deploy.render import inspect_tables

    inspect_tables(_console(), loaded)


@main.command()
@json_option
def doctor(as_json: bool) -> None:
    """Show what this machine has and what each missing piece would bring. Exit code 3 on a problem."""
    from mha_deploy.doctor import examine

    findings = examine()
    if as_json:
        _print_json([finding.to_json() for finding in findings])
    else:
        from mha_deploy.render import doctor_table

        doctor_table(_console(), findings)
    if any(finding.state == "problem" for finding in findings):
        sys.exit(3)


def _placement(device: str, threads: int, fallback: str | None) -> Placement:
    from mha_deploy.sessions import Placement

    return Placement(device, threads, fallback or "")


def _grid(text: str) -> tuple[str, list[int]]:
    name, _, sizes = text.partition("=")
    try:
        return name, [int(size) for size in sizes.split(",")]
    except ValueError as error:
        raise InputError(f"--grid {text!r}; expected a dim and its sizes, as batch=1,8") from error


def _print_json(data: object) -> None:
    click.echo(json.dumps(data, indent=1, ensure_ascii=False))


def _console() -> Any:
    """stdout at a width that holds the tables where it is no terminal."""
    from rich.console import Console

    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120
    return Console(width=width, markup=False)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A status line on stderr, where stderr is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True).status("") as status:
        yield status.update
