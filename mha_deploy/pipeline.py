"""`export`: spec and checkpoint -> a bundle whose dynamic axes are proved.

The bundle is put together in a folder beside its place and moved in at the end, so that a failed or
interrupted export leaves what was there before.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mha_deploy import machine
from mha_deploy.attention import MultiHeadAttention
from mha_deploy.axes import prove_axes, prove_sizes
from mha_deploy.bundle import CANONICAL, Bundle
from mha_deploy.errors import BundleError, FeedError
from mha_deploy.file_record import FileRecord, sha256_of
from mha_deploy.graph import OPSET, write_graph
from mha_deploy.manifest import FILE_NAME, Artifact, Manifest
from mha_deploy.onnx_files import INLINE_LIMIT
from mha_deploy.precision import Precision
from mha_deploy.ragged import unpack
from mha_deploy.signature import Feeds
from mha_deploy.spec import AttentionSpec
from mha_deploy.spec_file import load_spec
from mha_deploy.staging import locked, put_in_place, staged_folder
from mha_deploy.tensor_files import read_tensors, save_safetensors
from mha_deploy.typed import Variant
from mha_deploy.variants import typed_artifact
from mha_deploy.verification import CaseResult, Judge
from mha_deploy.weights import LoadedWeights, read_weights

WEIGHTS_FILE, GRAPH_FILE, INPUTS_FILE = "weights.safetensors", "model.onnx", "inputs.safetensors"


def export(
    spec: str | Path | AttentionSpec,
    out: str | Path,
    *,
    weights: str | Path = "",
    prefix: str = "",
    inputs: str | Path = "",
    layout: str = "padded",
    progress: Callable[[str], None] = lambda _: None,
    inline_limit: int = INLINE_LIMIT,
) -> Bundle:
    """Write the bundle of `spec` (a preset's name, a TOML file, or a spec) to the folder `out`.

    `weights` and `prefix` replace the checkpoint that the spec names; `inputs` (packed requests)
    its real inputs. Weights of more than `inline_limit` bytes go beside the graph as external data.
    Before the bundle takes its place, the graph runs over sizes that the export never saw and is
    held against PyTorch there. The layout "packed" adds an artifact of that name, whose graph takes
    the real tokens of many requests end to end (see `packed`); it passes the same proof.

    Raises:
        InputError: the spec, the checkpoint or the inputs cannot be used, or `out` not be written.
        SpecError: the block has a full mask, and the packed layout is asked for.
        FrozenAxisError: the graph does not follow one of its dynamic axes.
        CheckError: the graph computes something else than PyTorch.
    """
    block, out = load_spec(spec), Path(out)
    form = Variant(Precision.FP32, layout=layout)
    form.signature(block)  # refuse now a block that has no such layout
    if out.is_symlink():
        out = out.resolve()  # the folder it names is replaced, not the link
    if weights:
        block = block.with_weights(weights, prefix)
    if inputs:
        block = replace(block, inputs_file=str(inputs))
    _refuse_foreign(out)
    progress("reading weights")
    loaded = read_weights(block)
    module = MultiHeadAttention(block)
    module.load_state_dict(loaded.tensors)
    with staged_folder(out, _put_in_place) as staging:
        arrays = {name: tensor.numpy() for name, tensor in loaded.tensors.items()}
        save_safetensors(staging / WEIGHTS_FILE, arrays)
        manifest = Manifest(
            spec=_portable(block),
            weights=FileRecord.of(staging, WEIGHTS_FILE),
            artifacts=(),
            provenance=_provenance(block, loaded),
            inputs=_copy_inputs(block, staging),
        )
        progress("exporting the graph")
        write_graph(module, block.signature, staging / GRAPH_FILE, inline_limit)
        canonical = _canonical(block, staging)
        bundle = Bundle(staging, replace(manifest, artifacts=(canonical,)))
        with bundle.open_session(CANONICAL) as session:
            proof = prove_axes(staging / GRAPH_FILE, session, block, Judge(module), progress)
        proved = {
            **canonical.details,
            "axes_proved_at": [result.name for result in proof],
            "axes_not_reached": _not_reached(block, proof),
        }
        replace(manifest, artifacts=(replace(canonical, details=proved),)).write(staging)
        if layout == "packed":
            _add_packed(Bundle.load(staging), form, Judge(module), progress, inline_limit)
    return Bundle.load(out)


def _put_in_place(staging: Path, out: Path) -> None:
    """Not while something is recorded in the bundle that goes: it would end up in this one."""
    with locked(out) if out.is_dir() else contextlib.nullcontext():
        put_in_place(staging, out)


def _add_packed(
    bundle: Bundle, form: Variant, judge: Judge, progress: Callable[[str], None], inline_limit: int
) -> None:
    artifact = typed_artifact(bundle, form, progress, inline_limit)
    with bundle.open_padded_session(artifact.name) as session:
        proof = prove_sizes(session, bundle.spec, judge, progress)
    details = {**artifact.details, "axes_proved_at": [result.name for result in proof]}
    bundle.record(replace(artifact, details=details))


def _not_reached(block: AttentionSpec, proof: list[CaseResult]) -> list[str]:
    """Maxima that memory did not hold, and how far the proof went."""
    reached = {dim.name: max(result.sizes[dim.name] for result in proof) for dim in block.dims}
    return [
        f"{dim.name} up to {reached[dim.name]} of {dim.max}"
        for dim in block.dims
        if reached[dim.name] < dim.max
    ]


def _refuse_foreign(out: Path) -> None:
    """Never replace a folder that holds something else than a bundle."""
    here = Path.cwd()
    if out.resolve() in (here, *here.parents):
        raise BundleError(
            f"{str(out)!r} is the current folder or holds it, and a bundle's folder is replaced as a "
            "whole; give the name of a folder in it"
        )
    if out.is_dir() and any(out.iterdir()) and not (out / FILE_NAME).is_file():
        raise BundleError(f"{out} exists and is not a bundle; give a new folder, or empty this one")
    if out.exists() and not out.is_dir():
        raise BundleError(f"{out} is a file; expected a folder to write the bundle to")


def _portable(block: AttentionSpec) -> AttentionSpec:
    """The spec as the manifest keeps it: file names without the folders of the machine it ran on."""
    source = replace(block.weights, file=Path(block.weights.file).name)
    return replace(block, weights=source, inputs_file=Path(block.inputs_file).name)


def _copy_inputs(block: AttentionSpec, staging: Path) -> tuple[FileRecord, ...]:
    if not block.inputs_file:
        return ()
    tensors = read_tensors(Path(block.inputs_file))
    _refuse_unusable(block, tensors)
    save_safetensors(staging / INPUTS_FILE, tensors)
    return (FileRecord.of(staging, INPUTS_FILE),)


def _refuse_unusable(block: AttentionSpec, tensors: Feeds) -> None:
    """Refuse now what verify could not use later: no artifact could pass on it."""
    for number, request in enumerate(unpack(block, tensors)):
        for name, array in request.tensors.items():
            with np.errstate(over="ignore"):  # what fp32 cannot hold is infinite there
                finite = np.isfinite(array.astype(np.float32))
            if not finite.all():
                raise FeedError(
                    f"inputs {block.inputs_file}: {name!r} of request {number} holds NaN, inf or what fp32 "
                    "cannot hold; a bundle carries real inputs to be verified on, so leave that request out"
                )


def _canonical(block: AttentionSpec, staging: Path) -> Artifact:
    files = [GRAPH_FILE, *(file.name for file in staging.glob(f"{GRAPH_FILE}.*"))]
    return Artifact(
        name=CANONICAL,
        runtime="onnxruntime",
        precision=Precision.FP32,
        signature=block.signature,
        files=tuple(FileRecord.of(staging, file) for file in files),
        details={"opset": OPSET, "made_from": WEIGHTS_FILE},
    )


def _provenance(block: AttentionSpec, loaded: LoadedWeights) -> dict[str, Any]:
    file = block.weights.file
    return {
        "mha_deploy": machine.version("mha-deploy"),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "checkpoint": {
            "file": Path(file).name,
            "sha256": sha256_of(Path(file)) if file else "",
            "prefix": block.weights.prefix,
            "layout": loaded.layout,
            "stored_dtype": loaded.stored_dtype,
        },
        "machine": machine.describe(),
    }
