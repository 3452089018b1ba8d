"""What a lone request pays over a bare session: through the runner, and over HTTP."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from systems import free_port

from mha_deploy.errors import InputError
from mha_deploy.latency import nearest_rank
from mha_deploy.load import server_target
from mha_deploy.load.encoding import BinaryEncoding
from mha_deploy.load.inputs import Inputs
from mha_deploy.pipeline import export
from mha_deploy.ragged import Request
from mha_deploy.runner import BatchRunner, RunnerOptions
from mha_deploy.sessions import Placement
from mha_deploy.signature import Dim
from mha_deploy.spec import AttentionSpec

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "serving-overhead"
LENGTH, WIDTH = 128, 384
SPEC = AttentionSpec(
    d_model=WIDTH,
    num_heads=12,
    dims=(Dim("batch", 1, 1, 8), Dim("seq", 1, LENGTH, LENGTH)),
    name="serving-overhead",
)
ALLOWED_US = {"in_process": 150.0, "http": 600.0}
# Threads of a session that has just run spin for a moment; the next one's block must not meet that.
_PAUSE_S, _BLOCK, _UNRECORDED = 0.1, 50, 10


def measure(rounds: int, threads: int) -> dict[str, Any]:
    """Medians in microseconds of bare, in-process and HTTP requests, in alternating blocks.

    Each round gives one median of each, and so one overhead of each kind: a minute in which everything takes
    longer is in it once and not twice.
    """
    bundle = export(SPEC, FOLDER)
    feeds = Inputs.for_signature(bundle.signature, LENGTH).feeds(LENGTH, 0)
    placement, options = Placement(threads=threads), RunnerOptions(workers=1, threads=threads)
    request = Request({"x": feeds["x"][0]}, LENGTH, LENGTH)
    server, port = _server(bundle.folder, threads)
    try:
        with (
            bundle.open_session("", placement) as session,
            BatchRunner(lambda _: bundle.open_session("", placement), bundle.spec, options) as runner,
            socket.create_connection(("127.0.0.1", port)) as connection,
        ):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            ask = b"".join(BinaryEncoding(bundle.spec.name).request("localhost", feeds))
            kinds: dict[str, Callable[[], object]] = {
                "bare": lambda: session.run(feeds),
                "in_process": lambda: runner.submit(request).result(),
                "http": lambda: _exchange(connection, ask),
            }
            medians: dict[str, list[float]] = {name: [] for name in kinds}
            for number in range(rounds):
                names = list(kinds)
                for name in names[number % 3 :] + names[: number % 3]:
                    medians[name].append(_median_us(kinds[name]))
    finally:
        server.terminate()
        server.wait()
    return {
        "tensor": [LENGTH, WIDTH],
        "threads": threads,
        "medians_us": medians,
        "over_us": {
            name: [each - bare for each, bare in zip(medians[name], medians["bare"], strict=True)]
            for name in ALLOWED_US
        },
        "allowed_us": ALLOWED_US,
    }


def _median_us(call: Callable[[], object]) -> float:
    time.sleep(_PAUSE_S)
    for _ in range(_UNRECORDED):
        call()
    taken = np.empty(_BLOCK)
    for index in range(_BLOCK):
        begin = time.perf_counter()
        call()
        taken[index] = time.perf_counter() - begin
    return nearest_rank((taken * 1e6).tolist(), 0.5)


def _exchange(connection: socket.socket, ask: bytes) -> bytes:
    connection.sendall(ask)
    data = bytearray()
    while (end := data.find(b"\r\n\r\n")) < 0:
        data += connection.recv(1 << 18)
    head = data[:end].lower()
    if not head.startswith(b"http/1.1 200"):
        raise InputError(f"the server answered {bytes(data[:200])!r}")
    (length,) = (
        int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length:")
    )
    while len(data) < end + 4 + length:
        data += connection.recv(1 << 18)
    return bytes(data)


def _server(folder: Path, threads: int) -> tuple[subprocess.Popen[bytes], int]:
    port = free_port()
    command = [sys.executable, "-m", "mha_deploy", "serve", str(folder), "--port", str(port)]
    process = subprocess.Popen(
        [*command, "--workers", "1", "--threads", str(threads)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    for _ in range(480):
        try:
            server_target(f"http://127.0.0.1:{port}", LENGTH)
            return process, port
        except InputError:
            time.sleep(0.25)
    process.kill()
    raise InputError("this project's server did not answer within 120 s")


if __name__ == "__main__":
    print(json.dumps(measure(rounds=9, threads=os.cpu_count() or 1), indent=1))
