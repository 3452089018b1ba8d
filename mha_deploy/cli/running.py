"""infer: run what a bundle holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mha_deploy.cli.shared import (
    FOLDER,
    OUT,
    artifact_option,
    console,
    json_option,
    placement,
    placement_options,
    print_json,
)
from mha_deploy.errors import InputError
from mha_deploy.staging import interrupts_held


@click.command()
@click.argument("bundle", type=FOLDER)
@click.argument("inputs", type=FOLDER)
@click.option("-o", "--out", required=True, type=OUT, help="File of answers (.npz or .safetensors).")
@click.option(
    "--mask-form",
    type=click.Choice(["keep", "ignore", "additive"]),
    help="How the mask of padded inputs reads: True = keep, True = ignore, or 0 and -inf.  [default: keep]",
)
@artifact_option
@placement_options
@json_option
def infer(
    *,
    bundle: Path,
    inputs: Path,
    out: Path,
    mask_form: str | None,
    artifact: str,
    as_json: bool,
    **where: Any,
) -> None:
    """Run batched inference on INPUTS: padded arrays, or packed requests with their lengths."""
    with interrupts_held():
        from mha_deploy.bundle import Bundle
        from mha_deploy.inference import infer as run
        from mha_deploy.ragged import is_packed
        from mha_deploy.tensor_files import check_suffix, read_tensors, write_tensors

    check_suffix(out)
    home, tensors = Bundle.load(bundle), read_tensors(inputs)
    if mask_form and is_packed(tensors):
        raise InputError(
            f"--mask-form is for the mask of padded inputs; {inputs} holds packed requests, which have none"
        )
    answers = run(
        home,
        tensors,
        artifact,
        mask_form=mask_form or "keep",
        placement=placement(**where),
    )
    write_tensors(out, {"y": answers.y})
    if as_json:
        print_json({"out": str(out), "shape": list(answers.y.shape), **answers.report.to_json()})
        return
    from mha_deploy.render import infer_table

    infer_table(console(), answers.report)
    click.echo(f"answers: {out} (y {list(answers.y.shape)})")
