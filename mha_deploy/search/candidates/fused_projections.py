"""Query, key and value projected by one product, where they share their input."""

from __future__ import annotations

import onnx

from mha_deploy.bundle import CANONICAL, Bundle
from mha_deploy.graph import check_graph
from mha_deploy.lowering import fuse_projections
from mha_deploy.manifest import Artifact, FileRecord
from mha_deploy.precision import Precision
from mha_deploy.search.candidate import Candidate, Status, variant_of
from mha_deploy.search.candidates.onnx_runtime import on_the_cpu
from mha_deploy.sessions import Placement
from mha_deploy.staging import staged_folder
from mha_deploy.variants import files_of, save

RANK = 1
NAME = "fused-projections"


def lacks_projections(bundle: Bundle, _placement: Placement) -> str:
    return "" if bundle.spec.kind == "self" else "query, key and value have inputs of their own"


def fused(bundle: Bundle, status: Status) -> Artifact:
    """The canonical graph with one product in place of three, in a folder of its own."""
    status("fusing the projections")
    source = bundle.artifact(CANONICAL)
    lowered = fuse_projections(onnx.load(str(source.path(bundle.folder))))
    with staged_folder(bundle.folder / "variants" / NAME) as staging:
        save(lowered.model, staging / "model.onnx")
        check_graph(staging / "model.onnx", bundle.signature)
    details = {"made_from": source.name, "lowering": [f"{s.rule} at {s.node}" for s in lowered.steps]}
    files: tuple[FileRecord, ...] = files_of(bundle.folder, f"variants/{NAME}", "model.onnx")
    return variant_of(source, NAME, files=files, details=details)


def _lacks(bundle: Bundle, placement: Placement) -> str:
    return on_the_cpu(bundle, placement) or lacks_projections(bundle, placement)


CANDIDATES = (Candidate(NAME, Precision.FP32, fused, _lacks),)
