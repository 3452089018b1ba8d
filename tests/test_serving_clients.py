"""Unmodified clients against a served bundle: their answers are those of `infer`."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from conftest import SMALL_DIMS, small_spec
from serving import (
    INFER,
    MODEL,
    Connection,
    ask,
    bundle_runner,
    free_port,
    get,
    http,
    infer_body,
    infer_request,
    serving,
)

import mha_deploy
from mha_deploy.pipeline import export
from mha_deploy.signature import Dim

tritonhttp = pytest.importorskip("tritonclient.http")
tritongrpc = pytest.importorskip("tritonclient.grpc")


@pytest.fixture(scope="module")
def server(small_bundle):
    with serving(bundle_runner(small_bundle), grpc_port=free_port()) as running:
        yield running


@pytest.fixture(scope="module")
def http_client(server):
    with tritonhttp.InferenceServerClient(f"127.0.0.1:{server.port}", concurrency=4) as client:
        yield client


@pytest.fixture(scope="module")
def grpc_client(server):
    with tritongrpc.InferenceServerClient(f"127.0.0.1:{server.server.grpc_port}") as client:
        yield client


def inputs_for(module, x, mask=None, *, binary=True):
    inputs = [module.InferInput("x", list(x.shape), "FP32")]
    arrays = [x]
    if mask is not None:
        inputs.append(module.InferInput("mask", list(mask.shape), "BOOL"))
        arrays.append(mask)
    for each, array in zip(inputs, arrays, strict=True):
        if module is tritongrpc:
            each.set_data_from_numpy(array)
        else:
            each.set_data_from_numpy(array, binary_data=binary)
    return inputs


def ragged_batch(random):
    """Three rows of lengths 7, 4 and 1, and a hole in the first."""
    x, mask = random.standard_normal((3, 7, 32), dtype=np.float32), np.zeros((3, 7), bool)
    for row, length in enumerate((7, 4, 1)):
        mask[row, :length] = True
    mask[0, 2] = False
    return x, mask


def expected_y(bundle, x, mask):
    """What `infer` answers, with the rows that a padding mask ends at 0."""
    y = mha_deploy.infer(bundle, {"x": x, "mask": mask}).y
    for row in range(len(x)):
        end = mask.shape[1] - mask[row, ::-1].argmax() if mask[row].any() else 0
        y[row, end:] = 0
    return y


def test_http_answers_as_infer_does(server, http_client, small_bundle, random):
    x, mask = ragged_batch(random)
    y = http_client.infer(MODEL, inputs_for(tritonhttp, x, mask), request_id="r-1")
    np.testing.assert_allclose(y.as_numpy("y"), expected_y(small_bundle, x, mask), atol=2e-6)
    assert y.get_response()["id"] == "r-1"
    assert (y.as_numpy("y")[1, 4:] == 0).all()


def test_a_lone_full_row_is_bit_for_bit_what_the_session_says(http_client, small_bundle, random):
    x = random.standard_normal((1, 5, 32), dtype=np.float32)
    y = http_client.infer(MODEL, inputs_for(tritonhttp, x)).as_numpy("y")
    with small_bundle.open_session() as session:
        assert np.array_equal(y, session.run({"x": x, "mask": np.ones((1, 5), bool)})["y"])


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_http_takes_compressed_bodies(http_client, small_bundle, random, coding):
    x, mask = ragged_batch(random)
    options = {"request_compression_algorithm": coding, "response_compression_algorithm": coding}
    y = http_client.infer(MODEL, inputs_for(tritonhttp, x, mask), **options).as_numpy("y")
    np.testing.assert_allclose(y, expected_y(small_bundle, x, mask), atol=2e-6)


def test_http_takes_and_gives_json_tensors(http_client, small_bundle, random):
    x, mask = ragged_batch(random)
    wanted = [tritonhttp.InferRequestedOutput("y", binary_data=False)]
    y = http_client.infer(MODEL, inputs_for(tritonhttp, x, mask, binary=False), outputs=wanted)
    np.testing.assert_allclose(y.as_numpy("y"), expected_y(small_bundle, x, mask), atol=2e-6)


def test_http_async_infer_answers_every_request_at_its_own_length(server, http_client, random):
    xs = [random.standard_normal((1, length, 32), dtype=np.float32) for length in (3, 9, 3, 1, 17)]
    pending = [http_client.async_infer(MODEL, inputs_for(tritonhttp, x)) for x in xs]
    for x, each in zip(xs, pending, strict=True):
        assert each.get_result().as_numpy("y").shape == x.shape


def test_the_asyncio_client_is_answered(server, small_bundle, random):
    from tritonclient.http import aio

    xs = [random.standard_normal((1, length, 32), dtype=np.float32) for length in (3, 9, 3)]

    async def main():
        async with aio.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
            assert await client.is_server_ready()
            answers = await asyncio.gather(*(client.infer(MODEL, inputs_for(tritonhttp, x)) for x in xs))
            return [answer.as_numpy("y") for answer in answers]

    for x, y in zip(xs, asyncio.run(main()), strict=True):
        expected = mha_deploy.infer(small_bundle, {"x": x, "mask": np.ones(x.shape[:2], bool)}).y
        np.testing.assert_allclose(y, expected, atol=2e-6)


def test_grpc_answers_as_infer_does(grpc_client, small_bundle, random):
    x, mask = ragged_batch(random)
    y = grpc_client.infer(MODEL, inputs_for(tritongrpc, x, mask), request_id="r-2")
    np.testing.assert_allclose(y.as_numpy("y"), expected_y(small_bundle, x, mask), atol=2e-6)
    assert y.get_response().id == "r-2"


def test_grpc_streams_answers_in_order(server, random):
    xs = [random.standard_normal((1, length, 32), dtype=np.float32) for length in (2, 5, 3)]
    answers = []
    with tritongrpc.InferenceServerClient(f"127.0.0.1:{server.server.grpc_port}") as client:
        client.start_stream(lambda result, error: answers.append((result, error)))
        for x in xs:
            client.async_stream_infer(MODEL, inputs_for(tritongrpc, x))
        client.async_stream_infer("other", inputs_for(tritongrpc, xs[0]))
        client.stop_stream()
    assert [result.as_numpy("y").shape for result, error in answers if not error] == [x.shape for x in xs]
    assert "no model 'other'" in str(answers[-1][1])


def test_grpc_takes_numbers_instead_of_raw_bytes(grpc_client, small_bundle, random):
    from tritonclient.grpc import service_pb2

    x = random.standard_normal((1, 2, 32), dtype=np.float32)
    tensor = service_pb2.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=x.shape)
    tensor.contents.fp32_contents.extend(x.ravel().tolist())
    request = service_pb2.ModelInferRequest(model_name=MODEL, inputs=[tensor])
    response = grpc_client._client_stub.ModelInfer(request)
    y = np.frombuffer(response.raw_output_contents[0], np.float32).reshape(1, 2, 32)
    expected = mha_deploy.infer(small_bundle, {"x": x, "mask": np.ones((1, 2), bool)}).y
    np.testing.assert_allclose(y, expected, atol=2e-6)


@pytest.mark.parametrize("client_name", ["http_client", "grpc_client"])
def test_a_client_learns_what_the_server_is(client_name, request):
    client = request.getfixturevalue(client_name)
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(MODEL)
    assert client.is_model_ready(MODEL, "1")
    texts = (client.get_server_metadata(), client.get_model_metadata(MODEL), client.get_model_config(MODEL))
    texts += (client.get_inference_statistics(MODEL), client.get_model_repository_index())
    server, metadata, config, stats, index = (str(text).replace('"', "'") for text in texts)
    assert "binary_tensor_data" in server
    assert "'y'" in metadata
    assert "TYPE_BOOL" in config
    assert "inference_count" in stats
    assert "READY" in index


@pytest.mark.parametrize("client_name", ["http_client", "grpc_client"])
def test_a_wrong_request_is_told_to_the_client(client_name, request, random):
    client = request.getfixturevalue(client_name)
    module = tritonhttp if client_name == "http_client" else tritongrpc
    x = random.standard_normal((7, 5, 32), dtype=np.float32)
    with pytest.raises(Exception, match=r"'x' has batch = 7; this block takes batch 1\.\.6"):
        client.infer(MODEL, inputs_for(module, x))
    with pytest.raises(Exception, match=r"'x' has seq = 65; this block takes seq 1\.\.64"):
        client.infer(MODEL, inputs_for(module, np.zeros((1, 65, 32), np.float32)))
    with pytest.raises(Exception, match="no model 'other'; this server has 'small'"):
        client.infer("other", inputs_for(module, x))
    with pytest.raises(Exception, match="has no version '2'"):
        client.infer(MODEL, inputs_for(module, x), model_version="2")
    with pytest.raises(Exception, match="priority 9; expected 0"):
        client.infer(MODEL, inputs_for(module, x[:1]), priority=9)


def test_what_perf_analyzer_asks_for_is_there(server, random):
    """GET /v2, the model's metadata, configuration and statistics, and infer."""
    x = random.standard_normal((1, 4, 32), dtype=np.float32)
    before = get(server.port, f"/v2/models/{MODEL}/stats").json["model_stats"][0]
    assert get(server.port, "/v2").json["name"] == "mha-deploy"
    assert get(server.port, f"/v2/models/{MODEL}/versions/1").json["inputs"][0]["shape"] == [-1, -1, 32]
    assert get(server.port, f"/v2/models/{MODEL}/config").json["max_batch_size"] == 6
    assert ask(server.port, infer_request(x)).y.shape == x.shape
    after = get(server.port, f"/v2/models/{MODEL}/stats").json["model_stats"][0]
    assert after["inference_count"] == before["inference_count"] + 1
    assert after["inference_stats"]["success"]["count"] == before["inference_stats"]["success"]["count"] + 1


