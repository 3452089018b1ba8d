"""Spec -> canonical ONNX: one `Attention` node at opset 23, every declared axis dynamic.

PyTorch's exporter decomposes attention below opset 23, and then a fully masked row comes out wrong.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import onnx
import torch
from torch import Tensor, nn

from mha_deploy.errors import FrozenAxisError, GraphError
from mha_deploy.onnx_files import INLINE_LIMIT, check_graph
from mha_deploy.signature import Signature, TensorSpec

OPSET = 23
_TRACE = "pkg.torch.onnx.stack_trace"


def write_graph(
    module: nn.Module, signature: Signature, path: Path, inline_limit: int = INLINE_LIMIT
) -> None:
    """Export `module`, whose forward takes `signature`'s inputs in order, to `path`.

    The module is exported as in evaluation, and its mode restored. Weights beyond `inline_limit`
    bytes go to `path` + ".data". The file is checked before this returns: onnx.checker, no random
    node, every dynamic axis symbolic under its dim's name.

    Raises:
        FrozenAxisError: the exporter fixed an axis that the signature calls dynamic.
        GraphError: the exported file fails a check.
    """
    modes = {child: child.training for child in module.modules()}
    module.eval()
    try:
        with _quiet(), torch.no_grad():
            program = _export(module, signature)
            size = sum(p.numel() * p.element_size() for p in (*module.parameters(), *module.buffers()))
            program.save(str(path), external_data=size > inline_limit)
    finally:
        for child, training in modes.items():
            child.training = training
    _shorten_traces(path)
    check_graph(path, signature)


def _export(module: nn.Module, signature: Signature) -> torch.onnx.ONNXProgram:
    dims = {dim.name: torch.export.Dim(dim.name) for dim in signature.dims}
    axes = tuple(
        {i: dims[axis] for i, axis in enumerate(tensor.shape) if isinstance(axis, str)}
        for tensor in signature.inputs
    )
    parameters = inspect.signature(module.forward).parameters.values()
    starred = any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters)
    try:
        program = torch.onnx.export(
            module,
            _example(signature),
            dynamo=True,
            opset_version=OPSET,
            dynamic_shapes=(axes,) if starred else axes,
            input_names=[tensor.name for tensor in signature.inputs],
            output_names=[tensor.name for tensor in signature.outputs],
            verbose=False,
        )
    except Exception as error:  # the exporter wraps the cause, whatever it is, in errors of its own
        raise _export_error(error, signature) from error
    if program is None:
        raise GraphError("torch.onnx.export returned no program")
    return program


def traced_sizes(signature: Signature) -> dict[str, int]:
    """The sizes an export is traced at: at least 2, all different, and no fixed size of the block.

    torch.export bakes in sizes 0 and 1, and takes equal sizes for one axis.
    """
    fixed = {axis for tensor in signature.inputs for axis in tensor.shape if isinstance(axis, int)}
    candidates = (size for size in range(3, 10_000, 2) if size not in fixed)
    return {dim.name: next(candidates) for dim in signature.dims}


def _example(signature: Signature) -> tuple[Tensor, ...]:
    sizes = traced_sizes(signature)

    def tensor(spec: TensorSpec) -> Tensor:
        return torch.ones(signature.shape(spec, sizes), dtype=getattr(torch, spec.dtype))

    return tuple(tensor(spec) for spec in signature.inputs)


def _export_error(error: BaseException, signature: Signature) -> Exception:
    """The exporter's chain of errors as one line; a specialised axis is named with its line of code."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    text = "\n".join(str(link) for link in chain)
    frozen = re.search(
        r"marked (?P<axis>\w+) as dynamic but .*?specialized.*?constant \((?P<size>\d+)\)", text
    )
    for dim in signature.dims:
        if frozen and frozen[1] == dim.name:
            where = re.search(r'File "[^"]*?([^/"]+)", line (\d+), in (\w+)', text)
            place = f" (near {where[1]}:{where[2]}, in {where[3]})" if where else ""
            return FrozenAxisError(
                f"axis {dim.name!r} is frozen at {frozen[2]}{place}: the code turns its size into a "
                "Python number; keep it symbolic (x.shape[0] unconverted, -1 in reshape)"
            )
    first = next((line.strip() for line in str(chain[-1]).splitlines() if line.strip()), repr(chain[-1]))
    return GraphError(f"torch.onnx.export failed: {type(chain[-1]).__name__}: {first}")


def _shorten_traces(path: Path) -> None:
    """Keep of each node's stack trace the block's own lines, without this machine's folders.

    The file is then the same wherever it is made, and its hash with it.
    """
    model = onnx.load(str(path), load_external_data=False)
    for node in model.graph.node:
        trace = next((p.value for p in node.metadata_props if p.key == _TRACE), "")
        frames = re.findall(r'File "([^"]+)", line (\d+), in (\w+)\n\s*(.*)', trace)
        own = [frame for frame in frames if "/torch/" not in frame[0]]
        del node.metadata_props[:]
        if own:
            file, line, function, code = own[-1]
            source = f"{Path(file).name}:{line} in {function}: {code.strip()}"
            node.metadata_props.add(key="source", value=source)
    del model.metadata_props[:]
    del model.graph.metadata_props[:]
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        del value.metadata_props[:]
    for initializer in model.graph.initializer:
        del initializer.metadata_props[:]
    onnx.save(model, str(path))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter's chatter (missing torchvision, renamed axes) off the user's screen."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
