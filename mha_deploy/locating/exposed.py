"""Running a graph with values inside it made outputs, and finding the node at which it stops running."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx
from onnx import helper

from mha_deploy.errors import GraphError
from mha_deploy.onnx_files import save
from mha_deploy.sessions import DEFAULT_PLACEMENT, Placement
from mha_deploy.sessions.onnx_runtime import one_line, open_inference_session
from mha_deploy.signature import Array


def inner_values(model: onnx.ModelProto) -> list[str]:
    """Every value that a node of the main graph gives, in the order of the nodes; outputs included."""
    return [name for node in model.graph.node for name in node.output if name]


class ExposedGraph:
    """A graph, opened in ONNX Runtime as a session opens it, that also gives out `values`.

    What is given out cannot be fused away, so that this may compute otherwise than the file does.

    Raises:
        GraphError: ONNX Runtime does not load or run it.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        values: Sequence[str] = (),
        placement: Placement = DEFAULT_PLACEMENT,
    ) -> None:
        with _shown(model, values) as shown, tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "exposed.onnx"
            save(shown, path)
            try:
                self._session: Any = open_inference_session(path, placement)
            except GraphError as error:
                raise GraphError(str(error).replace(str(path), "the graph")) from error
        self._names = [output.name for output in self._session.get_outputs()]
        self.inputs = [value.name for value in self._session.get_inputs()]

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        try:
            values = self._session.run(self._names, dict(feeds))
        except Exception as error:  # its exceptions share no public base class
            raise GraphError(f"ONNX Runtime failed to run the graph: {one_line(error)}") from error
        return dict(zip(self._names, values, strict=True))


@contextmanager
def _shown(model: onnx.ModelProto, values: Sequence[str]) -> Iterator[onnx.ModelProto]:
    """`model` with `values` among its outputs, for a while: a copy would hold all weights twice."""
    outputs = model.graph.output
    kept = len(outputs)
    present = {value.name for value in outputs}
    outputs.extend(onnx.ValueInfoProto(name=name) for name in values if name not in present)
    try:
        yield model
    finally:
        del outputs[kept:]


def first_that_does_not_run(
    model: onnx.ModelProto, feeds: Mapping[str, Array]
) -> tuple[onnx.NodeProto | None, str]:
    """The first node in the file's order up to which the graph does not load or run, and what is said.

    None where even the graph without nodes does not run, or all nodes do: it is the file's inputs,
    outputs or declarations.
    """
    nodes = list(model.graph.node)
    runs, fails = 0, len(nodes)
    message = _refusal(model, 0, feeds)
    if message or not _refusal(model, fails, feeds):
        return None, message or _whole_refusal(model, feeds)
    while fails - runs > 1:
        middle = (runs + fails) // 2
        if _refusal(model, middle, feeds):
            fails = middle
        else:
            runs = middle
    return nodes[fails - 1], _refusal(model, fails, feeds)


def _refusal(model: onnx.ModelProto, count: int, feeds: Mapping[str, Array]) -> str:
    """Why the graph of the first `count` nodes does not run; "" where it does."""
    part = first_nodes(model, count)
    if not count:
        part.graph.node.append(helper.make_node("Constant", [], ["nothing"], value_int=0))
    part.graph.output.extend(onnx.ValueInfoProto(name=name) for name in part.graph.node[-1].output if name)
    return _whole_refusal(part, feeds)


def first_nodes(model: onnx.ModelProto, count: int) -> onnx.ModelProto:
    """A model of the first `count` nodes, which gives nothing out."""
    part = onnx.ModelProto()
    part.CopyFrom(model)
    del part.graph.node[count:], part.graph.output[:], part.graph.value_info[:]
    return part


def _whole_refusal(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> str:
    try:
        ExposedGraph(model).run(feeds)
    except GraphError as error:
        return str(error)
    return ""
