"""Candidates that are the canonical graph, rewritten for speed."""

from __future__ import annotations

from collections.abc import Callable

import onnx

from mha_deploy.bundle import CANONICAL, Bundle
from mha_deploy.errors import MissingError
from mha_deploy.lowering import Lowered
from mha_deploy.manifest import Artifact
from mha_deploy.onnx_files import check_graph, files_of, save
from mha_deploy.search.candidate import Make, Status, variant_of
from mha_deploy.variant_files import staged_variant


def rewritten(name: str, lowering: Callable[[onnx.ModelProto], Lowered]) -> Make:
    """Makes the artifact `name`: the canonical graph after `lowering`, in a folder of its own.

    Made, it raises MissingError where `lowering` has nothing to rewrite in this block.
    """

    def make(bundle: Bundle, status: Status) -> Artifact:
        status(f"rewriting the graph as {name}")
        source = bundle.artifact(CANONICAL)
        lowered = lowering(onnx.load(str(source.path(bundle.folder))))
        if not lowered.steps:
            raise MissingError("this block's graph has nothing that it rewrites")
        with staged_variant(bundle, name) as staged:
            save(lowered.model, staged.path / "model.onnx")
            check_graph(staged.path / "model.onnx", bundle.signature)
        details = {"made_from": source.name, "lowering": [f"{s.rule} at {s.node}" for s in lowered.steps]}
        files = files_of(bundle.folder, staged.folder, "model.onnx")
        return variant_of(source, name, files=files, details=details)

    return make
