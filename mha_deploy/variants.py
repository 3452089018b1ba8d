"""Other ONNX forms of a bundle's block, each checked against PyTorch before it joins the bundle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx

from mha_deploy.bundle import CANONICAL, Bundle, on_one_export
from mha_deploy.cases import QUICK, standard_cases
from mha_deploy.errors import BundleError, CheckError
from mha_deploy.lowering import Lowered, lower_to_portable
from mha_deploy.manifest import Artifact
from mha_deploy.onnx_files import INLINE_LIMIT, check_graph, files_of, save
from mha_deploy.precision import Precision
from mha_deploy.sessions import Session
from mha_deploy.sessions.onnx_runtime import OnnxRuntimeSession
from mha_deploy.sessions.packed import PackedSession, PaddedView
from mha_deploy.twin import write_twin
from mha_deploy.typed import Variant, kept_in_fp32, write_typed
from mha_deploy.variant_files import staged_variant
from mha_deploy.verification import FAILED, OUT_OF_RANGE, Judge
from mha_deploy.verification.beyond_range import judged_beyond_range

PORTABLE = "portable"
Status = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Checked:
    """A graph held against PyTorch: how many cases passed, and through what."""

    cases: int
    out_of_range: int
    through: str

    def __str__(self) -> str:
        beyond = f", {self.out_of_range} out of range" if self.out_of_range else ""
        return f"{self.cases} cases against PyTorch{beyond}, {self.through}"


@on_one_export
def typed_artifact(
    bundle: Bundle,
    variant: Variant,
    status: Status = lambda _: None,
    inline_limit: int = INLINE_LIMIT,
) -> Artifact:
    """The bundle's ONNX in this precision and layout; made, checked and recorded where it is not there yet.

    Raises:
        BundleError: the bundle was exported again meanwhile.
        CheckError: it does not pass its own precision's yardstick.
        InputError: a node to keep in fp32 is not in it.
    """
    if variant.precision is Precision.FP32 and variant.layout == "padded":
        return bundle.artifact(CANONICAL)
    keep = list(variant.keep_fp32)
    present = _present(bundle, variant.name, keep)
    if present:
        return present
    status(f"exporting {variant.name}")
    with staged_variant(bundle, variant.name) as staged:
        path = staged.path / "model.onnx"
        write_typed(bundle.reference(), variant, path, inline_limit)
        status(f"checking {variant.name} against PyTorch")
        checked = check_numerically(bundle, variant, path)
        details: dict[str, Any] = {"io": variant.io, "checked": str(checked)}
        if variant.precision is not Precision.FP32:
            details["kept_fp32"] = kept_in_fp32(path)
        if keep:
            details["keep_fp32"] = keep
        if variant.precision is Precision.BF16:
            write_twin(path, staged.path / "twin.onnx")
    return _record(bundle, variant, staged.folder, details)


def _present(bundle: Bundle, name: str, keep: list[str]) -> Artifact | None:
    """What is recorded under that name, if its files are, and its twin's, still what was recorded."""
    bundle.refresh()  # another process may have made it
    found = [a for a in bundle.artifacts if name in (a.name, a.details.get("twin_of"))]
    try:
        for artifact in found:
            artifact.path(bundle.folder)
    except BundleError:
        return None
    return next((a for a in found if a.name == name and a.details.get("keep_fp32", []) == keep), None)


def _record(bundle: Bundle, variant: Variant, folder: str, details: Mapping[str, Any]) -> Artifact:
    artifact = Artifact(
        name=variant.name,
        runtime="onnxruntime",
        precision=variant.precision,
        signature=variant.signature(bundle.spec),
        files=files_of(bundle.folder, folder, "model.onnx"),
        details=details,
        layout=variant.layout,
    )
    if variant.precision is not Precision.BF16:
        bundle.record(artifact)
        return artifact
    twin = Artifact(
        name=f"{variant.name}-twin",
        runtime="onnxruntime",
        precision=variant.precision,
        signature=replace(variant, io="fp32").signature(bundle.spec),
        files=files_of(bundle.folder, folder, "twin.onnx"),
        details={"twin_of": variant.name, "computes_in": "fp32, every value rounded to bf16"},
        layout=variant.layout,
    )
    bundle.record(artifact, twin)
    return artifact


def check_numerically(bundle: Bundle, variant: Variant, path: Path) -> Checked:
    """Hold the ONNX file at `path` against PyTorch at the variant's precision, in ONNX Runtime.

    bf16 goes through its fp32 twin. The largest sizes are left to `verify`.

    Raises:
        BundleError: the bundle's real inputs hold NaN or inf.
        CheckError: a case fails.
    """
    signature, through = variant.signature(bundle.spec), "in ONNX Runtime"
    runs = path
    if variant.precision is Precision.BF16:
        runs = path.with_name("check-twin.onnx")
        write_twin(path, runs)
        signature = replace(variant, io="fp32").signature(bundle.spec)
        through = "in ONNX Runtime through its fp32 twin"
    judge = Judge(bundle.reference())
    cases = standard_cases(bundle.spec, bundle.finite_inputs(), names=QUICK)
    opened: Session = OnnxRuntimeSession(runs, signature, name=variant.name, precision=variant.precision)
    if variant.layout == "packed":
        opened = PaddedView(PackedSession(opened, bundle.spec))
    with opened as session:
        judged = judged_beyond_range if variant.keep_fp32 else Judge.__call__
        results = [judged(judge, session, variant.name, case) for case in cases]
    if runs != path:
        runs.unlink()
    failed = [result for result in results if result.outcome == FAILED]
    if failed:
        worst = failed[0]
        raise CheckError(
            f"{variant.name} does not compute what PyTorch computes: {', '.join(r.name for r in failed)} "
            f"failed; {worst.name} has error {worst.max_abs_error:.3g}, allowed {worst.allowed:.3g}; "
            f"feature {worst.by_feature.feature} rms error {worst.by_feature.error:.3g}, "
            f"allowed {worst.by_feature.allowed:.3g}"
        )
    beyond = sum(r.outcome == OUT_OF_RANGE for r in results)
    return Checked(len(results) - beyond, beyond, through)


@on_one_export
def portable_artifact(bundle: Bundle, status: Status = lambda _: None) -> tuple[Artifact, Lowered]:
    """The block at opset 20 without an Attention operator, for runtimes that lack it.

    Raises:
        BundleError: the bundle was exported again meanwhile.
        CheckError: it does not compute what PyTorch computes.
    """
    status("lowering to the portable form")
    source = bundle.artifact(CANONICAL)
    lowered = lower_to_portable(onnx.load(str(source.path(bundle.folder))))
    with staged_variant(bundle, PORTABLE) as staged:
        path = staged.path / "model.onnx"
        save(lowered.model, path)
        check_graph(path, bundle.signature)
        status("checking it against PyTorch")
        checked = check_numerically(bundle, Variant(Precision.FP32), path)
    artifact = Artifact(
        name=PORTABLE,
        runtime="onnxruntime",
        precision=Precision.FP32,
        signature=bundle.signature,
        files=files_of(bundle.folder, staged.folder, "model.onnx"),
        details={
            "opset": 20,
            "made_from": source.name,
            "lowering": [f"{step.rule} at {step.node}" for step in lowered.steps],
            "checked": str(checked),
        },
    )
    bundle.record(artifact)
    return artifact, lowered
