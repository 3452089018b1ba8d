"""Ranges of activations on real inputs."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from mha_deploy.onnx_files import save
from mha_deploy.sessions import Placement
from mha_deploy.sessions.onnx_runtime import open_inference_session
from mha_deploy.signature import Array, Feeds


@dataclass(frozen=True, slots=True)
class Ranges:
    """Smallest and largest value of each feature, [features] each, 0 among them."""

    low: Array
    high: Array

    @property
    def largest(self) -> Array:
        return np.maximum(-self.low, self.high)

    def divided(self, factors: Array) -> Ranges:
        return Ranges(self.low / factors, self.high / factors)


def observe(
    model: onnx.ModelProto, activations: Sequence[str], batches: Sequence[Feeds], placement: Placement
) -> dict[str, Ranges]:
    """Run `model` on `batches` and give the range of each of `activations` [..., features].

    Padded positions count as well: the graph quantises them like any other.
    """
    names = list(dict.fromkeys(activations))
    exposed = onnx.ModelProto()
    exposed.CopyFrom(model)
    present = {value.name for value in (*model.graph.input, *model.graph.output)}
    for name in names:
        if name not in present:
            exposed.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    made = {name: list[Array]() for name in names}
    fed = set(names) & {value.name for value in model.graph.input}
    inner = [name for name in names if name not in fed]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "exposed.onnx"
        save(exposed, path)
        session = open_inference_session(path, placement)
        for feeds in batches:
            answers = dict(zip(inner, session.run(inner, dict(feeds)), strict=True))
            for name in names:
                array = feeds[name] if name in fed else answers[name]
                made[name].append(array.reshape(-1, array.shape[-1]))
    return {name: _ranges(np.concatenate(arrays)) for name, arrays in made.items()}


def _ranges(rows: Array) -> Ranges:
    return Ranges(np.minimum(rows.min(axis=0), 0), np.maximum(rows.max(axis=0), 0))
