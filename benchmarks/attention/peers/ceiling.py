"""The ceiling: a plain fp32 MatMul of `mha-deploy bench`'s size in ONNX Runtime; inputs do not matter."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper
from peers.task import Array, Model, Task

from mha_deploy.benchmark.ceilings_cpu import MATMUL

PACKAGES = ("onnxruntime", "numpy")


def build(task: Task) -> Model:
    rows, inner, columns = MATMUL["rows"], MATMUL["inner"], MATMUL["columns"]
    shapes = {"a": [rows, inner], "b": [inner, columns], "c": [rows, columns]}
    a, b, c = (helper.make_tensor_value_info(name, TensorProto.FLOAT, s) for name, s in shapes.items())
    graph = helper.make_graph([helper.make_node("MatMul", ["a", "b"], ["c"])], "ceiling", [a, b], [c])
    path = task.folder / "ceiling.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), path)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = task.threads
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    random = np.random.default_rng(0)
    feeds = {name: random.standard_normal(shapes[name], np.float32) for name in ("a", "b")}

    def bind(_x: Array, _mask: Array) -> Callable[[], Array]:
        return lambda: session.run(None, feeds)[0]

    flops = 2 * rows * inner * columns
    return Model(bind, (f"fp32 MatMul {rows} x {inner} x {columns}, {flops} FLOPs",))
