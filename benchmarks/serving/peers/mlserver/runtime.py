"""The block as an MLServer runtime. Its HTTP has no binary tensors: they travel as base64 in BYTES."""

from __future__ import annotations

import asyncio
import base64
import os
from concurrent.futures import ThreadPoolExecutor

from block import Block
from mlserver import MLModel
from mlserver.types import InferenceRequest, InferenceResponse, ResponseOutput


class Attention(MLModel):
    """Requests that adaptive batching brings together arrive as one, with an element each."""

    async def load(self) -> bool:
        # Each session is run by a thread of its own.
        workers, threads = (int(os.environ[name]) for name in ("BLOCK_WORKERS", "BLOCK_THREADS"))
        self._pool = ThreadPoolExecutor(workers)
        self._free = [Block(os.environ["BLOCK_MODEL"], threads) for _ in range(workers)]
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        texts = list(payload.inputs[0].data.root)
        loop = asyncio.get_running_loop()
        answers = await loop.run_in_executor(self._pool, self._run, texts)
        output = ResponseOutput(name="y", shape=[len(answers)], datatype="BYTES", data=answers)
        return InferenceResponse(model_name=self.name, outputs=[output])

    def _run(self, texts: list[str | bytes]) -> list[str]:
        block = self._free.pop()
        try:
            answers = block([block.from_bytes(base64.b64decode(text)) for text in texts])
        finally:
            self._free.append(block)
        return [base64.b64encode(y.tobytes()).decode() for y in answers]
