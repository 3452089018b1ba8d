"""LitServe: its bodies are JSON, so tensors travel as base64 in it. "batched" lets a worker wait for more
requests; without any window it spins while it is idle."""

from __future__ import annotations

import base64

import litserve
import numpy as np
from arguments import arguments
from block import Block

OPTIONS = arguments(__file__)
BATCHED = OPTIONS.variant == "batched"


class Attention(litserve.LitAPI):
    """`predict` gets one request, or a list of them where it batches."""

    def setup(self, _device: str) -> None:
        self._block = Block(OPTIONS.model, OPTIONS.threads)

    def decode_request(self, request: dict) -> np.ndarray:
        return self._block.from_bytes(base64.b64decode(request["x"]))

    def batch(self, inputs: list) -> list:
        return inputs

    def predict(self, x: object) -> object:
        return self._block(x) if BATCHED else self._block([x])[0]

    def unbatch(self, output: list) -> list:
        return output

    def encode_response(self, output: np.ndarray) -> dict:
        return {"y": base64.b64encode(np.ascontiguousarray(output)).decode()}


if __name__ == "__main__":
    batching = {"max_batch_size": OPTIONS.largest_batch, "batch_timeout": OPTIONS.window_ms / 1e3}
    api = Attention(**batching) if BATCHED else Attention()
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=OPTIONS.workers)
    server.run(host="127.0.0.1", port=OPTIONS.port, log_level="warning", generate_client_file=False)
