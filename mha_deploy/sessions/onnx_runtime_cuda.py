"""ONNX Runtime's CUDA provider with I/O binding: tensors stay on the device between copy and copy."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mha_deploy.errors import GraphError
from mha_deploy.precision import Precision, numpy_dtype
from mha_deploy.sessions.base import Session
from mha_deploy.sessions.memory import TorchCudaMemory
from mha_deploy.sessions.onnx_runtime import (
    CUDA_OPTIONS,
    import_onnxruntime,
    one_line,
    open_inference_session,
)
from mha_deploy.sessions.placement import Placement
from mha_deploy.sessions.stages import COMPUTE, DOWNLOAD, END, UPLOAD, Hook, Stages, unwatched
from mha_deploy.signature import Array, Feeds, Signature, TensorSpec

# Sets of device tensors kept at once, one for each combination of input shapes.
SHAPES_KEPT = 8
ON_CUDA = Placement("cuda")
# The provider's words: run without capturing. 0 is its own, so ours count from 1.
NO_GRAPH = -1


@dataclass(frozen=True, slots=True)
class _Bound:
    """Device tensors of one combination of shapes, bound to the session's inputs and outputs."""

    binding: Any
    inputs: dict[str, Any]
    options: Any


class OnnxRuntimeCudaSession(Session):
    """Runs an ONNX file on the CUDA provider, and nowhere else unless `placement` allows it.

    Inputs are copied into device tensors that are kept for their shapes, outputs come back in one
    copy each. With `cuda_graphs` the first SHAPES_KEPT combinations of shapes are captured as CUDA
    graphs and kept; later ones run without. Capturing needs every node on the GPU, which ONNX Runtime
    checks. On the CPU the same code runs over host memory, without graphs. With `profile_into` ONNX Runtime
    profiles its nodes, and closing writes the trace into that folder; no graph is captured then, since
    no node is seen in one.

    Raises:
        MissingError: onnxruntime is not installed, or CUDA does not run here.
        GraphError: the file cannot be loaded.
    """

    def __init__(
        self,
        path: Path,
        signature: Signature,
        *,
        name: str = "onnx",
        precision: Precision = Precision.FP32,
        cuda_graphs: bool = False,
        placement: Placement = ON_CUDA,
        profile_into: str = "",
    ) -> None:
        cuda_graphs, self._profiles = cuda_graphs and not profile_into, bool(profile_into)
        self._onnxruntime = import_onnxruntime()
        options = {**CUDA_OPTIONS, "enable_cuda_graph": "1" if cuda_graphs else "0"}
        self._session: Any = open_inference_session(path, placement, options, profile_into=profile_into)
        super().__init__(name, signature, precision, self._session.get_providers()[0])
        self._device = "cuda" if self.provider.startswith("CUDA") else "cpu"
        self._at: Hook = unwatched
        self._cuda_graphs = cuda_graphs and self._device == "cuda"
        self._graphs: dict[tuple[Any, ...], _Bound] = {}
        self._recent: OrderedDict[tuple[Any, ...], _Bound] = OrderedDict()

    def _execute(self, feeds: Feeds) -> dict[str, Array]:
        try:
            bound = self._bound(feeds)
            self._at(UPLOAD)
            for name, value in bound.inputs.items():
                value.update_inplace(feeds[name])
            bound.binding.synchronize_inputs()
            self._at(COMPUTE)
            self._session.run_with_iobinding(bound.binding, bound.options)
            bound.binding.synchronize_outputs()
            self._at(DOWNLOAD)
            values = bound.binding.copy_outputs_to_cpu()
            self._at(END)
        except Exception as error:  # its exceptions share no public base class
            raise GraphError(f"ONNX Runtime failed to run {self.name!r}: {one_line(error)}") from error
        return {t.name: value for t, value in zip(self.signature.outputs, values, strict=True)}

    def run_in_stages(self, feeds: Feeds, *, cold: bool) -> Stages:
        """What one run takes by the host's clock, which ONNX Runtime is waited for at each end.

        The provider's stream is its own, so events cannot be put into it; launching is in the time. With
        `cold` twice the bytes of the device's cache are written before it computes.
        """
        times: list[float] = []
        memory = TorchCudaMemory() if cold else None
        flush = memory.allocate(2 * memory.cache_bytes) if memory else None

        def at(stage: str) -> None:
            times.append(time.perf_counter())
            if stage == COMPUTE:
                if memory and flush:
                    flush.fill(0)
                    memory.synchronize()
                times.append(time.perf_counter())

        self._at = at
        try:
            self.run(feeds)
        finally:
            self._at = unwatched
        start, uploaded, ready, computed, end = (1e3 * seconds for seconds in times)
        return Stages(uploaded - start, computed - ready, end - computed)

    def _bound(self, feeds: Feeds) -> _Bound:
        key = tuple(feeds[tensor.name].shape for tensor in self.signature.inputs)
        if key in self._graphs:
            return self._graphs[key]
        if self._cuda_graphs and len(self._graphs) < SHAPES_KEPT:
            # A graph replays the addresses it was captured with, so its tensors are never let go.
            self._graphs[key] = self._bind(feeds, len(self._graphs) + 1)
            return self._graphs[key]
        if key not in self._recent:
            if len(self._recent) == SHAPES_KEPT:
                self._recent.popitem(last=False)
            self._recent[key] = self._bind(feeds, NO_GRAPH)
        self._recent.move_to_end(key)
        return self._recent[key]

    def _bind(self, feeds: Feeds, graph: int) -> _Bound:
        sizes = self.signature.check(feeds)
        binding = self._session.io_binding()
        inputs = {tensor.name: self._value(tensor, sizes) for tensor in self.signature.inputs}
        for name, value in inputs.items():
            binding.bind_ortvalue_input(name, value)
        for tensor in self.signature.outputs:
            binding.bind_ortvalue_output(tensor.name, self._value(tensor, sizes))
        options = self._onnxruntime.RunOptions()
        if self._cuda_graphs:
            options.add_run_config_entry("gpu_graph_id", str(graph))
        return _Bound(binding, inputs, options)

    def _value(self, tensor: TensorSpec, sizes: dict[str, int]) -> Any:
        shape = self.signature.shape(tensor, sizes)
        return self._onnxruntime.OrtValue.ortvalue_from_shape_and_type(
            shape, numpy_dtype(tensor.dtype), self._device, 0
        )

    def _release(self) -> None:
        self._graphs.clear()
        self._recent.clear()
        if self._profiles:
            self._session.end_profiling()
        self._session = None
