"""A client that costs little: HTTP/1.1 over raw connections, one request at a time on each."""

from __future__ import annotations

import asyncio
import time
from typing import cast

from mha_deploy.errors import InputError
from mha_deploy.load.encoding import Encoding, Pieces, Reply
from mha_deploy.load.inputs import VARIANTS, Inputs
from mha_deploy.load.records import Outcome
from mha_deploy.load.target import Done, Target, variant_of
from mha_deploy.serving.wire import clip
from mha_deploy.signature import Array

_OUTCOMES = {200: Outcome.ANSWERED, 429: Outcome.REFUSED, 503: Outcome.REFUSED, 504: Outcome.EXPIRED}
_OPENED_BEFORE = 16
CONNECT_S = 10.0


class Connection(asyncio.Protocol):
    """One connection of the pool; `ask` while it is idle."""

    def __init__(self, pool: HttpTarget) -> None:
        self._pool = pool
        self._transport = cast(asyncio.Transport, None)
        self._index, self._done = -1, cast(Done, None)
        self._buffer = bytearray()
        self._expected = self._body_at = 0
        self._status, self._headers = 0, dict[str, str]()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def ask(self, index: int, pieces: Pieces, done: Done) -> None:
        self._index, self._done = index, done
        self._transport.writelines(pieces)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._expected and not self._read_head():
            return
        if len(self._buffer) >= self._expected:
            self._finish(time.monotonic())

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        first, *lines = self._buffer[:end].decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines)
        self._headers = {name.lower(): value.strip() for name, _, value in pairs}
        try:
            self._status = int(first.split(" ", 2)[1])
            self._body_at = end + 4
            self._expected = self._body_at + int(self._headers["content-length"])
        except (LookupError, ValueError):
            self._fail(Outcome.ERROR, f"an answer without a status and a length: {clip(first)}")
            return False
        return True

    def _finish(self, now_s: float) -> None:
        body = bytes(memoryview(self._buffer)[self._body_at : self._expected])
        reply = Reply(self._status, self._headers, body)
        whole = len(self._buffer) == self._expected
        self._buffer, self._expected = bytearray(), 0
        index, self._index = self._index, -1
        if not whole or reply.headers.get("connection", "").lower() == "close":
            self._transport.close()
        else:
            self._pool.idle.append(self)
        if index >= 0:
            outcome = _OUTCOMES.get(reply.status, Outcome.ERROR)
            note = "" if reply.status == 200 else f"status {reply.status}: {clip(text_of(body))}"
            self._done(index, outcome, now_s, reply, note)

    def _fail(self, outcome: Outcome, note: str) -> None:
        index, self._index = self._index, -1
        self._transport.close()
        if index >= 0:
            self._done(index, outcome, time.monotonic(), b"", note)

    def connection_lost(self, error: Exception | None) -> None:
        self._pool.lost(self)
        self._fail(Outcome.DISCONNECTED, f"the connection ended before the answer ({error or 'closed'})")

    def close(self) -> None:
        self._index = -1
        self._transport.close()


class HttpTarget(Target):
    """A server at `host`:`port`, spoken to in an `Encoding`; connections are opened as they are needed."""

    def __init__(self, name: str, host: str, port: int, encoding: Encoding, inputs: Inputs) -> None:
        self.name, self.inputs = name, inputs
        self.idle: list[Connection] = []
        self._host, self._port, self._encoding = host, port, encoding
        self._all: set[Connection] = set()
        self._requests: dict[tuple[int, int], Pieces] = {}
        self._opening: set[asyncio.Task[None]] = set()
        self._loop = cast(asyncio.AbstractEventLoop, None)

    async def open(self, lengths: Array) -> None:
        self._loop = asyncio.get_running_loop()
        host = f"{self._host}:{self._port}"
        for length in {int(length) for length in lengths}:
            for variant in range(VARIANTS):
                feeds = self.inputs.feeds(length, variant)
                self._requests[length, variant] = self._encoding.request(host, feeds)
        try:
            while len(self.idle) < _OPENED_BEFORE:
                self.idle.append(await self._connected())
        except OSError as error:
            raise InputError(f"cannot connect to {host}: {reason_of(error)}") from error

    async def _connected(self) -> Connection:
        async with asyncio.timeout(CONNECT_S):
            _, connection = await self._loop.create_connection(
                lambda: Connection(self), self._host, self._port
            )
        self._all.add(connection)
        return connection

    def send(self, index: int, length: int, done: Done) -> None:
        pieces = self._requests[length, variant_of(index)]
        if self.idle:
            self.idle.pop().ask(index, pieces, done)
            return
        task = self._loop.create_task(self._send_on_a_new_one(index, pieces, done))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _send_on_a_new_one(self, index: int, pieces: Pieces, done: Done) -> None:
        try:
            connection = await self._connected()
        except OSError as error:
            note = f"no connection: {reason_of(error)}"
            done(index, Outcome.DISCONNECTED, time.monotonic(), b"", note)
            return
        connection.ask(index, pieces, done)

    def lost(self, connection: Connection) -> None:
        self._all.discard(connection)
        if connection in self.idle:
            self.idle.remove(connection)

    def decode(self, answer: object) -> Array:
        return self._encoding.answer(cast(Reply, answer))

    async def close(self) -> None:
        for task in self._opening:
            task.cancel()
        for connection in list(self._all):
            connection.close()
        self.idle.clear()
        await asyncio.sleep(0)


def text_of(body: bytes) -> str:
    return body[:200].decode("utf-8", "replace")


def reason_of(error: OSError) -> str:
    """Why there was no connection or answer; a time of ours that ran out has no words of its own."""
    return error.strerror or str(error) or f"no answer within {CONNECT_S:g} s"
