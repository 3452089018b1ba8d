"""What an artifact's graph should be: made again from the bundle's weights, and its values in fp64."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx

from mha_deploy.bundle import Bundle
from mha_deploy.errors import CheckError
from mha_deploy.graph import write_graph
from mha_deploy.locating.double import in_double
from mha_deploy.locating.exposed import ExposedGraph, inner_values
from mha_deploy.locating.inputs import GraphInputs, is_float
from mha_deploy.lowering import lower_to_portable
from mha_deploy.manifest import Artifact
from mha_deploy.precision import Precision
from mha_deploy.sessions.reference import ReferenceSession
from mha_deploy.signature import Array
from mha_deploy.twin import write_twin
from mha_deploy.typed import Variant, write_typed

if TYPE_CHECKING:
    from mha_deploy.attention import MultiHeadAttention

# fp64 sums in another order differ by far less than this, and a fault of an exporter by far more.
SAME_IN_FP64 = 1e-9


@dataclass(frozen=True, slots=True)
class Expected:
    """`model` is the graph as it should be, `truth` its fp64 twin, `weights` the checkpoint's tensors."""

    model: onnx.ModelProto
    truth: onnx.ModelProto
    weights: dict[str, Array]
    module: MultiHeadAttention

    @classmethod
    def of(cls, bundle: Bundle, artifact: Artifact) -> Expected:
        """Export again what `artifact` was made from. What is no form of ours (int8, an optimizer's
        output) is held against the canonical graph.

        Raises:
            BundleError: the bundle's weights are not the ones recorded.
        """
        module = bundle.reference()
        weights = {name: tensor.numpy() for name, tensor in module.state_dict().items()}
        with tempfile.TemporaryDirectory() as folder:
            model, source = _written(bundle, artifact, module, Path(folder))
        return cls(model, in_double(source, weights, bundle.spec.head_dim), weights, module)

    def values(self, inputs: GraphInputs) -> dict[str, Array]:
        """Every value of the graph in fp64, by name.

        Raises:
            CheckError: the graph made again does not mean what PyTorch means: the exporter's fault.
        """
        doubles = {n: a.astype(np.float64) if is_float(a) else a for n, a in inputs.feeds.items()}
        values = ExposedGraph(self.truth, inner_values(self.truth)).run(doubles)
        self.module.path = "fused"
        with ReferenceSession(self.module, Precision.FP64) as reference:
            floats = {n: a.astype(np.float32) if is_float(a) else a for n, a in inputs.padded.items()}
            right = reference.run(floats)["y"][inputs.compared]
        error, largest = np.abs(inputs.answer(values["y"])[inputs.compared] - right), np.abs(right)
        finite = np.isfinite(right)
        if error[finite].max(initial=0.0) > SAME_IN_FP64 * largest[finite].max(initial=0.0):
            raise CheckError(
                "the graph made again from the weights differs from PyTorch in fp64: the export itself is at "
                "fault, not this file; please report it with the versions that `mha-deploy doctor` prints"
            )
        return values


def _written(
    bundle: Bundle, artifact: Artifact, module: MultiHeadAttention, folder: Path
) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """The graph that the artifact should be, and the one to take into fp64."""
    path, details = folder / "model.onnx", artifact.details
    twin_of = details.get("twin_of", "")
    typed = bundle.artifact(twin_of) if twin_of else artifact
    if "io" in typed.details:
        keep = tuple(typed.details.get("keep_fp32", ()))
        variant = Variant(typed.precision, typed.details["io"], typed.layout, keep)
        write_typed(module, variant, path)
        source = onnx.load(str(path))
        if twin_of:
            write_twin(path, folder / "twin.onnx")
            return onnx.load(str(folder / "twin.onnx")), source
        return source, source
    write_graph(module, bundle.signature, path)
    source = onnx.load(str(path))
    return (lower_to_portable(source).model if "lowering" in details else source), source
