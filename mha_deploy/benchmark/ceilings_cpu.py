"""The ceilings of a CPU, in ONNX Runtime with the threads that the block has."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from mha_deploy import machine
from mha_deploy.benchmark.ceilings import CACHE, COMPUTE, MEMORY, OVERHEAD, SHARE, STREAMS, Yardsticks
from mha_deploy.benchmark.rounds import Turn
from mha_deploy.benchmark.turns import random_feeds, session_turn
from mha_deploy.cases import describe
from mha_deploy.sessions import Placement, Session
from mha_deploy.sessions.onnx_runtime import OnnxRuntimeSession
from mha_deploy.signature import Dim, Signature, Sizes, TensorSpec

# Large enough for full speed, and over before a neighbour is likely to cut in.
MATMUL = {"rows": 512, "inner": 512, "columns": 512}
# In the cache of every machine that this runs on, and long enough to outweigh the start of its threads.
CACHED_BYTES = 2**20
# Of one array in memory: four times the last-level cache within these bounds, as STREAM asks.
SMALLEST_BYTES, LARGEST_BYTES = 2**26, 2**28


@contextlib.contextmanager
def cpu_yardsticks(placement: Placement) -> Iterator[Yardsticks]:
    """The four turns where `placement` says, in fp32."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cache_bytes = machine.last_level_cache_bytes()
        streamed = min(max(4 * cache_bytes, SMALLEST_BYTES), LARGEST_BYTES)
        graphs: dict[str, tuple[str, Sizes]] = {
            COMPUTE: ("MatMul", MATMUL),
            MEMORY: ("Mul", {"size": streamed // 4}),
            CACHE: ("Mul", {"size": CACHED_BYTES // 4}),
            OVERHEAD: ("Mul", {"size": 1}),
        }
        turns = []
        for name, (operator, sizes) in graphs.items():
            opened = stack.enter_context(_session(folder / f"{name}.onnx", operator, sizes, placement))
            turns.append(session_turn(name, opened, [random_feeds(opened.signature, sizes)], share=SHARE))
        threads = placement.threads or machine.usable_cpus()
        yield Yardsticks(
            tuple(turns),
            2 * math.prod(MATMUL.values()),
            STREAMS * streamed,
            STREAMS * CACHED_BYTES,
            cache_bytes,
            f"fp32 MatMul {describe(MATMUL)}, {opened.provider}, {threads} threads",
        )


@contextlib.contextmanager
def cpu_matmul(placement: Placement) -> Iterator[tuple[Turn, int]]:
    """The compute ceiling alone, as a turn, and the floating-point operations of one run."""
    with (
        tempfile.TemporaryDirectory() as folder,
        _session(Path(folder) / "matmul.onnx", "MatMul", MATMUL, placement) as session,
    ):
        feeds = [random_feeds(session.signature, MATMUL)]
        yield session_turn(COMPUTE, session, feeds, share=SHARE), 2 * math.prod(MATMUL.values())


def _session(path: Path, operator: str, sizes: Sizes, placement: Placement) -> Session:
    """One node: a [rows, inner] x [inner, columns] product, or a vector times a number."""
    axes: dict[str, tuple[str | int, ...]] = (
        {"a": ("rows", "inner"), "b": ("inner", "columns"), "c": ("rows", "columns")}
        if operator == "MatMul"
        else {"a": ("size",), "b": (1,), "c": ("size",)}
    )
    a, b, c = (TensorSpec(name, "float32", shape) for name, shape in axes.items())
    dims = tuple(Dim(name, size, size, size) for name, size in sizes.items())
    signature = Signature((a, b), (c,), dims)
    a_info, b_info, c_info = (
        helper.make_tensor_value_info(tensor.name, TensorProto.FLOAT, signature.shape(tensor, sizes))
        for tensor in (a, b, c)
    )
    graph = helper.make_graph(
        [helper.make_node(operator, ["a", "b"], ["c"])], path.stem, [a_info, b_info], [c_info]
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), str(path))
    return OnnxRuntimeSession(path, signature, name=path.stem, placement=placement)
