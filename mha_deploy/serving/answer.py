"""An answer to an infer request, as bytes on the connection.

aiohttp's own response is a table of headers, checked and written header by header: that took a seventh of
the event loop's time for a request.
"""

from __future__ import annotations

import time
from email.utils import formatdate
from functools import lru_cache
from typing import Any

from aiohttp.web import StreamResponse
from aiohttp.web_request import BaseRequest

from mha_deploy.serving.connection import SERVER

HEAD_LENGTH = "Inference-Header-Content-Length"
# An answer of so many bytes is put together and written at once: copying them takes less than a system call,
# and uvloop makes one for each piece.
_ONE_WRITE = 1 << 18

Piece = bytes | memoryview


class _Sent(StreamResponse):
    """What aiohttp is told: that nothing is left to send, and whether the connection stays."""

    def __init__(self, *, keep_alive: bool) -> None:
        super().__init__()
        self._keep_alive = keep_alive

    @property
    def prepared(self) -> bool:
        return True

    async def prepare(self, request: BaseRequest) -> None:  # noqa: ARG002 (aiohttp's parameter)
        return None

    async def write_eof(self, data: Any = b"") -> None:  # noqa: ARG002 (aiohttp's parameter)
        return None


_KEPT, _CLOSED = _Sent(keep_alive=True), _Sent(keep_alive=False)


async def send_answer(
    request: BaseRequest, pieces: list[Piece], timing: str, *, close: bool
) -> StreamResponse:
    """Send `pieces`: a JSON text, and y's bytes behind it where it goes as binary data.

    `timing` is the value of Server-Timing, and `close` says that it is the connection's last answer.

    Raises:
        ConnectionError: the client is gone, or does not take its answer (see `Connection`).
    """
    keep, length = request.keep_alive and not close, sum(map(len, pieces))
    head = _head(request, pieces, length, timing, keep=keep)
    # A large tensor goes uncopied.
    joined = len(pieces) if length <= _ONE_WRITE else 1
    *first, last = [b"".join((head, *pieces[:joined])), *pieces[joined:]]
    for piece in first:
        await request.writer.write(piece)
    await request.writer.write_eof(last)  # type: ignore[arg-type]  # a memoryview does as well
    return _KEPT if keep else _CLOSED


def _head(request: BaseRequest, pieces: list[Piece], length: int, timing: str, *, keep: bool) -> bytes:
    """The status line and the headers (RFC 9112), to the empty line."""
    major, minor = request.version
    if len(pieces) > 1:
        kind = f"application/octet-stream\r\n{HEAD_LENGTH}: {len(pieces[0])}"
    else:
        kind = "application/json"
    # What needs no words: that a connection of HTTP/1.1 stays, and that one of HTTP/1.0 does not.
    connection = "" if keep is (minor > 0) else f"Connection: {'keep-alive' if keep else 'close'}\r\n"
    return (
        f"HTTP/{major}.{minor} 200 OK\r\nServer: {SERVER}\r\nDate: {_date(int(time.time()))}\r\n"
        f"Server-Timing: {timing}\r\nContent-Type: {kind}\r\n{connection}"
        f"Content-Length: {length}\r\n\r\n"
    ).encode("ascii")


@lru_cache(1)
def _date(second: int) -> str:
    return formatdate(second, usegmt=True)
