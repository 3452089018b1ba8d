"""Small blocks as exported, and their answers before and after a rewrite."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import onnx

from mha_deploy.attention import MultiHeadAttention
from mha_deploy.graph import write_graph
from mha_deploy.onnx_files import check_graph
from mha_deploy.sessions import Placement
from mha_deploy.sessions.onnx_runtime import OnnxRuntimeSession

BLOCKS = {
    "as the demo's": {},
    "fewer key/value heads": {"num_kv_heads": 2},
    "without bias": {"bias": ()},
    "bias at query and value": {"bias": ("query", "value")},
    "causal, norm before": {"causal": True, "norm": "pre"},
    "full mask": {"mask": "full"},
    "no mask": {"mask": "none"},
}


def exported(folder, spec):
    """The model of a block, in `folder` too. An export takes seconds, so each is made once."""
    path = folder / "model.onnx"
    path.write_bytes(_made(spec))
    return onnx.load(str(path))


@cache
def _made(spec):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        write_graph(MultiHeadAttention(spec), spec.signature, path)
        assert list(path.parent.iterdir()) == [path]  # no weights beside it
        return path.read_bytes()


def answers(path, spec, feeds):
    with OnnxRuntimeSession(path, spec.signature, placement=Placement(threads=1)) as session:
        return session.run(feeds)["y"]


def drawn(spec, random, sizes):
    return {
        tensor.name: random.standard_normal(spec.signature.shape(tensor, sizes), np.float32)
        if tensor.is_float
        else random.random(spec.signature.shape(tensor, sizes)) < 0.8
        for tensor in spec.signature.inputs
    }


def rewritten_answers(lowering, folder, spec, feeds):
    """The graph's answers, and those of what `lowering` made of it."""
    lowered = lowering(exported(folder, spec)).model
    onnx.save(lowered, folder / "lowered.onnx")
    check_graph(folder / "lowered.onnx", spec.signature)
    return [answers(folder / f"{each}.onnx", spec, feeds) for each in ("model", "lowered")]
