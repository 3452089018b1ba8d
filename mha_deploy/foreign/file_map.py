"""The heat map of a foreign file."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from mha_deploy.bundle import Bundle
from mha_deploy.cases import Case
from mha_deploy.foreign.session import Foreign, runnable
from mha_deploy.signature import Array, Feeds
from mha_deploy.verification import CaseResult, Reference, as_inputs
from mha_deploy.verification.artifact_map import projection
from mha_deploy.verification.context_value import arrangements, expose_context
from mha_deploy.verification.heatmap import HeatMap, head_map, output_map


def map_by_head(bundle: Bundle, foreign: Foreign, result: CaseResult, case: Case) -> HeatMap:
    """Against the bundle's reference: by head where the file holds the context in its layout."""
    with (
        runnable(foreign.file, foreign.placement) as runs,
        tempfile.TemporaryDirectory() as folder,
        foreign.open(runs) as session,
    ):
        exposed = Path(folder) / "exposed.onnx"
        name = expose_context(runs, exposed, foreign.output, projection(bundle.spec))

        def answer(feeds: Feeds) -> Array:
            return session.run(as_inputs(feeds, session.signature))["y"].astype(np.float64)

        def context(feeds: Feeds) -> list[Array]:
            if not name:
                return []
            with foreign.open(exposed, output=name) as inner:
                held = inner.run(as_inputs(feeds, inner.signature))["y"].astype(np.float64)
            return list(arrangements(held, *answer(feeds).shape[:2]))

        return head_map(
            result, case, subject=bundle.spec.name, module=bundle.reference(), answer=answer, context=context
        )


def map_by_output(reference: Reference, foreign: Foreign, result: CaseResult, case: Case) -> HeatMap:
    """Against any module, whose heads are not known: by groups of output features."""
    with runnable(foreign.file, foreign.placement) as runs, foreign.open(runs) as session:

        def answer(feeds: Feeds) -> Array:
            return session.run(as_inputs(feeds, session.signature))["y"].astype(np.float64)

        return output_map(
            result,
            case,
            subject=foreign.file.path.stem,
            reference=reference,
            answer=answer,
            why="which features of a foreign module are a head's is not known",
        )
