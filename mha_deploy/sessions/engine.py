"""A TensorRT plan, opened: its engine and the profiles in it.

One path for `tensorrt` and `tensorrt-rtx`, told apart by what the module can do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from mha_deploy.errors import FeedError, GraphError, MhaDeployError, MissingError
from mha_deploy.precision import numpy_dtype
from mha_deploy.signature import Signature, TensorSpec
from mha_deploy.tensorrt.backend import Backend
from mha_deploy.tensorrt.log import Handle, Log, recording, stderr_into
from mha_deploy.tensorrt.messages import BuildError, explain

Shape: TypeAlias = tuple[int, ...]
Shapes: TypeAlias = Mapping[str, Shape]

_DTYPES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "INT8": "int8",
    "UINT8": "uint8",
    "INT32": "int32",
    "INT64": "int64",
    "BOOL": "bool",
}


class EngineError(GraphError):
    """A TensorRT plan cannot be loaded, is another one than was expected, or failed to run."""


class Refused(RuntimeError):  # noqa: N818 - never leaves the sessions; what TensorRT answered
    """TensorRT refused a step of a run."""


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """The smallest and largest shape of every input under one optimisation profile."""

    index: int
    low: Shapes
    high: Shapes

    @property
    def volume(self) -> int:
        """Elements of all inputs at their largest: what "the smallest profile" goes by."""
        return sum(map(math.prod, self.high.values()))

    def outside(self, inputs: Sequence[TensorSpec], shapes: Shapes) -> dict[str, str]:
        """For each axis that is too small or too large here: its size and what is taken."""
        return {
            str(axis): f"{axis} = {size} (takes {low}..{high})"
            for tensor in inputs
            for axis, size, low, high in zip(
                tensor.shape,
                shapes[tensor.name],
                self.low[tensor.name],
                self.high[tensor.name],
                strict=True,
            )
            if not low <= size <= high
        }


class Engine:
    """The plan at `path`, checked to have the tensors of `signature`.

    Raises:
        EngineError: TensorRT cannot load it, or its tensors are others.
        MissingError: it cannot be loaded for want of a GPU or a library.
    """

    def __init__(self, backend: Backend, path: Path, signature: Signature, rebuild: str) -> None:
        self.backend, self.signature = backend, signature
        self._runtime, self._handle = _load(backend, path, rebuild)
        try:
            self._check_tensors(path, rebuild)
        except EngineError:
            self.close()
            raise
        self.profiles = [self._profile(i) for i in range(self._handle.num_optimization_profiles)]

    @property
    def captures_itself(self) -> bool:
        """Whether the library keeps CUDA graphs of its own, for every shape it meets."""
        return hasattr(self.backend.module, "CudaGraphStrategy")

    def profile_for(self, shapes: Shapes) -> EngineProfile:
        """The smallest profile that covers `shapes`.

        Raises:
            FeedError: none does; the axes that the nearest one lacks are named.
        """
        inputs = self.signature.inputs
        misses = [(profile.outside(inputs, shapes), profile) for profile in self.profiles]
        covering = [profile for outside, profile in misses if not outside]
        if covering:
            return min(covering, key=lambda profile: profile.volume)
        nearest, _ = min(misses, key=lambda pair: len(pair[0]))
        raise FeedError(
            f"no profile of this engine covers {', '.join(nearest.values())} in the nearest of its "
            f"{len(self.profiles)}; stay inside, or build the engine again with a --profile that covers it"
        )

    def capacities(self) -> dict[str, int]:
        """Bytes of every tensor at the largest shape of any profile."""
        sizes: dict[str, int] = {}
        for profile in self.profiles:
            for tensor in (*self.signature.inputs, *self.signature.outputs):
                shape = self.signature.shape(tensor, self._largest(profile))
                size = math.prod(shape) * numpy_dtype(tensor.dtype).itemsize
                sizes[tensor.name] = max(size, sizes.get(tensor.name, 0))
        return sizes

    def _largest(self, profile: EngineProfile) -> dict[str, int]:
        sizes = {dim.name: dim.max for dim in self.signature.dims}
        for tensor in self.signature.inputs:
            for axis, size in zip(tensor.shape, profile.high[tensor.name], strict=True):
                if isinstance(axis, str):
                    sizes[axis] = size
        return sizes

    def new_context(self, *, cuda_graphs: bool) -> Handle:
        """An execution context; `cuda_graphs` matters where the library keeps them itself.

        Raises:
            Refused: TensorRT made none, or ignored a setting.
        """
        if self.captures_itself:
            context = self._handle.create_execution_context(self._runtime_config(cuda_graphs=cuda_graphs))
        else:
            context = self._handle.create_execution_context()
        if context is None:
            raise Refused("TensorRT made no execution context (too little GPU memory is the usual cause)")
        return context

    def _runtime_config(self, *, cuda_graphs: bool) -> Handle:
        module, config = self.backend.module, self._handle.create_runtime_config()
        strategies = module.CudaGraphStrategy
        wanted = strategies.WHOLE_GRAPH_CAPTURE if cuda_graphs else strategies.DISABLED
        config.cuda_graph_strategy = wanted
        if config.cuda_graph_strategy != wanted:  # a setter that fails only logs
            raise Refused(f"TensorRT did not take the CUDA graph strategy {wanted}")
        # The default runs a stand-in kernel until the one for a new shape is compiled, so that the
        # same request would change its last bits between two runs.
        kernels = module.DynamicShapesKernelSpecializationStrategy
        config.dynamic_shapes_kernel_specialization_strategy = kernels.EAGER
        return config

    def close(self) -> None:
        """Let go of the engine, then of its runtime. Contexts must be gone."""
        self._handle = None
        self._runtime = None

    def _profile(self, index: int) -> EngineProfile:
        low, high = {}, {}
        for tensor in self.signature.inputs:
            shape = tuple(self._handle.get_tensor_shape(tensor.name))
            smallest, largest = shape, shape
            if -1 in shape:
                smallest, _, largest = self._handle.get_tensor_profile_shape(tensor.name, index)
            low[tensor.name], high[tensor.name] = tuple(smallest), tuple(largest)
        return EngineProfile(index, low, high)

    def _check_tensors(self, path: Path, rebuild: str) -> None:
        inputs = self.backend.module.TensorIOMode.INPUT
        found = {
            name: self._handle.get_tensor_mode(name) == inputs
            for name in map(self._handle.get_tensor_name, range(self._handle.num_io_tensors))
        }
        expected = {tensor.name: tensor in self.signature.inputs for tensor in self._tensors()}
        wrong = (
            [str(tensor) for tensor in self._tensors() if not self._is(tensor)] if found == expected else []
        )
        if found != expected or wrong:
            raise EngineError(
                f"plan {path} has tensors {', '.join(map(self._described, found))}; expected "
                f"{', '.join(wrong or map(str, self._tensors()))}. Build it again with: {rebuild}"
            )

    def _tensors(self) -> tuple[TensorSpec, ...]:
        return (*self.signature.inputs, *self.signature.outputs)

    def _is(self, tensor: TensorSpec) -> bool:
        shape = tuple(self._handle.get_tensor_shape(tensor.name))
        same_axes = len(shape) == len(tensor.shape) and all(
            isinstance(axis, str) or axis == size for axis, size in zip(tensor.shape, shape, strict=True)
        )
        return same_axes and self._dtype(tensor.name) == tensor.dtype

    def _dtype(self, name: str) -> str:
        own = str(self._handle.get_tensor_dtype(name).name)
        return _DTYPES.get(own, own)

    def _described(self, name: str) -> str:
        return f"{name} {list(self._handle.get_tensor_shape(name))} {self._dtype(name)}"


def _load(backend: Backend, path: Path, rebuild: str) -> tuple[Handle, Handle]:
    with recording() as log, stderr_into(log):
        try:
            runtime = backend.module.Runtime(backend.logger)
        except (TypeError, RuntimeError) as error:  # the bindings' way to say that they got nothing
            raise MissingError(f"{backend} does not start on this machine: {said(log) or error}") from error
        engine = runtime.deserialize_cuda_engine(path.read_bytes())
    if engine is None:
        raise _not_loaded(path, log, rebuild)
    return runtime, engine


def _not_loaded(path: Path, log: Log, rebuild: str) -> MhaDeployError:
    """The error for a plan that TensorRT answered with None, which the log tells the cause of."""
    known = explain(log.errors)
    kind: Callable[[str], MhaDeployError] = EngineError
    if isinstance(known, MissingError):
        kind = MissingError
    reason = f"it said: {said(log) or 'nothing'}" if isinstance(known, BuildError) else str(known)
    return kind(
        f"TensorRT cannot load the plan {path}: {reason.rstrip('.')}. A plan runs only with the TensorRT "
        f"and on the GPUs that it was built for; build it again with: {rebuild}"
    )


def said(log: Log) -> str:
    """The library's first error, on one line; nothing when it logged none."""
    return " ".join(log.errors[0].split())[:300] if log.errors else ""
