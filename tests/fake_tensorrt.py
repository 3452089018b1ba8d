"""TensorRT and a GPU, stood in for on the host: real memory by address, work that waits for its stream.

The classes have the methods of the bindings that sessions call (a test compares the names with the
real ones) and their ways: False and None for failures, with a line in the log. Queued work runs when
the stream is waited for, so reading an answer too early shows old bytes.
"""

from __future__ import annotations

import ctypes
import enum
import itertools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace

import numpy as np

from mha_deploy.precision import numpy_dtype
from mha_deploy.signature import Array, Feeds, Signature
from mha_deploy.tensorrt.backend import Backend

GUARD = np.arange(64, dtype=np.uint8)
TAKES_MS = {"upload": 1.0, "compute": 5.0, "download": 2.0, "fill": 30.0}
STREAMS: weakref.WeakValueDictionary[int, HostMemory] = weakref.WeakValueDictionary()
_handles = itertools.count(4096)


class DataType(enum.Enum):
    FLOAT, HALF, BF16, INT64, BOOL = "float32", "float16", "bfloat16", "int64", "bool"


class TensorIOMode(enum.Enum):
    INPUT, OUTPUT = 1, 2


class CudaGraphStrategy(enum.Enum):
    DISABLED, WHOLE_GRAPH_CAPTURE = 0, 1


class DynamicShapesKernelSpecializationStrategy(enum.Enum):
    LAZY, EAGER, NONE = 0, 1, 2


class HostMemory:
    """Device memory that lies on the host, with a fence behind every buffer."""

    device = "a GPU that is none"
    cache_bytes = 1000

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.stream = next(_handles)
        STREAMS[self.stream] = self
        self.queue: list[Callable[[], None]] = []
        self.buffers: list[HostBuffer] = []
        self.captured = self.replayed = 0

    def allocate(self, size):
        self.buffers.append(HostBuffer(self, size))
        return self.buffers[-1]

    def capture(self, enqueue):
        before, self.queue = self.queue, []
        enqueue()
        work, self.queue = self.queue, before
        self.captured += 1

        def replay():
            self.replayed += 1
            self.queue.extend(work)

        return SimpleNamespace(replay=replay)

    def spend(self, what):
        self.now_ms += TAKES_MS[what]

    def mark(self):
        mark = HostMark()
        self.queue.append(lambda: setattr(mark, "at_ms", self.now_ms))
        return mark

    def synchronize(self):
        work, self.queue = self.queue, []
        for step in work:
            step()
        for buffer in self.buffers:
            np.testing.assert_array_equal(buffer.device[buffer.size :], GUARD, "written beyond a buffer")


class HostMark:
    """A point in the queue; like an event, it knows its time only once it was waited for."""

    def ms_until(self, later):
        return later.at_ms - self.at_ms


class HostBuffer:
    def __init__(self, memory: HostMemory, size: int) -> None:
        self._memory, self.size = memory, size
        self.host = np.zeros(size, np.uint8)
        self.device = np.concatenate([np.zeros(size, np.uint8), GUARD])
        self.address = self.device.ctypes.data

    def upload(self, size):
        self._queue("upload", lambda: np.copyto(self.device[:size], self.host[:size]))

    def download(self, size):
        self._queue("download", lambda: np.copyto(self.host[:size], self.device[:size]))

    def fill(self, byte):
        self._queue("fill", lambda: self.device[: self.size].fill(byte))

    def _queue(self, what, step):
        self._memory.queue.append(lambda: (self._memory.spend(what), step()))


@dataclass
class FakePlan:
    """What the engine is, what it computes, what it refuses, and what was called.

    `profiles` give each dim its (min, max). `refuses` names methods that fail. `answers` changes the
    shape of an output, `writes` says how many of its rows the engine really writes.
    """

    signature: Signature
    profiles: tuple[Mapping[str, tuple[int, int]], ...]
    compute: Callable[[Feeds], dict[str, Array]]
    refuses: set[str] = field(default_factory=set)
    answers: Callable[[tuple[int, ...]], tuple[int, ...]] = lambda shape: shape
    writes: Callable[[int], int] = lambda rows: rows
    calls: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    configs: list[FakeRuntimeConfig] = field(default_factory=list)
    contexts: weakref.WeakSet[FakeContext] = field(default_factory=weakref.WeakSet)

    def sees(self, method: str) -> bool:
        """Note a call; whether it is to succeed."""
        self.calls.append(method)
        return method not in self.refuses

    def backend(self, *, rtx: bool = False) -> Backend:
        module = ModuleType("fake_tensorrt")
        module.ILogger = type("ILogger", (), {})
        module.DataType, module.TensorIOMode = DataType, TensorIOMode
        module.Runtime = lambda logger: FakeRuntime(self, logger)
        if rtx:
            module.CudaGraphStrategy = CudaGraphStrategy
            module.DynamicShapesKernelSpecializationStrategy = DynamicShapesKernelSpecializationStrategy
        return Backend("tensorrt-rtx" if rtx else "tensorrt", "0", module)


