"""The same graphs in OpenVINO: fp32, and bf16 where the CPU computes in it."""

from __future__ import annotations

from mha_deploy.bundle import Bundle
from mha_deploy.manifest import Artifact
from mha_deploy.precision import Precision
from mha_deploy.search.candidate import Candidate, Make, Status, canonical, variant_of
from mha_deploy.search.candidates.fused_projections import fused, lacks_projections
from mha_deploy.search.candidates.onnx_runtime import on_the_cpu
from mha_deploy.sessions import Placement

RANK = 3


def _candidate(precision: Precision, source: Make, suffix: str) -> Candidate:
    name = f"openvino-{precision.value}{suffix}"

    def make(bundle: Bundle, status: Status) -> Artifact:
        return variant_of(source(bundle, status), name, runtime="openvino", precision=precision)

    def lacks(bundle: Bundle, placement: Placement) -> str:
        from mha_deploy.sessions.openvino import lacks as lacks_openvino

        here = on_the_cpu(bundle, placement) or lacks_openvino(precision)
        return here or (lacks_projections(bundle, placement) if suffix else "")

    return Candidate(name, precision, make, lacks)


CANDIDATES = tuple(
    _candidate(precision, source, suffix)
    for precision in (Precision.FP32, Precision.BF16)
    for source, suffix in ((canonical, ""), (fused, "-fused-projections"))
)
