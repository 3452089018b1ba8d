"""The heat map of one artifact of a bundle."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from mha_deploy.bundle import Bundle
from mha_deploy.cases import Case
from mha_deploy.sessions import Placement
from mha_deploy.sessions.onnx_runtime import open_inference_session
from mha_deploy.signature import Array, Feeds
from mha_deploy.spec import AttentionSpec
from mha_deploy.verification.context_value import arrangements, expose_context
from mha_deploy.verification.heatmap import HeatMap, head_map
from mha_deploy.verification.judge import as_inputs
from mha_deploy.verification.report import CaseResult


def artifact_map(bundle: Bundle, placement: Placement, result: CaseResult, case: Case) -> HeatMap:
    """The error of `result`'s artifact on `case` by head, or by output features where it hides heads.

    Raises: as `Bundle.open_padded_session`.
    """
    artifact = bundle.artifact(result.artifact)
    with (
        tempfile.TemporaryDirectory() as folder,
        bundle.open_padded_session(artifact.name, replace(placement, poison=True)) as session,
    ):
        exposed, name = Path(folder) / "exposed.onnx", ""
        if artifact.runtime == "onnxruntime" and artifact.layout == "padded":
            source = artifact.path(bundle.folder)
            name = expose_context(
                source, exposed, artifact.signature.outputs[0].name, projection(bundle.spec)
            )

        def answer(feeds: Feeds) -> Array:
            return session.run(as_inputs(feeds, session.signature))["y"].astype(np.float64)

        def context(feeds: Feeds) -> list[Array]:
            if not name:
                return []
            inner = open_inference_session(exposed, placement)
            value = inner.run([name], as_inputs(feeds, artifact.signature))[0].astype(np.float64)
            return list(arrangements(value, *answer(feeds).shape[:2]))

        return head_map(
            result, case, subject=bundle.spec.name, module=bundle.reference(), answer=answer, context=context
        )


def projection(spec: AttentionSpec) -> tuple[int, int]:
    """The sizes of the output projection: heads x value_dim, d_model."""
    return spec.num_heads * spec.value_dim, spec.d_model
