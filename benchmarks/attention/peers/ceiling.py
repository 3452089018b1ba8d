"""The ceiling: a plain fp32 MatMul in ONNX Runtime, as large as one of the block's projections.

x [batch * seq, d_model] by a constant [d_model, d_model], for each shape with its own x.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from peers.task import Array, Model, Task

PACKAGES = ("onnxruntime", "numpy")


def build(task: Task) -> Model:
    width = task.d_model
    a, c = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["tokens", width]) for name in ("a", "c"))
    weights = np.random.default_rng(0).standard_normal((width, width), np.float32)
    product = helper.make_node("MatMul", ["a", "b"], ["c"])
    graph = helper.make_graph([product], "ceiling", [a], [c], [numpy_helper.from_array(weights, "b")])
    path = task.folder / "ceiling.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), path)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = task.threads
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def bind(x: Array, _mask: Array) -> Callable[[], Array]:
        feeds = {"a": x.reshape(-1, width)}
        return lambda: session.run(None, feeds)[0]

    return Model(bind, (f"fp32 MatMul of [tokens, {width}] by a constant [{width}, {width}]",))
