"""Execution contexts of a TensorRT engine, whose answers False and None become errors."""

from __future__ import annotations

from collections.abc import Mapping

from mha_deploy.sessions.engine import EngineProfile, Refused, Shape, Shapes
from mha_deploy.sessions.memory import Graph, Memory
from mha_deploy.tensorrt.log import Handle


class Context:
    """An execution context, ready for one profile and one set of shapes at a time.

    With `captures` the first run for the shapes it was prepared for is an ordinary one, which lets
    TensorRT do what it puts off until then; the second captures a CUDA graph, and from then on that is
    replayed. A captured graph is tied to the state of its context, so such a context must not be
    prepared for other shapes.

    The handle stands in this object alone, never in a local name: a traceback would keep it alive
    beyond its engine.
    """

    def __init__(
        self, handle: Handle, memory: Memory, addresses: Mapping[str, int], *, captures: bool
    ) -> None:
        self._handle, self._memory, self._addresses = handle, memory, addresses
        self._captures, self._warm = captures, False
        self._graph: Graph | None = None
        self._profile = -1
        self._shapes: dict[str, Shape] = {}

    def prepare(self, profile: EngineProfile, shapes: Shapes) -> None:
        """Set profile, shapes and addresses, unless they are set so already.

        Raises:
            Refused: TensorRT took one of them not.
        """
        if (profile.index, shapes) == (self._profile, self._shapes):
            return
        self._shapes = {}  # set last, so that a failure leaves nothing prepared
        self._set_profile(profile.index)
        for name, shape in shapes.items():
            _must(self._handle.set_input_shape(name, shape), f"shape {list(shape)} for input {name!r}")
        unknown = self._handle.infer_shapes()
        if unknown:
            raise Refused(f"TensorRT cannot tell the shapes of {', '.join(unknown)}")
        for name, address in self._addresses.items():
            _must(self._handle.set_tensor_address(name, address), f"the address of {name!r}")
        self._shapes = dict(shapes)

    def _set_profile(self, index: int) -> None:
        if index != self._profile:
            done = self._handle.set_optimization_profile_async(index, self._memory.stream)
            _must(done, f"profile {index}")
            self._profile = index

    def shape(self, name: str) -> Shape:
        """The shape that a tensor has in the next run."""
        return tuple(self._handle.get_tensor_shape(name))

    def run(self) -> None:
        """Queue one run on the memory's stream.

        Raises:
            Refused: TensorRT queued nothing.
        """
        if self._captures and self._warm and self._graph is None:
            self._graph = self._memory.capture(self._enqueue)
        if self._graph is None:
            self._enqueue()
            self._warm = True
        else:
            self._graph.replay()

    def _enqueue(self) -> None:
        _must(self._handle.execute_async_v3(self._memory.stream), "to run")

    def close(self) -> None:
        """Let go of the graph, then of the context."""
        self._graph = None
        self._handle = None


def _must(done: bool, what: str) -> None:
    if not done:
        raise Refused(f"TensorRT refused {what}")