def test_an_answer_says_where_its_time_went(server, random):
    reply = ask(server.port, infer_request(random.standard_normal((1, 4, 32), dtype=np.float32)))
    timing = dict(part.split(";dur=") for part in reply.headers["server-timing"].split(", "))
    assert list(timing) == ["queue", "batch", "compute", "scatter", "total"]
    assert sum(float(timing[phase]) for phase in list(timing)[:4]) <= float(timing["total"])


def test_a_connection_stays_open_and_takes_chunks_and_expectations(server, random):
    x = random.standard_normal((1, 4, 32), dtype=np.float32)
    body, head = infer_body(x)
    length = {"inference_header_content_length": str(head)}
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:9], body[9:300], body[300:]))
    with Connection(server.port) as connection:
        chunked = http("POST", INFER, content_length=None, transfer_encoding="chunked", **length)
        connection.send(chunked + chunks + b"0\r\n\r\n")
        first = connection.reply()
        connection.send(http("POST", INFER, content_length=str(len(body)), expect="100-continue", **length))
        assert connection.reply().status == 100
        connection.send(body)
        second = connection.reply()
        connection.send(infer_request(x) * 3)  # pipelined
        rest = [connection.reply() for _ in range(3)]
    for reply in (first, second, *rest):
        assert reply.status == 200
        assert np.array_equal(reply.y, first.y)


