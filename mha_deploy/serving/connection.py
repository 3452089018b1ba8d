"""One HTTP connection: aiohttp's, with limits of time and size on what comes before a body, and with
every error as JSON."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any, cast

from aiohttp import StreamReader
from aiohttp.http import HttpRequestParser
from aiohttp.http_exceptions import LineTooLong
from aiohttp.web import Response, Server
from aiohttp.web_protocol import RequestHandler, RequestPayloadError
from aiohttp.web_request import BaseRequest

from mha_deploy.serving.limits import Limits

_HEADERS, _LINE = 64, 8190
# Of what has arrived twice as much may wait to be read, and no more is received until it is: less than a
# common body would stop and start the receiving of each.
_UNREAD = 1 << 17
SERVER = "mha-deploy"  # aiohttp would tell its version and Python's
_REASONS = {408: "Request Timeout", 431: "Request Header Fields Too Large", 503: "Service Unavailable"}


class Connection(RequestHandler):
    """A request's head must arrive within `limits.header_s` and `limits.header_bytes`, counted from its
    first byte; there are at most `limits.connections` at once. Who does not take what is written to it
    within `limits.write_s` is dropped.

    A client that ends its side has left, and what it asked for is cancelled. One that only ended its sending
    (half-closed, as HTTP/1.1 allows) shows the same end of file, and nothing else tells them apart until an
    answer was written: to serve it, all work of clients that left would have to be done too.
    """

    __slots__ = ("_body", "_head_bytes", "_head_timer", "_limits", "_socket", "_write_timer")

    def __init__(self, manager: Server, loop: asyncio.AbstractEventLoop, limits: Limits) -> None:
        super().__init__(
            manager,
            loop=loop,
            access_log=None,  # type: ignore[arg-type]  # aiohttp: none is kept then
            keepalive_timeout=limits.idle_s,
            lingering_time=1.0,
            read_bufsize=_UNREAD,
            auto_decompress=False,
            max_headers=_HEADERS,
            max_line_size=_LINE,
            max_field_size=_LINE,
        )
        # One that stops behind each message: what is wrong behind one takes nothing from it.
        with contextlib.suppress(AttributeError, TypeError):  # an aiohttp whose parser cannot
            self._parser = HttpRequestParser(
                self,
                loop,
                self._read_bufsize,
                max_line_size=_LINE,
                max_headers=_HEADERS,
                max_field_size=_LINE,
                payload_exception=RequestPayloadError,
                auto_decompress=False,
                max_msg_queue_size=1,
            )
        self._limits, self._head_bytes = limits, 0
        self._body: StreamReader | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._socket: asyncio.Transport | None = None  # aiohttp forgets its own while it is closing

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        manager = self._manager
        super().connection_made(transport)
        self._socket = cast(asyncio.Transport, transport)
        if manager is not None and len(manager.connections) > self._limits.connections:
            self._refuse(503, "too many connections; try again")

    def connection_lost(self, exc: BaseException | None) -> None:
        self._head_ended()
        self._write_ended()
        super().connection_lost(exc)

    # A timer for each answer would cost everybody: what is timed is more than the transport likes to hold,
    # and what is left when the connection is to close, which would wait for it.
    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_begun()

    async def start(self) -> None:
        try:
            await super().start()
        finally:
            self._write_last()

    def force_close(self) -> None:
        super().force_close()
        self._write_last()

    def _write_last(self) -> None:
        if self._socket is not None and self._socket.get_write_buffer_size():
            self._write_begun()

    def _write_begun(self) -> None:
        if self._write_timer is None:
            self._write_timer = self._loop.call_later(self._limits.write_s, self._write_late)

    def resume_writing(self) -> None:
        self._write_ended()
        super().resume_writing()

    def _write_late(self) -> None:
        if self._socket is not None:
            self._socket.abort()

    def _write_ended(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def data_received(self, data: bytes) -> None:
        # Message by message, as the parser stops behind each; aiohttp goes on where its queue was full.
        most = getattr(self, "_max_msg_queue_size", 0)
        while self._parsed(data) and len(self._messages) < most:
            data = b""

    def _parsed(self, data: bytes) -> bool:
        """Take up to the end of one message; whether one began or ended, so that there may be more."""
        in_body = self._body is not None and not self._body.is_eof()
        known = len(self._messages)
        super().data_received(data)
        if len(self._messages) > known:
            self._head_ended()
            message, payload = self._messages[-1]
            if hasattr(message, "exc") and in_body and self._body is not None:
                # The parser gave up within a body; whoever reads that would wait for its rest.
                self._body.set_exception(RequestPayloadError("the body is framed wrongly"))
            self._body = payload if isinstance(payload, StreamReader) else None
            # Of a message whose body goes on, the parser has taken all that there is.
            return not hasattr(message, "exc") and payload.is_eof()
        if data and not in_body and not known and not self._request_in_progress:
            self._head_grew(len(data))
        return in_body and self._body is not None and self._body.is_eof()

    def _waits(self) -> bool:
        """Whether no request is being handled, so that what arrives is the next one's head."""
        return self._waiter is not None and not self._waiter.done()

    def _head_grew(self, count: int) -> None:
        self._head_bytes += count
        if self._head_bytes > self._limits.header_bytes:
            self._refuse(431, f"a head of more than {self._limits.header_bytes} bytes")
        elif self._head_timer is None:
            self._head_timer = self._loop.call_later(self._limits.header_s, self._head_late)

    def _head_late(self) -> None:
        self._head_timer = None
        if self._waits():
            self._refuse(408, f"no whole head within {self._limits.header_s:g} s")

    def _head_ended(self) -> None:
        self._head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, status: int, message: str) -> None:
        """Answer without a request to answer to, and close."""
        body = json.dumps({"error": message}).encode()
        retry = "Retry-After: 1\r\n" if status == 503 else ""
        head = (
            f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: application/json\r\n"
            f"Server: {SERVER}\r\n{retry}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self._head_ended()
        if self.transport is not None:
            self.transport.write(head.encode() + body)
        self.force_close()

    def handle_error(
        self,
        request: BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002 (aiohttp's parameter)
    ) -> Response:
        """What aiohttp answers where no handler could: never its own text, which quotes the request."""
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun; nothing else can be sent")
        status = 431 if isinstance(exc, LineTooLong) else status
        text = {400: "malformed HTTP", 431: "a line or header is too long"}.get(status, "an internal error")
        response = error_response(status, text)
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: aiohttp's records quote what clients sent."""


def error_response(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return Response(
        status=status,
        body=json.dumps({"error": message}).encode(),
        content_type="application/json",
        headers={"Server": SERVER, **(headers or {})},
    )
