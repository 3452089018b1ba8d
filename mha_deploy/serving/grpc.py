"""The Open Inference Protocol v2 over gRPC: messages -> the model, and faults -> status codes.

The messages' classes come from tritonclient, which is Triton's own client.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

from mha_deploy.errors import InputError, MissingError, RequestError, RunnerClosedError
from mha_deploy.serving.body import BodyBudget, BodyShare
from mha_deploy.serving.faults import fault_of, no_control
from mha_deploy.serving.grpc_messages import decode, parse_message
from mha_deploy.serving.model import VERSION, Model, server_metadata
from mha_deploy.serving.protocol import OUTPUT
from mha_deploy.serving.rows import joined
from mha_deploy.serving.security import Tls, authorized

SERVICE = "inference.GRPCInferenceService"
# A message's length and gRPC's limit of it are 32 bits with a sign.
_MOST_BYTES = (1 << 31) - 1
Method = Callable[[Any], Awaitable[Any]]


def load_grpc() -> tuple[Any, Any]:
    """The modules grpc and service_pb2.

    Raises:
        MissingError: tritonclient[grpc] is not installed.
    """
    try:
        return importlib.import_module("grpc"), importlib.import_module("tritonclient.grpc.service_pb2")
    except ImportError as error:
        raise MissingError(
            "--grpc-port needs tritonclient with gRPC; install it with: pip install 'mha-deploy[grpc]'"
        ) from error


class GrpcFront:
    """gRPC requests -> the model. Made and used on one event loop.

    A message is received only once its caller's token was seen, and as many at once as `bodies_bytes`
    has room for if each is as large as one may be; then it is held against that budget, and decoded.
    A stream receives when its client likes, so there are at most as many streams.
    """

    def __init__(self, model: Model, budget: BodyBudget, token: str) -> None:
        self._model, self._budget, self._token = model, budget, token
        self._grpc, self._pb = load_grpc()
        limits = model.limits
        self._at_once = max(1, limits.bodies_bytes // limits.body_bytes)
        self._receiving, self._streams = asyncio.Semaphore(self._at_once), 0
        self._waiting: set[asyncio.Timeout] = set()
        self._closing = False
        options = [
            ("grpc.max_receive_message_length", min(limits.body_bytes, _MOST_BYTES)),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_metadata_size", limits.header_bytes),
            ("grpc.so_reuseport", 0),  # or a second server would quietly share the port
            ("grpc.max_connection_idle_ms", int(limits.idle_s * 1e3)),
        ]
        self._server = self._grpc.aio.server(options=options, maximum_concurrent_rpcs=limits.connections)
        handlers = self._grpc.method_handlers_generic_handler(SERVICE, self._handlers())
        self._server.add_generic_rpc_handlers((handlers,))

    async def start(self, host: str, port: int, tls: Tls) -> int:
        """Listen; the port, chosen by the system where `port` is 0.

        Raises:
            InputError: the address cannot be had.
        """
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            # gRPC would log lines of its own to stderr, and not say why.
            tried = await asyncio.get_running_loop().create_server(asyncio.Protocol, host, port)
            tried.close()
            await tried.wait_closed()
            if tls:
                bound = self._server.add_secure_port(address, self._credentials(tls))
            else:
                bound = self._server.add_insecure_port(address)
        except (OSError, RuntimeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "gRPC does not say why"
            raise InputError(f"cannot listen on {address} for gRPC: {reason}") from error
        await self._server.start()
        return int(bound)

    def _credentials(self, tls: Tls) -> Any:
        cert, key, client_ca = tls.read()
        return self._grpc.ssl_server_credentials(
            [(key, cert)], root_certificates=client_ca or None, require_client_auth=bool(client_ca)
        )

    async def close(self, timeout_s: float) -> None:
        """Tell callers whose message has not arrived, and end the others when they are answered, or
        after `timeout_s`."""
        self._closing = True
        for each in self._waiting:
            each.reschedule(asyncio.get_running_loop().time())
        await self._server.stop(timeout_s)

    def _handlers(self) -> dict[str, Any]:
        methods: dict[str, Method] = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelConfig": self._model_config,
            "ModelStatistics": self._model_statistics,
            "RepositoryIndex": self._repository_index,
            "RepositoryModelLoad": self._no_control,
            "RepositoryModelUnload": self._no_control,
        }
        handlers = {name: self._unary(name, self._plain(name, method)) for name, method in methods.items()}
        handlers["ModelInfer"] = self._unary("ModelInfer", self._infer)
        handlers["ModelStreamInfer"] = self._grpc.stream_stream_rpc_method_handler(
            self._stream_infer,
            response_serializer=self._pb.ModelStreamInferResponse.SerializeToString,
        )
        return handlers

    def _unary(self, name: str, behaviour: Callable[[Any, Any], Awaitable[Any]]) -> Any:
        # To a client it is the same; only a stream leaves it to the behaviour when a message is received.
        return self._grpc.stream_unary_rpc_method_handler(
            behaviour,
            response_serializer=getattr(self._pb, f"{name}Response").SerializeToString,
        )

    def _plain(self, name: str, method: Method) -> Callable[[Any, Any], Awaitable[Any]]:
        open_to_all = method in (self._server_live, self._server_ready)

        async def behaviour(messages: AsyncIterator[bytes], context: Any) -> Any:
            try:
                if not open_to_all:
                    self._check_token(context)
                with self._budget.share() as share:
                    request = getattr(self._pb, f"{name}Request")()
                    await self._receive(messages, request, share)
                    return await method(request)
            except Exception as error:
                await self._abort(context, error)

        return behaviour

    async def _abort(self, context: Any, error: Exception) -> None:
        fault = fault_of(error)
        codes = {code.value[0]: code for code in self._grpc.StatusCode}
        trailing = (("retry-after", str(fault.retry_after_s)),) if fault.retry_after_s else ()
        await context.abort(codes[fault.grpc_code], fault.message, trailing)

    def _check_token(self, context: Any) -> None:
        headers = dict(context.invocation_metadata() or ())
        if self._token and not authorized(str(headers.get("authorization", "")), self._token):
            raise RequestError("this server wants a token: authorization: Bearer TOKEN", 401)

    async def _receive(self, messages: AsyncIterator[bytes], into: Any, share: BodyShare) -> None:
        """Receive the one message of a call.

        Raises:
            RequestError: it does not come in time, or cannot be decoded.
            RunnerClosedError: the server ends before it has come.
        """
        limits = self._model.limits
        try:
            async with self._receiving, asyncio.timeout(limits.body_s) as time_limit:
                self._waiting.add(time_limit)
                try:
                    raw = await anext(messages)
                finally:
                    self._waiting.discard(time_limit)
                share.take(len(raw))
        except TimeoutError as error:
            if self._closing:
                raise RunnerClosedError("the server is shutting down; the message had not come") from error
            raise RequestError(f"no whole message within {limits.body_s:g} s", 408) from error
        except StopAsyncIteration as error:
            raise RequestError("the call ended without a message") from error
        decode(raw, into)

    async def _infer(self, messages: AsyncIterator[bytes], context: Any) -> Any:
        try:
            with self._model.counted(), self._budget.share() as share:
                self._check_token(context)
                request = self._pb.ModelInferRequest()
                await self._receive(messages, request, share)
                return await self._answer(request, context)
        except Exception as error:
            await self._abort(context, error)

    async def _stream_infer(self, messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
        try:
            self._check_token(context)
            if self._streams >= self._at_once:
                raise RequestError(f"{self._at_once} streams are open, and no more are taken; try again", 503)
        except RequestError as error:
            with contextlib.suppress(RequestError), self._model.counted():
                raise
            await self._abort(context, error)
        self._streams += 1
        try:
            async for response in self._stream(messages, context):
                yield response
        finally:
            self._streams -= 1

    async def _stream(self, messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
        async for raw in messages:
            request = self._pb.ModelInferRequest()
            try:
                with self._model.counted(), self._budget.share() as share:
                    share.take(len(raw))
                    decode(raw, request)
                    answer = await self._answer(request, context)
                yield self._pb.ModelStreamInferResponse(infer_response=answer)
            except Exception as error:
                response = self._pb.ModelStreamInferResponse(error_message=fault_of(error).message)
                response.infer_response.id = request.id
                yield response

    async def _answer(self, request: Any, context: Any) -> Any:
        model = self._model
        model.check_name(request.model_name, request.model_version)
        asked = parse_message(request, model.limits)
        left = context.time_remaining()
        if left is not None:
            asked = replace(asked, timeout_s=min(asked.timeout_s, max(left, 0.0)))
        rows, answers = await model.infer(asked)
        y = joined(rows, [answer.y for answer in answers], model.dtype)
        output = self._pb.ModelInferResponse.InferOutputTensor(
            name=OUTPUT, datatype=model.datatype, shape=rows.shape
        )
        return self._pb.ModelInferResponse(
            model_name=model.name,
            model_version=VERSION,
            id=asked.id,
            outputs=[output],
            raw_output_contents=[y.tobytes()],
        )

    async def _server_live(self, _request: Any) -> Any:
        return self._pb.ServerLiveResponse(live=True)

    async def _server_ready(self, _request: Any) -> Any:
        return self._pb.ServerReadyResponse(ready=self._model.ready)

    async def _model_ready(self, request: Any) -> Any:
        self._model.check_name(request.name, request.version)
        return self._pb.ModelReadyResponse(ready=self._model.ready)

    async def _server_metadata(self, _request: Any) -> Any:
        return self._pb.ServerMetadataResponse(**server_metadata())

    async def _model_metadata(self, request: Any) -> Any:
        self._model.check_name(request.name, request.version)
        return _filled(self._pb.ModelMetadataResponse(), self._model.metadata())

    async def _model_config(self, request: Any) -> Any:
        self._model.check_name(request.name, request.version)
        snapshot = await asyncio.to_thread(self._model.runner.snapshot)
        return _filled(self._pb.ModelConfigResponse(), {"config": self._model.config(snapshot)})

    async def _model_statistics(self, request: Any) -> Any:
        if request.name:
            self._model.check_name(request.name, request.version)
        snapshot = await asyncio.to_thread(self._model.runner.snapshot)
        return _filled(self._pb.ModelStatisticsResponse(), self._model.statistics(snapshot))

    async def _repository_index(self, request: Any) -> Any:
        if request.ready and not self._model.ready:
            return self._pb.RepositoryIndexResponse()
        state = "READY" if self._model.ready else "UNAVAILABLE"
        model = {"name": self._model.name, "version": VERSION, "state": state}
        return _filled(self._pb.RepositoryIndexResponse(), {"models": [model]})

    async def _no_control(self, request: Any) -> Any:
        self._model.check_name(request.model_name)
        raise no_control()


def _filled(message: Any, data: dict[str, Any]) -> Any:
    """`message` with what it knows of `data`; clients' versions differ in their newest fields."""
    return importlib.import_module("google.protobuf.json_format").ParseDict(
        data, message, ignore_unknown_fields=True
    )
