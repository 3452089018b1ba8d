"""Who takes part: a name, a module of `peers/`, the environment that it is installed in, its role."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "peers"
PEER, OURS, REDUCED, RAGGED, CEILING = "peer", "ours", "ours, reduced", "ours, ragged", "ceiling"
# Largest relative error (Frobenius) against float64. fp32 comes out near 5e-7, bf16 near 5e-3.
ALLOWED = {PEER: 1e-5, OURS: 1e-5, RAGGED: 1e-5, REDUCED: 3e-2}


@dataclass(frozen=True, slots=True)
class Contestant:
    """`requirements` names the environment: those with one file share it."""

    name: str
    module: Path
    requirements: Path
    role: str = PEER
    options: Mapping[str, Any] = field(default_factory=dict)

    def takes(self, *, ragged: bool) -> bool:
        """The packed layout is for ragged batches; all else runs everywhere."""
        return ragged or self.role != RAGGED


def _peer(name: str, module: str, environment: str, role: str = PEER, **options: Any) -> Contestant:
    return Contestant(name, FOLDER / f"{module}.py", FOLDER / f"{environment}.txt", role, options)


ROSTER = (
    _peer("mha-deploy", "mha_deploy", "mha_deploy", OURS, precision="fp32", layout="padded", optimize=[]),
    _peer(
        "mha-deploy reduced",
        "mha_deploy",
        "mha_deploy",
        REDUCED,
        precision="reduced",
        layout="padded",
        optimize=["--allow", "bf16,fp16,int8"],
    ),
    _peer("mha-deploy packed", "mha_deploy", "mha_deploy", RAGGED, precision="fp32", layout="packed"),
    _peer("torch eager", "torch_eager", "torch"),
    _peer("torch.compile", "torch_compile", "torch"),
    _peer("torch.onnx.export", "onnx_export", "onnx_export"),
    _peer("optimize_for_ort", "optimize_for_ort", "optimize_for_ort"),
    _peer("onnxruntime.transformers", "ort_transformers", "ort_transformers"),
    _peer("Optimum-ONNX", "optimum", "optimum"),
    _peer("OpenVINO", "openvino", "openvino"),
    _peer("MatMul ceiling", "ceiling", "mha_deploy", CEILING),
)