def test_a_row_with_nothing_visible_is_zero_and_the_others_are_not(server, random):
    x, mask = random.standard_normal((2, 3, 32), dtype=np.float32), np.zeros((2, 3), bool)
    mask[1] = True
    y = ask(server.port, infer_request(x, mask)).y
    assert (y[0] == 0).all()
    assert (y[1] != 0).any()
    assert (ask(server.port, infer_request(x[:1], mask[:1])).y == 0).all()


def test_what_stands_in_padding_reaches_no_answer(server, random):
    x, mask = ragged_batch(random)
    clean = ask(server.port, infer_request(x, mask)).y
    garbage = np.where(mask[:, :, None], x, np.nan).astype(np.float32)
    found = ask(server.port, infer_request(garbage, mask)).y
    assert np.array_equal(clean[mask], found[mask])


@pytest.mark.parametrize("kind", ["cross", "full", "none"])
def test_other_kinds_of_block_are_served(tmp_path, random, kind):
    dims = (Dim("batch", 1, 2, 4), Dim("q_len", 1, 4, 16), Dim("kv_len", 1, 4, 16))
    changes = {
        "cross": {"kind": "cross", "kdim": 24, "vdim": 16, "dims": dims},
        "full": {"mask": "full"},
        "none": {"mask": "none", "dims": (replace(SMALL_DIMS[0], max=4), SMALL_DIMS[1])},
    }[kind]
    bundle = export(small_spec(**changes), tmp_path / "bundle")
    sizes = {"batch": 3, "seq": 6, "q_len": 5, "kv_len": 7}
    feeds = {}
    for tensor in bundle.signature.inputs:
        shape = bundle.signature.shape(tensor, sizes)
        feeds[tensor.name] = (
            random.standard_normal(shape, dtype=np.float32) if tensor.is_float else random.random(shape) < 0.7
        )
    if kind == "cross":
        feeds["mask"][1] = False  # its queries are answered all the same
    with (
        serving(bundle_runner(bundle)) as running,
        tritonhttp.InferenceServerClient(f"127.0.0.1:{running.port}") as client,
    ):
        inputs = []
        for name, array in feeds.items():
            inputs.append(
                tritonhttp.InferInput(name, list(array.shape), "BOOL" if array.dtype == bool else "FP32")
            )
            inputs[-1].set_data_from_numpy(array)
        y = client.infer(MODEL, inputs).as_numpy("y")
    np.testing.assert_allclose(y, mha_deploy.infer(bundle, feeds).y, atol=2e-6)
