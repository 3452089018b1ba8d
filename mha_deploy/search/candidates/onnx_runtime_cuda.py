"""ONNX Runtime on an NVIDIA GPU: the canonical graph, and its typed forms."""

from __future__ import annotations

from mha_deploy.bundle import Bundle
from mha_deploy.manifest import Artifact
from mha_deploy.precision import Precision
from mha_deploy.search.candidate import Candidate, Status, variant_of
from mha_deploy.sessions import Placement

RANK = 5


def _candidate(precision: Precision) -> Candidate:
    name = f"cuda-{precision.value}"

    def make(bundle: Bundle, status: Status) -> Artifact:
        # Loads PyTorch, which a search without a GPU, or one that resumes, can do without.
        from mha_deploy.typed import Variant
        from mha_deploy.variants import typed_artifact

        source = typed_artifact(bundle, Variant(precision), status)
        details = {"made_from": source.name, "settings": {"device": "cuda"}}
        return variant_of(source, name, details=details)

    return Candidate(name, precision, make, _lacks)


def _lacks(_bundle: Bundle, placement: Placement) -> str:
    from mha_deploy.sessions.onnx_runtime import cuda_lacks

    if placement.device != "cuda":
        return "runs on a GPU: ask for it with --device cuda"
    return cuda_lacks()


CANDIDATES = tuple(_candidate(each) for each in (Precision.FP32, Precision.FP16, Precision.BF16))
