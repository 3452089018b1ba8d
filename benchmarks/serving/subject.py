"""The block that every system serves."""

from __future__ import annotations

import shutil
from pathlib import Path

from mha_deploy.bundle import Bundle
from mha_deploy.pipeline import export
from mha_deploy.precision import Precision
from mha_deploy.search import optimize
from mha_deploy.search.candidates import all_candidates
from mha_deploy.signature import Dim
from mha_deploy.spec import AttentionSpec

FOLDER = Path(__file__).parents[2] / "build" / "serving-benchmark"
SPEC = AttentionSpec(
    d_model=768,
    num_heads=12,
    dims=(Dim("batch", 1, 8, 32), Dim("seq", 1, 27, 160)),
    name="serving-benchmark",
)


def exported() -> Bundle:
    """Its bundle in both layouts, exported anew: one that lies there holds a calibration of another hour,
    with other neighbours. Random weights do for a speed."""
    return export(SPEC, FOLDER, layout="packed")


def in_bf16(bundle: Bundle) -> Bundle:
    """A copy of it whose chosen engine is the fastest in bf16 that passes.

    Raises:
        MissingError: nothing here computes in bf16.
        CheckError: none that does passes.
    """
    folder = FOLDER.with_name(f"{FOLDER.name}-bf16")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(bundle.folder, folder)
    candidates = [each for each in all_candidates() if each.precision is Precision.BF16]
    optimize(Bundle.load(folder), allow=[Precision.BF16], candidates=candidates)
    return Bundle.load(folder)
