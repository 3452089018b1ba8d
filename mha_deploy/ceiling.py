"""A plain MatMul in the same runtime with the same threads: what this machine can do right now."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from mha_deploy.sessions import Placement, Session
from mha_deploy.sessions.onnx_runtime import OnnxRuntimeSession
from mha_deploy.signature import Dim, Signature, TensorSpec

SIZES = {"rows": 1024, "inner": 1024, "columns": 1024}
FLOPS = 2 * math.prod(SIZES.values())


@contextlib.contextmanager
def ceiling_session(placement: Placement) -> Iterator[Session]:
    """A session over a [rows, inner] x [inner, columns] product in fp32."""
    dims = tuple(Dim(name, size, size, size) for name, size in SIZES.items())
    a, b = TensorSpec("a", "float32", ("rows", "inner")), TensorSpec("b", "float32", ("inner", "columns"))
    signature = Signature((a, b), (TensorSpec("c", "float32", ("rows", "columns")),), dims)
    values = {
        tensor.name: helper.make_tensor_value_info(
            tensor.name, TensorProto.FLOAT, signature.shape(tensor, SIZES)
        )
        for tensor in (*signature.inputs, *signature.outputs)
    }
    node = helper.make_node("MatMul", ["a", "b"], ["c"])
    graph = helper.make_graph([node], "ceiling", [values["a"], values["b"]], [values["c"]])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "matmul.onnx"
        onnx.save(model, str(path))
        with OnnxRuntimeSession(path, signature, name="ceiling", placement=placement) as session:
            yield session
