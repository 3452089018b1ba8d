"""TensorRT engines, built on the GPU that they run on."""

from __future__ import annotations

from mha_deploy.bundle import Bundle
from mha_deploy.errors import MissingError
from mha_deploy.manifest import Artifact
from mha_deploy.precision import Precision
from mha_deploy.search.candidate import Candidate, Status
from mha_deploy.sessions import Placement
from mha_deploy.tensorrt.backend import has_cuda_driver, load_backend

RANK = 6


def _candidate(precision: Precision) -> Candidate:
    def make(bundle: Bundle, status: Status) -> Artifact:
        from mha_deploy.engines import build_engine  # loads PyTorch
        from mha_deploy.typed import Variant

        engine = build_engine(bundle, Variant(precision), status=status)
        return bundle.artifact(engine.name)

    return Candidate(f"tensorrt-{precision.value}", precision, make, _lacks)


def _lacks(_bundle: Bundle, placement: Placement) -> str:
    if placement.device != "cuda":
        return "runs on a GPU: ask for it with --device cuda"
    if not has_cuda_driver():
        return "no NVIDIA driver with a GPU answers here"
    try:
        load_backend()
    except MissingError as error:
        return str(error)
    return ""


CANDIDATES = tuple(_candidate(each) for each in (Precision.FP32, Precision.FP16, Precision.BF16))
