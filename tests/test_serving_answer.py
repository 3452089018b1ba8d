"""The head of an answer: what HTTP wants of it, by the client's version and wishes."""

from __future__ import annotations

import time
from email.utils import parsedate_to_datetime

import numpy as np
import pytest
from conftest import small_spec
from serving import Connection, fake_runner, infer_request, serving

from mha_deploy.signature import Dim

X = np.random.default_rng(0).standard_normal((1, 3, 32)).astype(np.float32)
WIDE = small_spec(d_model=512, dims=(Dim("batch", 1, 2, 8), Dim("seq", 1, 16, 64)))


@pytest.fixture(scope="module")
def running():
    with serving(fake_runner(lambda feeds: {"y": feeds["x"].copy()})) as running:
        yield running


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
@pytest.mark.parametrize(
    ("version", "asked", "said", "stays"),
    [
        ("1.1", None, None, True),
        ("1.1", "close", "close", False),
        ("1.0", "keep-alive", "keep-alive", True),
        ("1.0", None, None, False),
    ],
)
def test_a_connection_stays_as_the_clients_version_and_word_have_it(
    version, asked, said, stays, binary, running
):
    request = infer_request(X, headers={"connection": asked}, binary_data_output=binary)
    request = request.replace(b"HTTP/1.1", f"HTTP/{version}".encode(), 1)
    with Connection(running.port) as connection:
        connection.send(request)
        reply = connection.reply()
        assert (reply.status, reply.headers.get("connection")) == (200, said)
        if stays:
            connection.send(request)
            assert connection.reply().status == 200
        else:
            assert connection.closed()


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
def test_an_answer_says_what_it_is_and_when_it_was_made(binary, running):
    with Connection(running.port) as connection:
        connection.send(infer_request(X, binary_data_output=binary))
        reply = connection.reply()
    assert reply.headers["content-type"] == f"application/{'octet-stream' if binary else 'json'}"
    assert ("inference-header-content-length" in reply.headers) is binary
    assert abs(parsedate_to_datetime(reply.headers["date"]).timestamp() - time.time()) < 10
    assert reply.headers["server"] == "mha-deploy"
    y = reply.y if binary else np.array(reply.json["outputs"][0]["data"], np.float32).reshape(X.shape)
    assert np.array_equal(y, X)


def test_an_answer_too_large_to_be_joined_arrives_whole_and_so_does_the_next():
    large, small = (np.random.default_rng(1).standard_normal((rows, 64, 512)) for rows in (8, 1))
    runner = fake_runner(lambda feeds: {"y": feeds["x"].copy()}, WIDE)
    with serving(runner) as running, Connection(running.port) as connection:
        for x in (large.astype(np.float32), small.astype(np.float32)):
            connection.send(infer_request(x))
            assert np.array_equal(connection.reply().y, x)
