"""TensorRT plans, of `tensorrt` and of `tensorrt-rtx`, on an NVIDIA GPU."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import numpy as np

from mha_deploy.errors import FrozenAxisError
from mha_deploy.precision import Precision, numpy_dtype
from mha_deploy.sessions.base import Session
from mha_deploy.sessions.context import Context
from mha_deploy.sessions.engine import Engine, EngineError, EngineProfile, Shape, Shapes, said
from mha_deploy.sessions.memory import POISON, Buffer, Mark, Memory, TorchCudaMemory
from mha_deploy.sessions.onnx_runtime import one_line
from mha_deploy.sessions.stages import COMPUTE, DOWNLOAD, END, UPLOAD, Hook, Stages, unwatched
from mha_deploy.signature import Array, Feeds, Signature, TensorSpec
from mha_deploy.tensorrt.backend import Backend, load_backend
from mha_deploy.tensorrt.log import recording

# CUDA graphs kept at once; each holds an execution context, and so the activations of one shape.
GRAPHS_KEPT = 8
Key: TypeAlias = tuple[int | Shape, ...]


class TensorRtSession(Session):
    """Runs the plan at `path`, whose hash and passport the caller has checked: a plan is code.

    Each run takes the smallest profile that covers its shapes. Memory is taken once, for the largest
    shapes of any profile, and an answer is cut to the shape that TensorRT gives for the request.

    - `cuda_graphs`: from the second run of a shape on, one launch replays all of it. For callers with
      few shapes: the last GRAPHS_KEPT are kept (`tensorrt-rtx` keeps graphs by its own rule).
    - `rebuild` is the command that builds the plan again; errors name it.
    - `poison`: before each run every byte of every buffer on the device is set to NaN, so that what
      the engine leaves unwritten, or reads beyond its inputs, shows in the answer. For verification.

    Raises:
        MissingError: no GPU with its driver, no PyTorch with CUDA, no such TensorRT; in this order.
        EngineError: the plan cannot be loaded here or has other tensors than `signature`.
    """

    def __init__(
        self,
        path: Path,
        signature: Signature,
        *,
        backend: Backend | str,
        name: str = "engine",
        precision: Precision = Precision.FP16,
        cuda_graphs: bool = False,
        poison: bool = False,
        rebuild: str = "mha-deploy build-engine",
        memory: Callable[[], Memory] = TorchCudaMemory,
    ) -> None:
        self._memory = memory()
        found = backend if isinstance(backend, Backend) else load_backend(backend)
        self._engine = Engine(found, path, signature, rebuild)
        super().__init__(name, signature, precision, f"{found} on {self._memory.device}")
        self._poison, self._cuda_graphs = poison, cuda_graphs
        self._captures = cuda_graphs and not self._engine.captures_itself
        self._buffers = self._allocated()
        self._at: Hook = unwatched
        self._contexts: OrderedDict[Key, Context] = OrderedDict()

    def _allocated(self) -> dict[str, Buffer]:
        sizes = self._engine.capacities()
        try:
            return {name: self._memory.allocate(size) for name, size in sizes.items()}
        except RuntimeError as error:
            self._engine.close()
            raise EngineError(
                f"no memory for engine {self.name!r}: {sum(sizes.values())} bytes for its largest shapes, on "
                f"{self._memory.device} and page-locked on the host: {one_line(error)}. Build it with a "
                "smaller --profile, or run fewer sessions"
            ) from error

    def _execute(self, feeds: Feeds) -> dict[str, Array]:
        shapes = {tensor.name: feeds[tensor.name].shape for tensor in self.signature.inputs}
        profile = self._engine.profile_for(shapes)
        with recording() as log:
            try:
                try:
                    found = self._queue(feeds, profile, shapes)
                finally:  # after a failure too: until then copies may be using the host's buffers
                    self._memory.synchronize()
            except RuntimeError as error:  # Refused, and the device's own errors through torch
                self._drop_contexts()
                words = said(log)
                raise EngineError(
                    f"engine {self.name!r} failed on {_listed(shapes)}: {one_line(error)}"
                    + (f". TensorRT said: {words}" if words else "")
                ) from error
        return {tensor.name: self._answer(tensor, found[tensor.name]) for tensor in self.signature.outputs}

    def _queue(self, feeds: Feeds, profile: EngineProfile, shapes: Shapes) -> dict[str, Shape]:
        """Queue uploads, the run and downloads; the shapes of the outputs."""
        context = self._context(profile, shapes)
        context.prepare(profile, shapes)
        outputs = {tensor.name: context.shape(tensor.name) for tensor in self.signature.outputs}
        sizes = {tensor.name: self._size(tensor, outputs[tensor.name]) for tensor in self.signature.outputs}
        if self._poison:
            for buffer in self._buffers.values():
                buffer.fill(POISON)
        self._at(UPLOAD)
        for name in shapes:
            array, buffer = feeds[name], self._buffers[name]
            np.copyto(buffer.host[: array.nbytes].view(array.dtype).reshape(array.shape), array)
            buffer.upload(array.nbytes)
        self._at(COMPUTE)
        context.run()
        self._at(DOWNLOAD)
        for name, size in sizes.items():
            self._buffers[name].download(size)
        self._at(END)
        return outputs

    def run_in_stages(self, feeds: Feeds, *, cold: bool) -> Stages:
        """What one run takes by events on the device's stream.

        With `cold` twice the bytes of its cache are written before it computes, on the same stream: that
        also gives the host time to queue the launches, so that they are not what is timed.
        """
        marks: list[Mark] = []
        flush = self._memory.allocate(2 * self._memory.cache_bytes) if cold else None

        def at(stage: str) -> None:
            marks.append(self._memory.mark())
            if stage == COMPUTE:
                if flush:
                    flush.fill(0)
                marks.append(self._memory.mark())

        self._at = at
        try:
            self.run(feeds)
        finally:
            self._at = unwatched
        start, uploaded, ready, computed, end = marks
        return Stages(start.ms_until(uploaded), ready.ms_until(computed), computed.ms_until(end))

    def _context(self, profile: EngineProfile, shapes: Shapes) -> Context:
        """The context for a request: one for all of them, or one a shape where graphs are captured."""
        key: Key = (profile.index, *shapes.values()) if self._captures else ()
        if key not in self._contexts:
            if len(self._contexts) == GRAPHS_KEPT:
                self._contexts.popitem(last=False)[1].close()
            self._contexts[key] = Context(
                self._engine.new_context(cuda_graphs=self._cuda_graphs),
                self._memory,
                {name: buffer.address for name, buffer in self._buffers.items()},
                captures=self._captures,
            )
        self._contexts.move_to_end(key)
        return self._contexts[key]

    def _size(self, tensor: TensorSpec, shape: Shape) -> int:
        """Bytes of an output, once they are known to fit into its buffer.

        Raises:
            FrozenAxisError: TensorRT would write beyond it.
        """
        size = math.prod(shape) * numpy_dtype(tensor.dtype).itemsize
        if min(shape, default=1) < 0 or size > self._buffers[tensor.name].host.size:
            raise FrozenAxisError(
                f"session {self.name!r} would answer {tensor.name!r} with shape {list(shape)}, which is more "
                f"than {tensor} holds; an axis of this artifact is not the one of its inputs"
            )
        return size

    def _answer(self, tensor: TensorSpec, shape: Shape) -> Array:
        size = self._size(tensor, shape)
        answer: Array = self._buffers[tensor.name].host[:size].view(numpy_dtype(tensor.dtype)).reshape(shape)
        return answer.copy()

    def _drop_contexts(self) -> None:
        while self._contexts:
            self._contexts.popitem()[1].close()

    def _release(self) -> None:
        self._drop_contexts()
        self._engine.close()
        self._buffers.clear()


def _listed(shapes: Shapes) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
