"""The precisions that a graph, a reference or an engine computes in."""

from __future__ import annotations

from enum import StrEnum

import numpy as np

from mha_deploy.errors import SpecError


class Precision(StrEnum):
    """A precision by the name that commands, reports and manifests use."""

    FP64 = "fp64"
    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    # Quantised products; all else in the graph, inputs and outputs included, is fp32.
    INT8 = "int8"

    @property
    def is_integer(self) -> bool:
        """An integer precision has no PyTorch run to be held to, so its error budget is declared."""
        return self is Precision.INT8

    @property
    def eps(self) -> float:
        """Distance from 1 to the next larger number (IEEE 754; bfloat16 keeps 8 significant bits)."""
        return {"fp64": 2.0**-52, "fp16": 2.0**-10, "bf16": 2.0**-7}.get(self, 2.0**-23)

    @property
    def dtype_name(self) -> str:
        """The name that numpy, torch and safetensors share: `float32`, `bfloat16`, ..."""
        return {"fp64": "float64", "fp16": "float16", "bf16": "bfloat16"}.get(self, "float32")

    @property
    def numpy(self) -> np.dtype[np.generic]:
        """The numpy dtype. bfloat16 comes from ml_dtypes, which onnx brings along."""
        return numpy_dtype(self.dtype_name)


def numpy_dtype(name: str) -> np.dtype[np.generic]:
    """A dtype by the name used in signatures, `bfloat16` included.

    Raises:
        SpecError: numpy knows no such dtype.
    """
    if name == "bfloat16":
        import ml_dtypes

        bfloat16: np.dtype[np.generic] = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    try:
        return np.dtype(name)
    except TypeError as error:
        raise SpecError(f"unknown dtype {name!r}; expected a numpy name such as float32 or bool") from error
