"""The block as a model of Triton's Python backend."""

from __future__ import annotations

import os
import sys

import triton_python_backend_utils as pb_utils

sys.path[:0] = os.environ["BLOCK_PATH"].split(":")
from block import Block  # noqa: E402


class TritonPythonModel:
    """Requests that the dynamic batcher brings together are of equal length, and run as one batch."""

    def initialize(self, _args: dict[str, str]) -> None:
        self._block = Block(os.environ["BLOCK_MODEL"], int(os.environ["BLOCK_THREADS"]))

    def execute(self, requests: list) -> list:
        rows = [pb_utils.get_input_tensor_by_name(each, "x").as_numpy()[0] for each in requests]
        answers = self._block(rows)
        return [pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("y", y[None])]) for y in answers]
