"""The int8 form of a bundle's block, kept only where it passes."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mha_deploy.bundle import CANONICAL, Bundle, on_one_export
from mha_deploy.file_record import FileRecord
from mha_deploy.manifest import Artifact, Manifest
from mha_deploy.onnx_files import files_of
from mha_deploy.pipeline import INPUTS_FILE
from mha_deploy.precision import Precision
from mha_deploy.quantization.candidate import INT8, SCALES
from mha_deploy.quantization.evidence import split
from mha_deploy.quantization.report import QuantizationReport
from mha_deploy.quantization.search import Wanted, search
from mha_deploy.ragged import Request, packed
from mha_deploy.tensor_files import write_tensors
from mha_deploy.variant_files import staged_variant


@on_one_export
def quantize(
    bundle: Bundle,
    wanted: Wanted,
    requests: Sequence[Request] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> QuantizationReport:
    """Search for an int8 form within the budget and keep it as the bundle's artifact `int8`.

    It is calibrated on every other one of `requests` (the bundle's own real inputs where none are
    given) and judged on the rest; what passes there is also held to `verify`'s cases. Where none
    passes, the bundle stays as it is and the report names the nearest. A bundle without real inputs of
    its own keeps those given, so that `verify` has something to judge the artifact on.

    Raises:
        BundleError: the bundle was exported again meanwhile.
        InputError: no real requests to judge on, or something in `wanted` that the block has not.
        MissingError: onnxruntime is not installed.
    """
    own = not requests
    chosen = list(requests) or bundle.finite_inputs()
    split(chosen)
    with tempfile.TemporaryDirectory() as folder:
        report, path = search(bundle, chosen, wanted, Path(folder), progress)
        report = replace(report, inputs="the bundle" if own else "the inputs given")
        if not report.passed:
            return report
        with staged_variant(bundle, INT8) as staged:
            for file in path.parent.iterdir():  # the graph and its external data
                shutil.copy(file, staged.path / file.name)
    artifact = Artifact(
        name=INT8,
        runtime="onnxruntime",
        precision=Precision.INT8,
        signature=bundle.signature,
        files=files_of(bundle.folder, staged.folder, path.name),
        details=_details(report),
    )
    bundle.record(artifact)
    if not own:
        _adopt(bundle, chosen)
    return replace(report, artifact=INT8)


def _adopt(bundle: Bundle, requests: Sequence[Request]) -> None:
    """Make `requests` the bundle's real inputs, where it has none."""

    def adopted(manifest: Manifest) -> Manifest:
        if manifest.inputs:
            return manifest
        write_tensors(bundle.folder / INPUTS_FILE, packed(manifest.spec, requests))
        return replace(
            manifest,
            spec=replace(manifest.spec, inputs_file=INPUTS_FILE),
            inputs=(FileRecord.of(bundle.folder, INPUTS_FILE),),
        )

    bundle.change(adopted)


def _details(report: QuantizationReport) -> dict[str, Any]:
    kept = report.tried[-1]
    return {
        "made_from": CANONICAL,
        "scheme": kept.candidate.scheme,
        "scales": SCALES[kept.candidate.scheme],
        "max_relative_error": report.max_relative_error,
        "held_out_error": kept.errors.relative,
        "batch_dependent": kept.batch_dependent,
        "batch_drift": kept.batch_drift,
        "smoothing_alphas": dict(kept.alphas),
        "kept_fp32": list(kept.kept_fp32),
        "calibration": f"{report.calibration_requests} requests from {report.inputs}, "
        f"judged on {report.held_out_requests} others",
    }
