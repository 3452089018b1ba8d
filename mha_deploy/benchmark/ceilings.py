"""What this machine can do, in the same runtime with the same threads: the best of each in all rounds.

compute    a plain MatMul
memory     one stream in and one out of memory, as STREAM's "scale" (McCalpin, 1995); each array is
           at least four times the last-level cache
cache      the same on arrays that stay in the cache
overhead   a graph of one node over one number: what a run costs that computes nothing

The best, as STREAM takes it: a ceiling that a neighbour lowers is none. Drift is seen in the medians.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper

from mha_deploy import machine
from mha_deploy.benchmark.rounds import Samples, Turn
from mha_deploy.benchmark.turns import random_feeds, session_turn
from mha_deploy.cases import describe
from mha_deploy.sessions import Placement, Session
from mha_deploy.sessions.onnx_runtime import OnnxRuntimeSession
from mha_deploy.signature import Dim, Signature, Sizes, TensorSpec

# Large enough for full speed, and over before a neighbour is likely to cut in.
MATMUL = {"rows": 512, "inner": 512, "columns": 512}
MATMUL_FLOPS = 2 * math.prod(MATMUL.values())
# In the cache of every machine that this runs on, and long enough to outweigh the start of its threads.
CACHED_BYTES = 2**20
SMALLEST_BYTES, LARGEST_BYTES = 2**26, 2**28
# Of the time that a size of the grid gets: a ceiling's median needs less.
SHARE = 0.25
COMPUTE, MEMORY, CACHE, OVERHEAD = "compute ceiling", "memory ceiling", "cache ceiling", "overhead"


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What was measured beside the block; `cache_bytes` tell which of the two bandwidths counts."""

    gflops: float
    memory_gb_s: float
    cache_gb_s: float
    overhead_ms: float
    cache_bytes: int
    what: str
    samples: Mapping[str, Samples]

    def bandwidth_gb_s(self, working_set_bytes: int) -> float:
        """That of the cache for what fits into it, else that of memory."""
        return self.cache_gb_s if working_set_bytes <= self.cache_bytes else self.memory_gb_s

    def to_json(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "gflops": self.gflops,
            "memory_gb_s": self.memory_gb_s,
            "cache_gb_s": self.cache_gb_s,
            "overhead_ms": self.overhead_ms,
            "cache_bytes": self.cache_bytes,
            "samples": {name: samples.to_json() for name, samples in self.samples.items()},
        }


class CeilingSessions:
    """Open sessions over the four graphs: `turns` to measure, then `read` what they took."""

    def __init__(self, sessions: Mapping[str, tuple[Session, Sizes]], placement: Placement) -> None:
        self._sessions, self._placement = sessions, placement

    def turns(self) -> list[Turn]:
        return [
            session_turn(name, session, [random_feeds(session.signature, sizes)], share=SHARE)
            for name, (session, sizes) in self._sessions.items()
        ]

    def read(self, taken: Mapping[str, Samples]) -> Ceilings:
        own = {name: taken[name] for name in self._sessions}
        session, sizes = self._sessions[COMPUTE]
        threads = self._placement.threads or machine.usable_cpus()
        return Ceilings(
            gflops=MATMUL_FLOPS / min(own[COMPUTE].merged_ms) / 1e6,
            memory_gb_s=self._streamed(MEMORY) / min(own[MEMORY].merged_ms) / 1e6,
            cache_gb_s=self._streamed(CACHE) / min(own[CACHE].merged_ms) / 1e6,
            overhead_ms=min(own[OVERHEAD].merged_ms),
            cache_bytes=machine.last_level_cache_bytes(),
            what=f"fp32 MatMul {describe(sizes)}, {session.provider}, {threads} threads",
            samples=own,
        )

    def _streamed(self, name: str) -> int:
        """Bytes read and written, as STREAM counts them: not what a write first fetches."""
        return 2 * 4 * math.prod(self._sessions[name][1].values())


@contextlib.contextmanager
def ceiling_sessions(placement: Placement) -> Iterator[CeilingSessions]:
    """Sessions over the ceilings' graphs, all in fp32."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        streamed = min(max(4 * machine.last_level_cache_bytes(), SMALLEST_BYTES), LARGEST_BYTES)
        graphs: dict[str, tuple[str, Sizes]] = {
            COMPUTE: ("MatMul", MATMUL),
            MEMORY: ("Mul", {"size": streamed // 4}),
            CACHE: ("Mul", {"size": CACHED_BYTES // 4}),
            OVERHEAD: ("Mul", {"size": 1}),
        }
        yield CeilingSessions(
            {
                name: (
                    stack.enter_context(_session(folder / f"{name}.onnx", operator, sizes, placement)),
                    sizes,
                )
                for name, (operator, sizes) in graphs.items()
            },
            placement,
        )


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
