"""gRPC calls that are wrong on the wire, slow or without a token: what is received of them, and counted."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import numpy as np
import pytest
from serving import MODEL, fake_runner, free_port, serving, until

from mha_deploy.serving import Limits

grpc = pytest.importorskip("grpc")
pb = pytest.importorskip("tritonclient.grpc.service_pb2")

X = np.ones((1, 4, 32), np.float32)
INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
PATIENCE_S = 20
TOKEN = "s3cret-t0ken"
NONSENSE = b"\xff" * 64


@contextmanager
def channel_to(**options):
    """A server with gRPC, and a channel that sends bytes as they are."""
    with serving(fake_runner(), grpc_port=free_port(), **options) as running:
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(f"127.0.0.1:{running.server.grpc_port}", options) as channel:
            yield running, channel


@contextmanager
def never_sent():
    """Requests of a stream whose first never comes, until the block ends."""
    ended = threading.Event()

    def requests():
        ended.wait(PATIENCE_S)
        yield from ()

    try:
        yield requests()
    finally:
        ended.set()


def message(**fields):
    tensor = pb.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=X.shape)
    request = {"model_name": MODEL, "inputs": [tensor], "raw_input_contents": [X.tobytes()], **fields}
    return pb.ModelInferRequest(**request)


def refusal(call):
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code().name, caught.value.details()


def counted(running):
    until(lambda: running.stats.in_progress == 0)
    return {outcome.value: count for outcome, count in running.stats.outcomes.items() if count}


def test_a_message_that_cannot_be_decoded_is_invalid_and_counted():
    with channel_to() as (running, channel):
        infer = channel.unary_unary(INFER)
        expected = ("INVALID_ARGUMENT", "the message cannot be decoded")
        assert refusal(lambda: infer(NONSENSE, timeout=PATIENCE_S)) == expected
        metadata = channel.unary_unary("/inference.GRPCInferenceService/ModelMetadata")
        assert refusal(lambda: metadata(NONSENSE, timeout=PATIENCE_S)) == expected
        assert counted(running) == {"refused": 1}
        (streamed,) = channel.stream_stream(STREAM)(iter([NONSENSE]), timeout=PATIENCE_S)
        assert pb.ModelStreamInferResponse.FromString(streamed).error_message == expected[1]
        assert counted(running) == {"refused": 2}


@pytest.mark.parametrize("method", [INFER, STREAM, INFER.replace("ModelInfer", "ModelConfig")])
def test_without_the_token_no_message_is_waited_for(method):
    """None is ever sent, and the server would wait for one for far longer than the client does."""
    limits = Limits(body_s=600)
    with channel_to(token=TOKEN, limits=limits) as (running, channel), never_sent() as requests:
        call = channel.stream_stream(method)(requests, timeout=PATIENCE_S)
        assert refusal(lambda: next(call))[0] == "UNAUTHENTICATED"
        assert counted(running) == ({} if method.endswith("Config") else {"refused": 1})


def test_a_message_that_does_not_come_is_given_up():
    with channel_to(limits=Limits(body_s=0.1)) as (running, channel), never_sent() as requests:
        call = channel.stream_unary(INFER)
        code, details = refusal(lambda: call(requests, timeout=PATIENCE_S))
        assert (code, details) == ("DEADLINE_EXCEEDED", "no whole message within 0.1 s")
        assert counted(running) == {"refused": 1}
        assert "without a message" in refusal(lambda: call(iter(()), timeout=PATIENCE_S))[1]


def test_no_more_messages_are_received_at_once_than_the_budget_has_room_for():
    """One may be as large as the budget: while it is awaited, the next waits too, and is then served."""
    limits = Limits(body_bytes=1 << 16, bodies_bytes=1 << 16, body_s=600)
    with channel_to(limits=limits) as (running, channel):
        with never_sent() as requests:
            first = channel.stream_unary(INFER).future(requests, timeout=PATIENCE_S)
            until(lambda: running.stats.in_progress == 1)
            second = channel.unary_unary(INFER).future(message().SerializeToString(), timeout=PATIENCE_S)
            until(lambda: running.stats.in_progress == 2)
            with pytest.raises(grpc.FutureTimeoutError):
                second.result(0.1)
        assert refusal(first.result)[0] == "INVALID_ARGUMENT"
        answer = pb.ModelInferResponse.FromString(second.result(PATIENCE_S))
        assert answer.raw_output_contents[0] == X.tobytes()
        assert counted(running) == {"refused": 1, "answered": 1}


def test_no_more_streams_are_open_than_the_budget_has_room_for():
    limits = Limits(body_bytes=1 << 16, bodies_bytes=1 << 16)
    with channel_to(limits=limits) as (running, channel), never_sent() as requests:
        stream = channel.stream_stream(STREAM)
        held = stream(_then(message().SerializeToString(), requests), timeout=PATIENCE_S)
        assert pb.ModelStreamInferResponse.FromString(next(held)).error_message == ""
        code, details = refusal(lambda: next(stream(iter([b""]), timeout=PATIENCE_S)))
        assert (code, details) == ("UNAVAILABLE", "1 streams are open, and no more are taken; try again")
        assert counted(running) == {"answered": 1, "overloaded": 1}


def _then(first, rest):
    yield first
    yield from rest


def test_a_message_that_still_arrives_at_the_end_is_answered_so():
    with channel_to(limits=Limits(body_s=600)) as (running, channel), never_sent() as requests:
        call = channel.stream_unary(INFER).future(requests, timeout=PATIENCE_S)
        until(lambda: running.stats.in_progress == 1)
        running.stop(0.0)
        details = "the server is shutting down; the message had not come"
        assert refusal(call.result) == ("UNAVAILABLE", details)
        assert counted(running) == {"closing": 1}


def test_numbers_beside_raw_bytes_are_refused():
    both = message()
    both.inputs[0].contents.fp32_contents.extend([1.0] * X.size)
    with channel_to() as (_, channel):
        call = channel.unary_unary(INFER)
        code, details = refusal(lambda: call(both.SerializeToString(), timeout=PATIENCE_S))
    assert (code, details) == ("INVALID_ARGUMENT", "input 'x' has both contents and raw_input_contents")


@pytest.mark.parametrize("raw", [True, False])
def test_a_shape_that_is_empty_and_yet_too_large_is_refused(raw):
    tensor = pb.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=[0, 2**31 - 1, 2**31 - 1])
    request = message(inputs=[tensor], raw_input_contents=[b""] if raw else [])
    with channel_to() as (_, channel):
        call = channel.unary_unary(INFER)
        code, details = refusal(lambda: call(request.SerializeToString(), timeout=PATIENCE_S))
    assert (code, "no tensor can be as large" in details) == ("INVALID_ARGUMENT", True)


def test_bodies_may_be_larger_than_grpc_can_count():
    limits = Limits(body_bytes=1 << 32, bodies_bytes=1 << 33)
    with channel_to(limits=limits) as (_, channel):
        answer = channel.unary_unary(INFER)(message().SerializeToString(), timeout=PATIENCE_S)
    assert pb.ModelInferResponse.FromString(answer).raw_output_contents[0] == X.tobytes()


@pytest.mark.parametrize("name", ["Load", "Unload"])
def test_models_are_not_loaded_or_unloaded_and_the_client_is_told(name):
    with channel_to() as (_, channel):
        call = channel.unary_unary(f"/inference.GRPCInferenceService/RepositoryModel{name}")

        def told(model):
            request = getattr(pb, f"RepositoryModel{name}Request")(model_name=model)
            return refusal(lambda: call(request.SerializeToString(), timeout=PATIENCE_S))

        text = "models cannot be loaded or unloaded: this server serves the one it has"
        assert told(MODEL) == ("PERMISSION_DENIED", text)
        assert told("other")[0] == "NOT_FOUND"
