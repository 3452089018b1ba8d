"""The same ONNX file in every peer's process: requests [length, d_model] in, answers out."""

from __future__ import annotations

import numpy as np
import onnxruntime


class Block:
    """One ONNX Runtime session of so many threads; several requests are padded into one batch."""

    def __init__(self, model: str, threads: int) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self._session = onnxruntime.InferenceSession(model, options, ["CPUExecutionProvider"])
        self.width = int(self._session.get_inputs()[0].shape[-1])

    def __call__(self, requests: list[np.ndarray]) -> list[np.ndarray]:
        lengths = [len(request) for request in requests]
        if len(requests) == 1:
            x, mask = requests[0][None], np.ones((1, lengths[0]), bool)
        else:
            x = np.zeros((len(requests), max(lengths), self.width), np.float32)
            mask = np.zeros(x.shape[:2], bool)
            for row, request in enumerate(requests):
                x[row, : lengths[row]], mask[row, : lengths[row]] = request, True
        y = self._session.run(["y"], {"x": x, "mask": mask})[0]
        return [y[row, :length] for row, length in enumerate(lengths)]

    def from_bytes(self, data: bytes) -> np.ndarray:
        """A request of float32 rows."""
        return np.frombuffer(data, np.float32).reshape(-1, self.width)
