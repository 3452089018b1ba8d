"""The floor: the least that a Python process can do for a request which ONNX Runtime is to answer.

One event loop, one queue and a thread for each core, as in `mha-deploy serve`, but nothing else: no checks,
limits, deadlines, figures or errors. What it costs, no such server can do without; it is no server to use.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import queue
import sys
import threading
from functools import lru_cache
from typing import Any

import numpy as np
import onnxruntime
import uvloop

MODEL = "block"
SWITCH_S = 0.0002  # as `serve` has it
HEAD_LENGTH = b"inference-header-content-length"
Job = tuple[asyncio.Transport, np.ndarray]


class Connection(asyncio.Protocol):
    """Puts whole requests into the queue; what is no inference gets the model's metadata."""

    def __init__(self, jobs: queue.SimpleQueue[Job], metadata: dict[str, Any], width: int) -> None:
        self._jobs, self._metadata, self._width = jobs, json.dumps(metadata).encode(), width
        self._data, self._end = bytearray(), 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        if not self._end:
            blank = self._data.find(b"\r\n\r\n")
            if blank < 0:
                return
            self._asks, self._json_at, self._json_bytes, body_bytes = _head(bytes(self._data[: blank + 4]))
            self._end = self._json_at + body_bytes
        if len(self._data) >= self._end:
            whole, self._data, self._end = self._data, bytearray(), 0
            self._take(whole)

    def _take(self, request: bytearray) -> None:
        if not self._asks:
            self._transport.write(_answer(self._metadata, b""))
            self._transport.close()
            return
        raw_at = self._json_at + self._json_bytes
        length = _length(bytes(request[self._json_at : raw_at]))
        # A copy, which makes it aligned.
        x = np.frombuffer(request[raw_at : raw_at + 4 * length * self._width], np.float32)
        self._jobs.put((self._transport, x.reshape(1, length, self._width)))


@lru_cache(1024)
def _head(head: bytes) -> tuple[bool, int, int, int]:
    """Whether it asks for an inference; where the body begins; the bytes of its JSON, and of all of it."""
    line, *lines = head.split(b"\r\n")[:-2]
    fields = {name.lower(): value.strip() for name, _, value in (each.partition(b":") for each in lines)}
    sizes = (int(fields.get(name, 0)) for name in (HEAD_LENGTH, b"content-length"))
    return b"/infer " in line, len(head), *sizes


@lru_cache(1024)
def _length(text: bytes) -> int:
    return int(json.loads(text)["inputs"][0]["shape"][1])


@lru_cache(1024)
def _json(shape: tuple[int, ...], nbytes: int) -> bytes:
    output = {"name": "y", "datatype": "FP32", "shape": shape, "parameters": {"binary_data_size": nbytes}}
    return json.dumps({"model_name": MODEL, "outputs": [output]}).encode()


def _answer(text: bytes, raw: bytes | memoryview) -> bytes:
    head = b"HTTP/1.1 200 OK\r\n%b: %d\r\nContent-Length: %d\r\n\r\n"
    return b"".join((head % (HEAD_LENGTH, len(text), len(text) + len(raw)), text, raw))


def _work(session: Any, jobs: queue.SimpleQueue[Job], loop: asyncio.AbstractEventLoop) -> None:
    while True:
        transport, x = jobs.get()
        y = session.run(["y"], {"x": x, "mask": np.ones(x.shape[:2], bool)})[0]
        answer = _answer(_json(y.shape, y.nbytes), y.reshape(-1).view(np.uint8).data)
        loop.call_soon_threadsafe(transport.write, answer)


async def _serve(model: str, port: int, workers: int) -> None:
    loop = asyncio.get_running_loop()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model, options, ["CPUExecutionProvider"])
    width = int(session.get_inputs()[0].shape[-1])
    tensors = [
        {"name": "x", "datatype": "FP32", "shape": [-1, -1, width]},
        {"name": "mask", "datatype": "BOOL", "shape": [-1, -1]},
    ]
    jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for _ in range(workers):
        threading.Thread(target=_work, args=(session, jobs, loop), daemon=True).start()
    metadata = {"name": MODEL, "inputs": tensors}
    server = await loop.create_server(lambda: Connection(jobs, metadata, width), "127.0.0.1", port)
    await server.serve_forever()


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--workers", type=int, required=True)
    options = parser.parse_args()
    sys.setswitchinterval(SWITCH_S)
    uvloop.run(_serve(options.model, options.port, options.workers))


main()
