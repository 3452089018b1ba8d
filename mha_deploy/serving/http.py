"""The Open Inference Protocol v2 over HTTP/1.1, metrics and the live page: paths -> handlers."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
from aiohttp import StreamReader
from aiohttp.web import Response, Server, StreamResponse
from aiohttp.web_request import BaseRequest

from mha_deploy.errors import RequestError, RunnerClosedError
from mha_deploy.runner import Answer
from mha_deploy.serving import metrics
from mha_deploy.serving.answer import HEAD_LENGTH, Piece, send_answer
from mha_deploy.serving.body import BodyBudget, BodyShare, read_body
from mha_deploy.serving.connection import SERVER, Connection, error_response
from mha_deploy.serving.faults import fault_of, no_control
from mha_deploy.serving.model import VERSION, Model, phases_header, server_metadata
from mha_deploy.serving.protocol import OUTPUT, InferRequest, Parser, json_text, parse_object
from mha_deploy.serving.rows import Rows, joined
from mha_deploy.serving.security import authorized
from mha_deploy.serving.wire import clip, to_json
from mha_deploy.signature import Array

# Work on less than this is done in the event loop: a hop to another thread takes longer.
_INLINE_JSON, _INLINE_BYTES = 1 << 14, 1 << 20
# So many JSON texts of answers are kept, of requests without an id: one for each length there is.
_HEADS = 512
_VERSIONS = ((1, 0), (1, 1))
# The page loads nothing from anywhere but here.
_PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"

Handler = Callable[[BaseRequest], Awaitable[StreamResponse]]


@dataclass(frozen=True, slots=True)
class Route:
    """What a path answers to; `open` paths need no token: probes carry none, the page holds no data."""

    method: str
    handler: Handler
    open: bool = False


class HttpFront:
    """HTTP requests -> the model, and errors -> JSON with the status that `faults` gives them.

    `protocol()` makes a connection for `loop.create_server`.
    """

    def __init__(self, model: Model, token: str) -> None:
        self._model, self._token = model, token
        self._parse = Parser(model.limits)
        self._known_head = lru_cache(_HEADS)(self._written_head)
        self.budget = BodyBudget(model.limits.bodies_bytes)
        self._server = Server(self._handle, handler_cancellation=True)
        self._arriving: set[StreamReader] = set()
        self._fixed = {
            "": Route("GET", self._page, open=True),
            "live.json": Route("GET", self._live),
            "metrics": Route("GET", self._metrics),
            "v2": Route("GET", _constant(server_metadata())),
            "v2/health/live": Route("GET", _constant({"live": True}), open=True),
            "v2/health/ready": Route("GET", self._ready, open=True),
            "v2/models/stats": Route("GET", self._stats),
            "v2/repository/index": Route("POST", self._index),
        }
        self._infer_path = f"/v2/models/{quote(model.name, safe='')}/infer"
        self._infer_route = self._model_route(model.name, "", "infer")
        self._of_model = {
            "": _constant(model.metadata()),
            "ready": self._model_ready,
            "config": self._config,
            "stats": self._stats,
            "latency": self._latency,
        }

    def protocol(self) -> Connection:
        return Connection(self._server, asyncio.get_running_loop(), self._model.limits)

    async def close(self, timeout_s: float) -> None:
        """Tell those whose body has not arrived, end idle connections at once and the others when their
        answer is sent, or after `timeout_s`."""
        for body in self._arriving:
            body.set_exception(RunnerClosedError("the server is shutting down; the body had not arrived"))
        self._server.pre_shutdown()
        await self._server.shutdown(timeout_s)

    async def _handle(self, request: BaseRequest) -> StreamResponse:
        try:
            response = await self._routed(request)
        except Exception as error:
            response = self._failed(error)
        if not response.prepared:
            await response.prepare(request)
            await response.write_eof()
        return response

    async def _routed(self, request: BaseRequest) -> StreamResponse:
        if request.version not in _VERSIONS:
            raise RequestError("expected HTTP/1.0 or HTTP/1.1")
        try:
            if request.raw_path == self._infer_path:  # the most of them, and no URL to take apart
                route = self._infer_route
            else:
                route = self._route(request.rel_url.raw_path)
        except RequestError:
            self._check_token(request)  # or who has none could try which names there are
            raise
        if not route.open:
            self._check_token(request)
        allowed = ("GET", "HEAD") if route.method == "GET" else (route.method,)
        if request.method not in allowed:
            text = f"{clip(request.method)} on this path; expected {' or '.join(allowed)}"
            return error_response(405, text, {"Allow": ", ".join(allowed)})
        return await route.handler(request)

    def _failed(self, error: Exception) -> Response:
        fault = fault_of(error)
        headers = {"Retry-After": str(fault.retry_after_s)} if fault.retry_after_s else {}
        if fault.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        response = error_response(fault.status, fault.message, headers)
        if fault.status in (408, 413) or self._model.draining:
            response.force_close()
        return response

    def _check_token(self, request: BaseRequest) -> None:
        if self._token and not authorized(request.headers.get("Authorization", ""), self._token):
            raise RequestError("this server wants a token: Authorization: Bearer TOKEN", 401)

    def _route(self, path: str) -> Route:
        parts = [unquote(part, errors="replace") for part in path.strip("/").split("/")]
        match parts:
            case ["v2", "repository", "models", name, "load" | "unload"]:
                self._model.check_name(name)
                return Route("POST", self._no_control)
            case ["v2", "models", name, "versions", wanted, *rest]:
                return self._model_route(name, wanted, "/".join(rest))
            case ["v2", "models", name, *rest] if parts != ["v2", "models", "stats"]:
                return self._model_route(name, "", "/".join(rest))
        fixed = self._fixed.get("/".join(parts))
        if fixed is None:
            raise RequestError(f"no path {clip(path)} here", 404)
        return fixed

    def _model_route(self, name: str, wanted: str, rest: str) -> Route:
        if rest == "infer":  # it counts whatever comes, also what names another model or lacks the token
            return Route("POST", lambda request: self._infer(request, name, wanted), open=True)
        handler = self._of_model.get(rest)
        if handler is None:
            raise RequestError(f"no path {clip(rest)} under a model", 404)
        self._model.check_name(name, wanted)
        return Route("GET", handler)

    async def _infer(self, request: BaseRequest, name: str, wanted: str) -> StreamResponse:
        begun = time.perf_counter()
        with self._model.counted(), self.budget.share() as share:
            self._check_token(request)
            self._model.check_name(name, wanted)
            asked = await self._asked(request, share)
            rows, answers = await self._model.infer(asked)
            pieces = await self._answered(asked, rows, answers)
            timing = phases_header(answers, begun)
            return await send_answer(request, pieces, timing, close=self._model.draining)

    async def _asked(self, request: BaseRequest, share: BodyShare) -> InferRequest:
        text = request.headers.get(HEAD_LENGTH, "")
        if text and not (text.isascii() and text.isdigit() and len(text) < 16):
            raise RequestError(f"{HEAD_LENGTH}: {clip(text)}; expected the bytes of JSON")
        body = await self._body(request, int(text or 0), share)
        json_bytes = int(text) if text else body.size
        if json_bytes > body.size:
            raise RequestError(f"{HEAD_LENGTH}: {json_bytes}, but the body has {body.size} bytes")
        if json_bytes <= _INLINE_JSON:
            return self._parse(body, json_bytes)
        return await asyncio.to_thread(self._parse, body, json_bytes)

    async def _body(self, request: BaseRequest, json_bytes: int, share: BodyShare) -> Array:
        self._arriving.add(request.content)
        try:
            return await read_body(request, json_bytes, self._model.limits, share)
        finally:
            self._arriving.discard(request.content)

    async def _answered(self, asked: InferRequest, rows: Rows, answers: list[Answer]) -> list[Piece]:
        """The body of an answer: its JSON, then y where it goes as binary data."""
        count = math.prod(rows.shape) * self._model.dtype.itemsize
        if count <= (_INLINE_BYTES if asked.binary else _INLINE_JSON):
            return self._pieces(asked, rows, answers)
        return await asyncio.to_thread(self._pieces, asked, rows, answers)

    def _pieces(self, asked: InferRequest, rows: Rows, answers: list[Answer]) -> list[Piece]:
        y = joined(rows, [answer.y for answer in answers], self._model.dtype)
        if asked.binary:
            raw = y.reshape(-1).view(np.uint8).data
            write = self._written_head if asked.id else self._known_head
            return [write(rows.shape, y.nbytes, asked.id), raw]
        return [self._written(rows.shape, {"data": to_json(y)}, asked.id)]

    def _written_head(self, shape: tuple[int, ...], nbytes: int, identity: str) -> bytes:
        return self._written(shape, {"parameters": {"binary_data_size": nbytes}}, identity)

    def _written(self, shape: tuple[int, ...], y: Mapping[str, Any], identity: str) -> bytes:
        """The JSON of an answer; `y` says the rest about its one output."""
        model = self._model
        output = {"name": OUTPUT, "datatype": model.datatype, "shape": shape, **y}
        head = {"model_name": model.name, "model_version": VERSION, "outputs": [output]}
        return json.dumps({**head, "id": identity} if identity else head).encode()

    async def _page(self, _request: BaseRequest) -> Response:
        text = resources.files("mha_deploy.serving").joinpath("page.html").read_bytes()
        headers = {"Content-Security-Policy": _PAGE_POLICY, "Cache-Control": "no-cache", "Server": SERVER}
        return Response(body=text, content_type="text/html", charset="utf-8", headers=headers)

    async def _live(self, request: BaseRequest) -> Response:
        since = request.query.get("since", "0")
        if not (since.isascii() and since.isdigit() and len(since) < 16):
            raise RequestError(f"since={clip(since)}; expected seconds since 1970")
        return _json(self._model.live(int(since)))

    async def _ready(self, _request: BaseRequest) -> Response:
        ready = self._model.ready
        return _json({"ready": ready}, 200 if ready else 503)

    async def _model_ready(self, _request: BaseRequest) -> Response:
        ready = self._model.ready
        return _json({"name": self._model.name, "ready": ready}, 200 if ready else 503)

    # A snapshot takes milliseconds, which the requests in progress need not wait for.
    async def _config(self, _request: BaseRequest) -> Response:
        return _json(self._model.config(await asyncio.to_thread(self._model.runner.snapshot)))

    async def _stats(self, _request: BaseRequest) -> Response:
        return _json(self._model.statistics(await asyncio.to_thread(self._model.runner.snapshot)))

    async def _latency(self, _request: BaseRequest) -> Response:
        return _json(self._model.latency(await asyncio.to_thread(self._model.runner.snapshot)))

    async def _metrics(self, _request: BaseRequest) -> Response:
        model = self._model
        snapshot = await asyncio.to_thread(model.runner.snapshot)
        load, held = model.runner.load(), self.budget.held
        text = metrics.render(metrics.Figures(model.name, VERSION, model.stats, snapshot, load, held))
        return Response(body=text.encode(), headers={"Content-Type": metrics.CONTENT_TYPE, "Server": SERVER})

    async def _index(self, request: BaseRequest) -> Response:
        with self.budget.share() as share:
            body = await self._body(request, 0, share) if request.body_exists else None
            limits = self._model.limits
            text = json_text(body, limits) if body is not None else b""
            asked = parse_object(text, limits) if text else {}
        if not self._model.ready and asked.get("ready") is True:
            return _json([])
        state = "READY" if self._model.ready else "UNAVAILABLE"
        return _json([{"name": self._model.name, "version": VERSION, "state": state}])

    async def _no_control(self, _request: BaseRequest) -> Response:
        raise no_control()


def _json(value: object, status: int = 200) -> Response:
    body = json.dumps(value).encode()
    return Response(status=status, body=body, content_type="application/json", headers={"Server": SERVER})


def _constant(value: object) -> Handler:
    async def answer(_request: BaseRequest) -> Response:
        return _json(value)

    return answer
