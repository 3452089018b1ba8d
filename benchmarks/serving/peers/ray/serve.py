"""Ray Serve: bodies are raw bytes. "batched" is @serve.batch."""

from __future__ import annotations

import logging

import ray
from arguments import arguments
from block import Block
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

OPTIONS = arguments(__file__)


@serve.deployment(num_replicas=OPTIONS.workers, max_ongoing_requests=64, ray_actor_options={"num_cpus": 0.5})
class Attention:
    """One replica."""

    def __init__(self, model: str, threads: int, batched: bool) -> None:
        self._block, self._batched = Block(model, threads), batched

    @serve.batch(max_batch_size=OPTIONS.largest_batch, batch_wait_timeout_s=OPTIONS.window_ms / 1e3)
    async def _together(self, bodies: list[bytes]) -> list[bytes]:
        answers = self._block([self._block.from_bytes(body) for body in bodies])
        return [y.tobytes() for y in answers]

    async def __call__(self, request: Request) -> Response:
        body = await request.body()
        if self._batched:
            return Response(await self._together(body))
        return Response(self._block([self._block.from_bytes(body)])[0].tobytes())


if __name__ == "__main__":
    ray.init(
        num_cpus=OPTIONS.workers, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False
    )
    serve.start(http_options={"host": "127.0.0.1", "port": OPTIONS.port, "access_log": False})
    serve.run(Attention.bind(OPTIONS.model, OPTIONS.threads, OPTIONS.variant == "batched"), blocking=True)
