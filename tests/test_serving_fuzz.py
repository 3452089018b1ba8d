"""Whatever a client sends to infer is answered: 200, or 4xx as JSON; never 5xx, never silence."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import INFER, Connection, fake_runner, http, infer_body, serving

from mha_deploy.serving import Limits

BODY, HEAD = infer_body(np.ones((1, 2, 32), np.float32), np.ones((1, 2), bool))
LIMITS = Limits(body_s=0.3, header_s=0.3)
SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
PARAMETERS = st.dictionaries(
    st.sampled_from(["binary_data_size", "binary_data_output", "binary_data", "priority", "timeout", "a"]),
    VALUES | st.integers(0, 300),
    max_size=3,
)
INPUT = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["x", "mask", "y"]) | VALUES,
        "datatype": st.sampled_from(["FP32", "BOOL", "FP16", "BYTES", "INT64", "BF16"]) | VALUES,
        "shape": st.lists(st.integers(-1, 66), max_size=4) | st.just([1, 2, 32]) | VALUES,
        "data": st.lists(st.floats(width=32) | st.booleans(), max_size=70) | VALUES,
        "parameters": PARAMETERS | VALUES,
    },
)
HEADS = st.fixed_dictionaries(
    {},
    optional={
        "id": st.text() | VALUES,
        "inputs": st.lists(INPUT, max_size=3) | VALUES,
        "outputs": st.lists(st.fixed_dictionaries({"name": st.just("y") | VALUES}), max_size=2) | VALUES,
        "parameters": PARAMETERS | VALUES,
    },
)
CODINGS = st.sampled_from([None, "gzip", "deflate", "identity", "br", ""])
LENGTHS = st.none() | st.integers(-1, 400) | st.text("0123456789abcdef x", max_size=5)


@pytest.fixture(scope="module")
def server():
    with serving(fake_runner(), limits=LIMITS) as running:
        yield running


def settled(server, data):
    """The reply to `data`, sent as all that there is on its connection."""
    with Connection(server.port) as connection:
        connection.send(data)
        reply = connection.reply()
    assert reply is not None
    assert reply.status == 200 or 400 <= reply.status < 500, reply
    if reply.status != 200:
        assert isinstance(reply.json["error"], str)
    stats = server.stats
    assert stats.outcomes["failed"] == 0
    return reply


def posted(body, **headers):
    return http("POST", INFER, body, **{name: text for name, text in headers.items() if text is not None})


@settings(max_examples=120, deadline=None)
@given(HEADS, st.binary(max_size=300), LENGTHS, CODINGS)
def test_any_json_with_any_bytes_behind_it(server, head, raw, length, coding):
    text = json.dumps(head).encode()
    told = str(len(text)) if length is None else str(length)
    settled(server, posted(text + raw, inference_header_content_length=told, content_encoding=coding))


@settings(max_examples=80, deadline=None)
@given(st.binary(max_size=600), LENGTHS, CODINGS)
def test_any_bytes_as_a_body(server, body, length, coding):
    told = None if length is None else str(length)
    settled(server, posted(body, inference_header_content_length=told, content_encoding=coding))


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_a_good_request_with_bytes_changed_cut_or_put_in(server, data):
    body = bytearray(BODY)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(body) - 1))
        how = data.draw(st.sampled_from(["change", "cut", "put in"]))
        if how == "change":
            body[place] = data.draw(st.integers(0, 255))
        elif how == "cut":
            del body[place:]
            body += b"{"
        else:
            body[place:place] = data.draw(st.binary(min_size=1, max_size=5))
    settled(server, posted(bytes(body), inference_header_content_length=str(HEAD)))


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 200))
def test_any_bytes_instead_of_a_head(server, junk, place):
    """They may also say nothing whole; then the time for a head runs out, or the connection ends."""
    request = posted(BODY, inference_header_content_length=str(HEAD))
    mixed = request[:place] + junk + request[place:]
    with Connection(server.port) as connection:
        connection.send(mixed)
        reply = connection.reply()
    if reply is not None:
        assert reply.status in (100, 200) or 400 <= reply.status < 500, reply


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.data())
def test_ragged_rows_come_back_at_their_own_lengths(server, lengths, data):
    """The fake session answers x itself: y is x up to each row's last visible position, then 0."""
    longest = max(lengths)
    x = np.arange(len(lengths) * longest * 32, dtype=np.float32).reshape(len(lengths), longest, 32) + 1
    mask = np.zeros((len(lengths), longest), bool)
    for row, length in enumerate(lengths):
        mask[row, :length] = data.draw(st.lists(st.booleans(), min_size=length, max_size=length))
    body, head = infer_body(x, mask)
    y = settled(server, posted(body, inference_header_content_length=str(head))).y
    for row in range(len(lengths)):
        end = max((i + 1 for i in range(longest) if mask[row, i]), default=0)
        assert np.array_equal(y[row, :end], x[row, :end])
        assert (y[row, end:] == 0).all()
