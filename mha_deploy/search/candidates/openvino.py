"""The canonical graph in OpenVINO, and with attention as it fuses it: fp32, and bf16 where the CPU has it.

One product for query, key and value was tried too, at d_model 384 to 1024: no faster there.
"""

from __future__ import annotations

from mha_deploy.bundle import Bundle
from mha_deploy.lowering import fusible_attention
from mha_deploy.manifest import Artifact
from mha_deploy.precision import Precision
from mha_deploy.search.candidate import Candidate, Make, Status, canonical, variant_of
from mha_deploy.search.candidates.onnx_runtime import on_the_cpu
from mha_deploy.search.rewritten import rewritten
from mha_deploy.sessions import Placement

RANK = 3
FUSIBLE = "fusible-attention"

SOURCES: dict[str, Make] = {"": canonical, f"-{FUSIBLE}": rewritten(FUSIBLE, fusible_attention)}


def _candidate(precision: Precision, suffix: str) -> Candidate:
    name = f"openvino-{precision.value}{suffix}"

    def make(bundle: Bundle, status: Status) -> Artifact:
        return variant_of(SOURCES[suffix](bundle, status), name, runtime="openvino", precision=precision)

    def lacks(bundle: Bundle, placement: Placement) -> str:
        from mha_deploy.sessions.openvino import lacks as lacks_openvino

        return on_the_cpu(bundle, placement) or lacks_openvino(precision)

    return Candidate(name, precision, make, lacks)


CANDIDATES = tuple(
    _candidate(precision, suffix) for precision in (Precision.FP32, Precision.BF16) for suffix in SOURCES
)
