"""Who can run an ONNX file on the CPU: ONNX Runtime, or the ONNX standard's own evaluator."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mha_deploy.errors import GraphError, MissingError
from mha_deploy.sessions.onnx_runtime import import_onnxruntime, one_line
from mha_deploy.signature import Array


class Runner(Protocol):
    where: str

    def __init__(self, path: Path) -> None: ...

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]: ...


class OnnxRuntimeRunner:
    where = "in ONNX Runtime"

    def __init__(self, path: Path) -> None:
        try:
            onnxruntime = import_onnxruntime()
        except MissingError as error:
            raise GraphError(str(error)) from error
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        # With all optimisations on it crashes, rather than raises, on some graphs that are not fused.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        try:
            self._session = onnxruntime.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # its exceptions share no public base class
            raise GraphError(f"ONNX Runtime: {one_line(error)}") from error
        self._names = [output.name for output in self._session.get_outputs()]

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        try:
            values = self._session.run(self._names, dict(feeds))
        except Exception as error:  # as above
            raise GraphError(f"ONNX Runtime: {one_line(error)}") from error
        return dict(zip(self._names, values, strict=True))


class ReferenceRunner:
    where = "in onnx.reference"

    def __init__(self, path: Path) -> None:
        from onnx.reference import ReferenceEvaluator

        try:
            self._session = ReferenceEvaluator(str(path), new_ops=[_attention_with_whole_masks()])
        except Exception as error:  # whatever the implementation of an operator raises
            raise GraphError(f"onnx.reference: {one_line(error)}") from error

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")  # of numpy, about -inf and overflow
                values = self._session.run(None, dict(feeds))
        except Exception as error:  # as above
            raise GraphError(f"onnx.reference: {one_line(error)}") from error
        return {str(n): np.asarray(v) for n, v in zip(self._session.output_names, values, strict=True)}


def _attention_with_whole_masks() -> Any:
    """The reference's `Attention`, but for masks of one row for all queries.

    onnx 1.23 takes such a mask's one row for the number of queries where is_causal is set.
    """
    from onnx.reference.ops.op_attention import Attention as Reference

    class Attention(Reference):
        op_domain = ""
        _validate_attention25 = False  # what opset 25 alone refuses

        def _run(  # type: ignore[override]  # all that it does not look at goes through
            self, q: Array, k: Array, v: Array, attn_mask: Any = None, *others: Any, **attributes: Any
        ) -> Any:
            if attn_mask is not None:  # none is an input that the node leaves out
                whole = (*attn_mask.shape[:-2], q.shape[-2], attn_mask.shape[-1])
                attn_mask = np.broadcast_to(attn_mask, whole)
            return super()._run(q, k, v, attn_mask, *others, **attributes)

    return Attention


ORACLES: tuple[type[Runner], ...] = (OnnxRuntimeRunner, ReferenceRunner)