class FakeRuntime:
    def __init__(self, plan: FakePlan, logger) -> None:
        self._plan, self._logger = plan, logger

    def deserialize_cuda_engine(self, data):
        if self._plan.sees("deserialize_cuda_engine"):
            return FakeEngine(self._plan, self._logger, weakref.ref(self))
        self._logger.log(1, f"Error Code 6: {data.decode()} is not compatible, please rebuild.")
        return None

    def __del__(self) -> None:
        self._plan.ended.append("runtime")


class FakeEngine:
    def __init__(self, plan: FakePlan, logger, runtime) -> None:
        self._plan, self._logger, self._runtime = plan, logger, runtime
        self._tensors = {t.name: t for t in (*plan.signature.inputs, *plan.signature.outputs)}
        self.num_io_tensors = len(self._tensors)
        self.num_optimization_profiles = len(plan.profiles)

    def get_tensor_name(self, index):
        return list(self._tensors)[index]

    def get_tensor_mode(self, name):
        inputs = [tensor.name for tensor in self._plan.signature.inputs]
        return TensorIOMode.INPUT if name in inputs else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name):
        return DataType(self._tensors[name].dtype)

    def get_tensor_shape(self, name):
        return tuple(-1 if isinstance(axis, str) else axis for axis in self._tensors[name].shape)

    def get_tensor_profile_shape(self, name, index):
        shape, ranges = self._tensors[name].shape, self._plan.profiles[index]
        low, high = ([ranges[a][end] if isinstance(a, str) else a for a in shape] for end in (0, 1))
        return [low, high, high]

    def create_runtime_config(self):
        self._plan.configs.append(FakeRuntimeConfig(self._plan))
        return self._plan.configs[-1]

    def create_execution_context(self, *_config):
        if not self._plan.sees("create_execution_context"):
            return None
        context = FakeContext(self._plan, self._logger, weakref.ref(self))
        self._plan.contexts.add(context)
        return context

    def __del__(self) -> None:
        assert self._runtime() is not None
        self._plan.ended.append("engine")


class FakeRuntimeConfig:
    dynamic_shapes_kernel_specialization_strategy = DynamicShapesKernelSpecializationStrategy.LAZY

    def __init__(self, plan: FakePlan) -> None:
        self._plan, self._strategy = plan, CudaGraphStrategy.DISABLED

    @property
    def cuda_graph_strategy(self):
        return self._strategy

    @cuda_graph_strategy.setter
    def cuda_graph_strategy(self, strategy):
        if "cuda_graph_strategy" not in self._plan.refuses:
            self._strategy = strategy


class FakeContext:
    """Holds its engine weakly: what keeps it alive longer is the session's to do."""

    def __init__(self, plan: FakePlan, logger, engine) -> None:
        self._plan, self._logger, self._engine = plan, logger, engine
        self._profile = -1
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}

    def set_optimization_profile_async(self, index, stream):
        assert stream in STREAMS
        self._shapes = {}
        self._profile = index
        return self._plan.sees("set_optimization_profile_async")

    def set_input_shape(self, name, shape):
        low, _, high = self._engine().get_tensor_profile_shape(name, self._profile)
        covered = all(a <= size <= b for a, size, b in zip(low, shape, high, strict=True))
        if not self._plan.sees("set_input_shape") or not covered:
            self._logger.log(1, f"Error Code 3: API Usage Error ({name} has no such shape)\nIn a file")
            return False
        self._shapes[name] = tuple(shape)
        return True

    def infer_shapes(self):
        known = self._plan.sees("infer_shapes")
        return [t.name for t in self._plan.signature.inputs if t.name not in self._shapes or not known]

    def set_tensor_address(self, name, address):
        self._addresses[name] = address
        return self._plan.sees("set_tensor_address")

    def get_tensor_shape(self, name):
        return self._all_shapes()[name]

    def execute_async_v3(self, stream):
        shapes, addresses = self._all_shapes(), dict(self._addresses)
        if not self._plan.sees("execute_async_v3") or set(addresses) != set(shapes):
            return False
        itself, memory = weakref.ref(self), STREAMS[stream]
        memory.queue.append(lambda: (memory.spend("compute"), _execute(itself(), shapes, addresses)))
        return True

    def _all_shapes(self):
        signature = self._plan.signature
        sizes = {
            axis: size
            for tensor in signature.inputs
            for axis, size in zip(tensor.shape, self._shapes[tensor.name], strict=True)
        }
        outputs = {t.name: self._plan.answers(signature.shape(t, sizes)) for t in signature.outputs}
        return {**self._shapes, **outputs}

    def __del__(self) -> None:
        assert self._engine() is not None
        self._plan.ended.append("context")


def _execute(context: FakeContext | None, shapes, addresses) -> None:
    """Run what was queued; a graph is tied to the context that it was captured from, as that was."""
    if context is None or context._all_shapes() != shapes:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    plan = context._plan
    feeds = {t.name: _at(addresses[t.name], shapes[t.name], t.dtype) for t in plan.signature.inputs}
    found = plan.compute(feeds)
    for tensor in plan.signature.outputs:
        rows = plan.writes(shapes[tensor.name][0])
        target = _at(addresses[tensor.name], shapes[tensor.name], tensor.dtype)
        target[:rows] = found[tensor.name][:rows]


def _at(address: int, shape: tuple[int, ...], dtype: str) -> Array:
    kind = numpy_dtype(dtype)
    size = int(np.prod(shape)) * kind.itemsize
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8).view(kind).reshape(shape)
