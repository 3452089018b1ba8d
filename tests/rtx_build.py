"""A small TensorRT for RTX build for the lowering tests: strongly typed, no GPU needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx
import pytest

Range = tuple[list[int], list[int], list[int]]

_LOG: list[Any] = []  # TensorRT keeps one logger for the process


def fused_kernels(plan: bytes) -> int:
    return plan.count(b"name=_gemm_mha_v2 ")


def rtx_build(
    model: onnx.ModelProto, *, decomposable: bool, profile: Mapping[str, Range]
) -> tuple[bytes, list[str]]:
    """The plan, empty on failure, and the log's complaints. Skips where TensorRT for RTX is not installed."""
    trt = pytest.importorskip("tensorrt_rtx")
    log = _logger(trt)
    log.complaints.clear()
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    if not parser.parse(model.SerializeToString()):
        return b"", [parser.get_error(i).desc() for i in range(parser.num_errors)]
    for layer in (network.get_layer(i) for i in range(network.num_layers)):
        if decomposable and layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer
            layer.attention.decomposable = True
    config = builder.create_builder_config()
    if profile:
        shapes = builder.create_optimization_profile()
        for name, (smallest, usual, largest) in profile.items():
            shapes.set_shape(name, smallest, usual, largest)
        config.add_optimization_profile(shapes)
    plan = builder.build_serialized_network(network, config)
    return bytes(plan or b""), list(log.complaints)


def _logger(trt: Any) -> Any:
    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.complaints: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            # Without a driver every API error is followed by one about CUDA, which says nothing.
            if severity <= trt.ILogger.WARNING and "cudaError" not in message:
                self.complaints.append(message)

    if not _LOG:
        _LOG.append(Logger())
    return _LOG[0]
