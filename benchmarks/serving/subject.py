"""The block that every system serves."""

from __future__ import annotations

from pathlib import Path

from mha_deploy.bundle import Bundle
from mha_deploy.pipeline import export
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
