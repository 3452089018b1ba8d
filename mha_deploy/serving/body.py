"""Request bodies: read within limits of size and time into memory that tensors can be views of."""

from __future__ import annotations

import asyncio
import threading
import zlib
from typing import Self

import numpy as np
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestPayloadError
from aiohttp.web_request import BaseRequest

from mha_deploy.errors import RequestError
from mha_deploy.serving.limits import Limits
from mha_deploy.serving.wire import aligned, clip
from mha_deploy.signature import Array

# How zlib is to read each coding; both have a checksum at their end.
_WINDOW = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
_STEP = 1 << 20


class BodyBudget:
    """Bytes that the bodies of all requests in progress hold together."""

    def __init__(self, limit: int) -> None:
        self.limit, self.held = limit, 0
        self._lock = threading.Lock()  # bodies are unpacked beside the event loop

    def share(self) -> BodyShare:
        """One request's share; given back when its block ends."""
        return BodyShare(self)

    def take(self, count: int) -> None:
        """Raises RequestError (503) where all requests together would hold too much."""
        with self._lock:
            if self.held + count > self.limit:
                raise RequestError(
                    f"requests in progress hold {self.held} bytes, at most {self.limit}; try again", 503
                )
            self.held += count


class BodyShare:
    def __init__(self, budget: BodyBudget) -> None:
        self._budget, self.held = budget, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._budget.take(-self.held)

    def take(self, count: int) -> None:
        """Raises RequestError: 413 where this request alone would hold too much, else as the budget's."""
        if self.held + count > self._budget.limit:
            raise RequestError(
                f"this request would hold more than the {self._budget.limit} bytes that there are for all",
                413,
            )
        self._budget.take(count)
        self.held += count


async def read_body(request: BaseRequest, json_bytes: int, limits: Limits, share: BodyShare) -> Array:
    """The body (uint8), decompressed, with the byte at `json_bytes` on a cache line.

    Raises:
        RequestError: 400 (framing, coding), 408 (too slow), 411, 413, 415 (unknown coding), 417, 503.
    """
    coding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if coding not in ("identity", *_WINDOW):
        raise RequestError(f"Content-Encoding {clip(coding)}; expected gzip, deflate or none", 415)
    length = _declared_length(request, limits)
    _answer_expectation(request)
    if coding == "identity" and length >= 0:
        return await _read_known(request, length, json_bytes, limits, share)
    packed = await _read_unknown(request, limits, share)
    if coding == "identity":
        return _placed(packed, json_bytes)
    return await asyncio.get_running_loop().run_in_executor(
        None, lambda: _placed(_unpack(packed, coding, limits, share), json_bytes)
    )


def _declared_length(request: BaseRequest, limits: Limits) -> int:
    """Content-Length, or -1 for a chunked body."""
    text = request.headers.get("Content-Length")
    if text is None:
        coding = request.headers.get("Transfer-Encoding", "")
        if not coding:
            raise RequestError("a body needs Content-Length, or Transfer-Encoding: chunked", 411)
        if coding.strip().lower() != "chunked":
            raise RequestError(f"Transfer-Encoding: {clip(coding)}; only chunked is known")
        return -1
    if int(text) > limits.body_bytes:
        raise RequestError(f"a body of {clip(text)} bytes; at most {limits.body_bytes} are taken", 413)
    return int(text)


def _answer_expectation(request: BaseRequest) -> None:
    expect = request.headers.get("Expect", "")
    if not expect:
        return
    if expect.lower() != "100-continue":
        raise RequestError(f"Expect: {clip(expect)}; only 100-continue is known", 417)
    if request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


async def _read_known(
    request: BaseRequest, length: int, json_bytes: int, limits: Limits, share: BodyShare
) -> Array:
    # Memory that is not written to is not taken: a sender who promises much and sends little holds little.
    body, filled = aligned(length, json_bytes), 0
    async for chunk in _chunks(request, limits):
        share.take(len(chunk))
        body[filled : filled + len(chunk)] = np.frombuffer(chunk, np.uint8)
        filled += len(chunk)
        if filled == length:
            break
    return body


async def _read_unknown(request: BaseRequest, limits: Limits, share: BodyShare) -> bytearray:
    body = bytearray()  # and no list of pieces: a sender may make each of one byte
    async for chunk in _chunks(request, limits):
        if len(body) + len(chunk) > limits.body_bytes:
            raise RequestError(f"a body of more than {limits.body_bytes} bytes; no more are taken", 413)
        share.take(len(chunk))
        body += chunk
    return body


class _chunks:  # noqa: N801 (used as a function; an async generator costs a task switch more a chunk)
    """What arrives of a body, as it arrives, within the time that `limits` gives it."""

    def __init__(self, request: BaseRequest, limits: Limits) -> None:
        self._content, self._limits = request.content, limits
        self._loop = asyncio.get_running_loop()
        self._begin, self._received = self._loop.time(), 0

    def __aiter__(self) -> _chunks:
        return self

    async def __anext__(self) -> bytes:
        chunk = b""
        try:
            while not chunk and not self._content.at_eof():
                if self._content.is_eof():  # all of it is here: there is nothing to wait for
                    chunk, _ = await self._content.readchunk()
                    continue
                allowed = self._limits.body_s + self._received / self._limits.body_bytes_per_s
                async with asyncio.timeout_at(self._begin + allowed):
                    chunk, _ = await self._content.readchunk()
        except TimeoutError as error:
            raise RequestError(f"the body came too slowly: {self._received} bytes so far", 408) from error
        except (HttpProcessingError, RequestPayloadError) as error:
            raise RequestError("the body is framed wrongly, or ended too early") from error
        if not chunk:
            raise StopAsyncIteration
        self._received += len(chunk)
        return chunk


def _placed(body: bytes | bytearray, json_bytes: int) -> Array:
    place = aligned(len(body), json_bytes)
    place[:] = np.frombuffer(body, np.uint8)
    return place


def _unpack(packed: bytearray, coding: str, limits: Limits, share: BodyShare) -> bytearray:
    """The decompressed body, in steps, so that a bomb is known by its limit and not by its size."""
    unpacker, body = zlib.decompressobj(_WINDOW[coding]), bytearray()
    rest: bytes | bytearray = packed
    try:
        while not unpacker.eof:
            piece = unpacker.decompress(rest, _STEP)
            rest = unpacker.unconsumed_tail
            if not piece and not rest and not unpacker.eof:
                raise RequestError(f"the {coding} body ends too early")
            if len(body) + len(piece) > limits.body_bytes:
                raise RequestError(
                    f"the {coding} body unpacks to more than {limits.body_bytes} bytes; no more are taken",
                    413,
                )
            share.take(len(piece))
            body += piece
    except zlib.error as error:
        raise RequestError(f"the body is not {coding}") from error
    if unpacker.unused_data:
        raise RequestError(f"bytes follow the {coding} body")
    return body
