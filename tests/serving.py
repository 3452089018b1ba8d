"""A server on a real socket in a thread of its own, and raw requests to it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from conftest import small_spec

from mha_deploy.runner import BatchRunner, RunnerOptions
from mha_deploy.serving import ServeOptions, Server
from mha_deploy.sessions.fake import FakeSession

MODEL = "small"
INFER = f"/v2/models/{MODEL}/infer"
WIDTH = 32


def until(condition, timeout_s=10.0):
    """Wait for what another thread does."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.002)


class Running:
    """A started server; `call` runs a coroutine function in its loop."""

    def __init__(self, runner: BatchRunner, options: ServeOptions) -> None:
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(runner, options), daemon=True)
        self._thread.start()
        self._started.wait(30)
        if self._failure:
            raise self._failure

    def _run(self, runner, options):
        with asyncio.Runner() as loop:
            loop.run(self._serve(runner, options))

    async def _serve(self, runner, options):
        self.loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        try:
            self.server = Server(runner, options)
            await self.server.start()
        except BaseException as error:
            self._failure = error
            return
        finally:
            self._started.set()
        await self._ended.wait()

    def call(self, coroutine, timeout_s=30):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout_s)

    async def connections(self):
        """The connections that have not ended."""
        front = self.server._closing[0].__self__
        return front._server.connections

    def unsent(self):
        """Bytes of answers that wait for their clients."""
        transports = [each.transport for each in self.call(self.connections())]
        return sum(each.get_write_buffer_size() for each in transports if each)

    def stop(self, grace_s=5.0):
        report = self.call(self.server.stop(grace_s))
        self.loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(30)
        return report

    @property
    def port(self):
        return self.server.port

    @property
    def stats(self):
        return self.server.model.stats

    @property
    def runner(self):
        return self.server.model.runner


@contextmanager
def serving(runner, **options):
    """A server over `runner` on a free port of the loopback, stopped when the block ends."""
    running = Running(runner, ServeOptions(**{"port": 0, **options}))
    try:
        yield running
    finally:
        if running._thread.is_alive():
            running.stop(0.0)


def free_port():
    """For gRPC, where 0 means none."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def bundle_runner(bundle):
    """One session of one thread over a bundle, without calibration."""
    return BatchRunner(
        lambda _threads: bundle.open_session(), bundle.spec, RunnerOptions(workers=1, threads=1)
    )


def fake_runner(function=lambda feeds: {"y": feeds["x"]}, spec=None, **options):
    """A runner whose sessions answer `function(feeds)`: by default what they were given."""
    spec = spec or small_spec()
    return BatchRunner(
        lambda _threads: FakeSession(spec.signature, function), spec, RunnerOptions(workers=1, **options)
    )


def infer_body(x, mask=None, **parameters):
    """JSON and raw tensors of an infer request, and the length of the JSON."""
    inputs = [_described("x", x, "FP32")]
    raw = x.tobytes()
    if mask is not None:
        inputs.append(_described("mask", mask, "BOOL"))
        raw += mask.tobytes()
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True, **parameters}}).encode()
    return head + raw, len(head)


def _described(name, array, datatype):
    size = {"binary_data_size": array.nbytes}
    return {"name": name, "shape": list(array.shape), "datatype": datatype, "parameters": size}


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def y(self):
        """The raw output of an infer answer."""
        head = int(self.headers["inference-header-content-length"])
        (output,) = json.loads(self.body[:head])["outputs"]
        return np.frombuffer(self.body[head:], np.float32).reshape(output["shape"])


class Connection:
    """A raw connection: bytes out, replies in."""

    def __init__(self, port, timeout_s=20.0):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=timeout_s)
        self._rest = b""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def send(self, data):
        self.socket.sendall(data)

    def closed(self):
        """Whether the other side has closed, once everything that it sent was read."""
        while data := self._receive():
            self._rest += data
        return True

    def reply(self):
        """The next reply; None where the connection ended without one."""
        while b"\r\n\r\n" not in self._rest:
            data = self._receive()
            if not data:
                return None
            self._rest += data
        head, self._rest = self._rest.split(b"\r\n\r\n", 1)
        first, *lines = head.decode().split("\r\n")
        headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
        while len(self._rest) < int(headers.get("content-length", 0)):
            data = self._receive()
            assert data, "the connection ended within a body"
            self._rest += data
        length = int(headers.get("content-length", 0))
        body, self._rest = self._rest[:length], self._rest[length:]
        return Reply(int(first.split()[1]), headers, body)

    def _receive(self):
        try:
            return self.socket.recv(1 << 20)
        except ConnectionError:
            return b""


def http(method, path, body=b"", **headers):
    """A request's bytes; a header of value None is left out."""
    given = {"host": "localhost", "content_length": str(len(body)), **headers}
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in given.items() if value is not None]
    return "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "\r\n"]).encode() + body


def infer_request(x, mask=None, headers=None, **parameters):
    body, head = infer_body(x, mask, **parameters)
    return http("POST", INFER, body, **{"inference_header_content_length": str(head), **(headers or {})})


def ask(port, data):
    """One request on a connection of its own."""
    with Connection(port) as connection:
        connection.send(data)
        return connection.reply()


def get(port, path, **headers):
    return ask(port, http("GET", path, **headers))
