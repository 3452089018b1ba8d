"""Device memory and the stream that a session queues its work on: a small seam over torch.

Everything here is queued and returns at once; `Memory.synchronize` waits. What uses it can be run
without a GPU over memory of the host, which is how its logic is tested.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mha_deploy.errors import MissingError
from mha_deploy.tensorrt.backend import has_cuda_driver

# As bytes of any IEEE or bfloat16 number this is NaN.
POISON = 0xFF


class Buffer(Protocol):
    """Bytes on the device with as many on the host to pass them through."""

    @property
    def host(self) -> NDArray[np.uint8]:
        """The host's side, page-locked so that copies are asynchronous."""

    @property
    def address(self) -> int:
        """Where the device's side starts."""

    def upload(self, size: int) -> None:
        """Queue a copy of the first `size` bytes from the host."""

    def download(self, size: int) -> None:
        """Queue a copy of the first `size` bytes to the host."""

    def fill(self, byte: int) -> None:
        """Queue setting every byte of the device's side."""


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Queue all of it once more."""


class Mark(Protocol):
    """A point in the stream's work."""

    def ms_until(self, later: Mark) -> float:
        """The device's time from here to there, in ms; both must have been waited for."""


class Memory(Protocol):
    """One device and one stream of its own."""

    @property
    def device(self) -> str:
        """The device's name, for reports."""

    @property
    def stream(self) -> int:
        """The stream's CUDA handle, never that of the default stream."""

    def allocate(self, size: int) -> Buffer:
        """A buffer of `size` bytes, 1 or more."""

    @property
    def cache_bytes(self) -> int:
        """Bytes of the device's last-level cache."""

    def capture(self, enqueue: Callable[[], None]) -> Graph:
        """What `enqueue` queues, kept instead of run."""

    def mark(self) -> Mark:
        """Queue noting the time."""

    def synchronize(self) -> None:
        """Wait for all that was queued; errors of the device surface here as RuntimeError."""


class TorchCudaMemory:
    """torch as allocator and owner of the stream, on the current CUDA device.

    Raises:
        MissingError: no NVIDIA driver with a GPU, or a torch without CUDA.
    """

    def __init__(self) -> None:
        if not has_cuda_driver():
            raise MissingError(
                "this engine runs on an NVIDIA GPU, and no NVIDIA driver with a GPU answers here; run it on "
                "a machine with one, or run the bundle's ONNX model instead"
            )
        import torch

        if not torch.cuda.is_available():
            raise MissingError(
                f"this engine needs PyTorch with CUDA, and PyTorch {torch.__version__} here reaches no GPU; "
                "install a CUDA build of torch that fits the driver"
            )
        self._torch: Any = torch
        self._stream: Any = self._torch.cuda.Stream()

    @property
    def device(self) -> str:
        return str(self._torch.cuda.get_device_name(self._stream.device))

    @property
    def stream(self) -> int:
        return int(self._stream.cuda_stream)

    @property
    def cache_bytes(self) -> int:
        return int(self._torch.cuda.get_device_properties(self._stream.device).L2_cache_size)

    def allocate(self, size: int) -> Buffer:
        return _TorchBuffer(self._torch, self._stream, size)

    def capture(self, enqueue: Callable[[], None]) -> Graph:
        cuda = self._torch.cuda
        graph = cuda.CUDAGraph()
        # Only this thread is held to what a capture forbids: other sessions may allocate meanwhile.
        with cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            enqueue()
        return _TorchGraph(self._torch, self._stream, graph)

    def mark(self) -> Mark:
        return _TorchMark(self._torch.cuda.Event(enable_timing=True), self._stream)

    def synchronize(self) -> None:
        self._stream.synchronize()


class _TorchMark:
    def __init__(self, event: Any, stream: Any) -> None:
        self.event = event
        event.record(stream)

    def ms_until(self, later: Any) -> float:
        return float(self.event.elapsed_time(later.event))


class _TorchBuffer:
    def __init__(self, torch: Any, stream: Any, size: int) -> None:
        self._torch, self._stream = torch, stream
        self._host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        with torch.cuda.stream(stream):  # the allocator reuses memory by the stream it was taken on
            self._device = torch.empty(size, dtype=torch.uint8, device=stream.device)
        self._view: NDArray[np.uint8] = self._host.numpy()

    @property
    def host(self) -> NDArray[np.uint8]:
        return self._view

    @property
    def address(self) -> int:
        return int(self._device.data_ptr())

    def upload(self, size: int) -> None:
        with self._torch.cuda.stream(self._stream):
            self._device[:size].copy_(self._host[:size], non_blocking=True)

    def download(self, size: int) -> None:
        with self._torch.cuda.stream(self._stream):
            self._host[:size].copy_(self._device[:size], non_blocking=True)

    def fill(self, byte: int) -> None:
        with self._torch.cuda.stream(self._stream):
            self._device.fill_(byte)


class _TorchGraph:
    def __init__(self, torch: Any, stream: Any, graph: Any) -> None:
        self._torch, self._stream, self._graph = torch, stream, graph

    def replay(self) -> None:
        with self._torch.cuda.stream(self._stream):
            self._graph.replay()
