"""Requests that are wrong on the wire: each gets its 4xx as JSON, none hangs, none costs memory."""

from __future__ import annotations

import gzip
import json
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
from serving import (
    INFER,
    MODEL,
    Connection,
    ask,
    fake_runner,
    get,
    http,
    infer_body,
    infer_request,
    serving,
    until,
)

import mha_deploy
from mha_deploy.errors import InputError
from mha_deploy.serving import Limits

# Small, so that what is beyond them is quickly made; the times are what a slow sender costs the test.
LIMITS = Limits(
    body_bytes=1 << 20,
    json_bytes=1 << 18,
    header_bytes=1 << 14,
    header_s=0.4,
    body_s=0.4,
    body_bytes_per_s=1 << 16,
    connections=64,
)


@pytest.fixture(scope="module")
def server():
    with serving(fake_runner(), limits=LIMITS) as running:
        yield running


X = np.arange(128, dtype=np.float32).reshape(1, 4, 32)
MASK = np.ones((1, 4), bool)
BODY, HEAD = infer_body(X, MASK)


def post(body=BODY, path=INFER, head=HEAD, **headers):
    return http("POST", path, body, **{"inference_header_content_length": head, **headers})


def head_of(**changes):
    """An infer request whose JSON has these members instead."""
    inputs = [
        {"name": "x", "shape": [1, 4, 32], "datatype": "FP32", "parameters": {"binary_data_size": 512}},
        {"name": "mask", "shape": [1, 4], "datatype": "BOOL", "parameters": {"binary_data_size": 4}},
    ]
    return {"inputs": inputs, "parameters": {"binary_data_output": True}, **changes}


RAW = X.tobytes() + MASK.tobytes()


def with_head(head, raw=RAW):
    text = json.dumps(head).encode()
    return post(text + raw, head=len(text))


def with_input(index=0, **changes):
    head = head_of()
    head["inputs"][index] |= changes
    return with_head(head)


def raw_json(text):
    return post(text, head=None)


def chunked(*chunks, tail=b"0\r\n\r\n", **headers):
    """A chunked request from ready-made chunks."""
    start = http("POST", INFER, content_length=None, transfer_encoding="chunked", **headers)
    return start + b"".join(chunks) + tail


BOMB = zlib.compress(bytes(1 << 30 >> 4), 9)  # 64 MiB in 64 KiB
GOOD_GZIP = gzip.compress(BODY)

FRAMING = {
    "no HTTP at all": (b"hello\r\n\r\n", 400),
    "TLS on a plain port": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(60), 400),
    "a line with no version": (b"GET /v2\r\n\r\n", 400),
    "an unknown version": (b"GET /v2 HTTP/9.9\r\nHost: a\r\n\r\n", 400),
    "no host": (b"GET /v2 HTTP/1.1\r\n\r\n", 400),
    "two hosts": (b"GET /v2 HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
    "a header with no colon": (b"GET /v2 HTTP/1.1\r\nHost: a\r\nnonsense\r\n\r\n", 400),
    "a space before the colon": (b"GET /v2 HTTP/1.1\r\nHost : a\r\n\r\n", 400),
    "a folded header": (b"GET /v2 HTTP/1.1\r\nHost: a\r\nx: 1\r\n 2\r\n\r\n", 400),
    "bare line feeds": (b"GET /v2 HTTP/1.1\nHost: a\n\n", 400),
    "a NUL in a header": (b"GET /v2 HTTP/1.1\r\nHost: a\r\nx: \x00\r\n\r\n", 400),
    "length and chunks": (post(transfer_encoding="chunked"), 400),
    "two lengths": (post().replace(b"\r\n", b"\r\ncontent-length: 1\r\n", 1), 400),
    "a negative length": (post(content_length="-1"), 400),
    "a length that is a word": (post(content_length="many"), 400),
    "a length in hex": (post(content_length="0x10"), 400),
    "a length of 30 digits": (post(content_length="9" * 30), 400),
    "no length": (http("POST", INFER, content_length=None), 411),
    "a length of 99 GB": (http("POST", INFER, content_length=str(99 * 10**9)), 413),
    "a length one beyond the cap": (http("POST", INFER, content_length=str((1 << 20) + 1)), 413),
    "an unknown transfer coding": (http("POST", INFER, content_length=None, transfer_encoding="zip"), 400),
    "gzip as a transfer coding": (
        chunked(b"%x\r\n%s\r\n" % (len(BODY), BODY)).replace(b": chunked", b": gzip, chunked"),
        400,
    ),
    "a chunk size that is a word": (chunked(b"zz\r\nabc\r\n"), 400),
    "a negative chunk size": (chunked(b"-5\r\nabc\r\n"), 400),
    "a chunk longer than its size": (chunked(b"2\r\nabcdef\r\n"), 400),
    "a chunk size of 20 digits": (chunked(b"f" * 20 + b"\r\n"), 400),
    "chunks beyond the cap": (chunked(*[b"20000\r\n" + bytes(1 << 17) + b"\r\n"] * 9), 413),
    "an unknown expectation": (post(expect="a-miracle"), 417),
    "a line of 20 KB": (http("GET", "/" + "a" * 20_000), 431),
    "a header of 20 KB": (http("GET", "/v2", x="a" * 20_000), 431),
    "many headers": (http("GET", "/v2", **{f"h{i}": "a" for i in range(200)}), 400),
    "many long headers": (
        b"GET /v2 HTTP/1.1\r\nHost: a\r\n" + b"".join(b"h%d: %s\r\n" % (i, b"a" * 500) for i in range(60)),
        431,
    ),
    "a half head, then silence": (b"GET /v2 HTTP/1.1\r\nHost: a\r\n", 408),
    "a half body, then silence": (post()[:-100], 408),
    "a half chunk, then silence": (chunked(b"40\r\nabc", tail=b""), 408),
}
PATHS = {
    "an unknown path": (http("GET", "/v3"), 404),
    "a path above": (http("GET", "/v2/../etc/passwd"), 404),
    "a path with a percent that escapes nothing": (http("GET", "/v2/models/%zz"), 404),
    "an unknown model": (post(path="/v2/models/other/infer"), 404),
    "an unknown version": (post(path=f"/v2/models/{MODEL}/versions/7/infer"), 404),
    "a model's unknown part": (http("GET", f"/v2/models/{MODEL}/secrets"), 404),
    "a history since a moment of 5000 digits": (http("GET", "/live.json?since=" + "9" * 5000), 400),
    "GET on infer": (http("GET", INFER), 405),
    "POST on health": (http("POST", "/v2/health/live"), 405),
    "DELETE on a model": (http("DELETE", f"/v2/models/{MODEL}"), 405),
    "a method nobody knows": (http("BREW", "/v2"), 400),
    "CONNECT": (b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n", 405),
    "an upgrade to WebSocket on infer": (
        http("GET", INFER, upgrade="websocket", connection="Upgrade", sec_websocket_key="a" * 22 + "=="),
        405,
    ),
    "loading a model": (http("POST", f"/v2/repository/models/{MODEL}/load"), 403),
    "a repository index that is no JSON": (http("POST", "/v2/repository/index", b"{"), 400),
    "a history since a word": (http("GET", "/live.json?since=ever"), 400),
}
CODINGS = {
    "an unknown coding": (post(content_encoding="br"), 415),
    "two codings": (post(content_encoding="gzip, gzip"), 415),
    "gzip that is none": (post(content_encoding="gzip"), 400),
    "deflate that is none": (post(content_encoding="deflate"), 400),
    "half a gzip": (post(GOOD_GZIP[: len(GOOD_GZIP) // 2], content_encoding="gzip"), 400),
    "a gzip with a wrong checksum": (post(GOOD_GZIP[:-8] + bytes(8), content_encoding="gzip"), 400),
    "bytes after a gzip": (post(GOOD_GZIP + b"more", content_encoding="gzip"), 400),
    "a compression bomb": (post(BOMB, content_encoding="deflate"), 413),
    "a bomb in chunks": (
        chunked(b"%x\r\n%s\r\n" % (len(BOMB), BOMB), content_encoding="deflate"),
        413,
    ),
    "a head longer than the unpacked body": (post(GOOD_GZIP, head=10**6, content_encoding="gzip"), 400),
}
JSON_TEXTS = {
    "an empty body": (raw_json(b""), 400),
    "no JSON": (raw_json(b"{inputs}"), 400),
    "half a JSON": (raw_json(b'{"inputs": [{"name": "x"'), 400),
    "JSON that is a list": (raw_json(b"[1, 2]"), 400),
    "JSON that is null": (raw_json(b"null"), 400),
    "JSON not in UTF-8": (raw_json(b'{"inputs": "\xff"}'), 400),
    "nesting a million deep": (raw_json(b'{"inputs":' + b"[" * 200_000), 400),
    "JSON beyond the cap": (raw_json(b'{"id": "' + b"a" * (1 << 19) + b'"}'), 413),
    "NaN in JSON": (raw_json(b'{"inputs": [{"name":"x","shape":[1],"datatype":"FP32","data":[NaN]}]}'), 400),
    "a head longer than the body": (post(head=10**9), 400),
    "a negative head": (post(head=-4), 400),
    "a head that is a word": (post(head="most"), 400),
    "a head of 40 digits": (post(head="9" * 40), 400),
    "a head cut short": (post(head=HEAD - 5), 400),
    "a head too long by a byte": (post(head=HEAD + 1), 400),
}
_empty = {"name": "x", "datatype": "FP32", "parameters": {"binary_data_size": 0}}
TENSORS = {
    "an unknown input": (with_input(name="z"), 400),
    "another datatype": (with_input(datatype="FP64", shape=[1, 2, 32]), 400),
    "a datatype of the same size": (with_input(datatype="INT32"), 400),
    "an unknown datatype": (with_input(datatype="FLOAT"), 400),
    "a rank too low": (with_input(shape=[4, 32]), 400),
    "a rank too high": (with_input(shape=[1, 1, 4, 32]), 400),
    "another width": (with_input(shape=[1, 2, 64]), 400),
    "no rows": (with_input(shape=[0, 4, 32]), 400),
    "a negative dim": (with_input(shape=[-1, 4, 32]), 400),
    "terabytes by the shape": (with_input(shape=[2**31 - 1, 2**31 - 1, 32]), 400),
    "a shape whose product wraps round": (with_input(shape=[2**31 - 1] * 8), 400),
    "a shape that is empty and yet too large": (
        with_head(head_of(inputs=[_empty | {"shape": [0, 2**31 - 1, 2**31 - 1]}]), b""),
        400,
    ),
    "such a shape in JSON": (
        raw_json(b'{"inputs":[{"name":"x","datatype":"FP32","shape":[0,2147483647,2147483647],"data":[]}]}'),
        400,
    ),
    "a dim of a million digits": (
        raw_json(b'{"inputs":[{"name":"x","datatype":"FP32","shape":[' + b"9" * 100_000 + b'],"data":[]}]}'),
        400,
    ),
    "a size that is not the shape's": (with_input(parameters={"binary_data_size": 508}), 400),
    "a size beyond the body": (with_input(parameters={"binary_data_size": 10**15}), 400),
    "bytes left over": (with_head(head_of(), X.tobytes() + MASK.tobytes() + b"\0"), 400),
    "bytes missing": (with_head(head_of(), X.tobytes()), 400),
    "a mask of another length": (with_input(1, shape=[2, 2]), 400),
    "a mask that is neither 0 nor 1": (with_head(head_of(), X.tobytes() + b"\x01\x02\x01\x01"), 400),
    "no x": (with_head(head_of(inputs=head_of()["inputs"][1:]), MASK.tobytes()), 400),
    "a sequence too long": (infer_request(np.zeros((1, 65, 32), np.float32)), 400),
    "a batch too large": (infer_request(np.zeros((7, 4, 32), np.float32)), 400),
    "a priority beyond the levels": (infer_request(X, priority=99), 400),
    "a negative timeout": (infer_request(X, timeout=-1), 400),
    "an answer of NaN asked for in JSON": (infer_request(X * np.nan, binary_data_output=False), 400),
    "an unknown output": (with_head(head_of(outputs=[{"name": "z"}])), 400),
}
ALL = {
    f"{group}: {what}": case
    for group, cases in {
        "framing": FRAMING,
        "path": PATHS,
        "coding": CODINGS,
        "JSON": JSON_TEXTS,
        "tensor": TENSORS,
    }.items()
    for what, case in cases.items()
}


@pytest.mark.parametrize("what", ALL)
def test_answered_with_its_4xx(server, what):
    data, status = ALL[what]
    reply = ask(server.port, data)
    assert reply is not None, "the connection ended without an answer"
    assert reply.status == status, reply.body
    assert reply.headers["content-type"].startswith("application/json")
    assert isinstance(reply.json["error"], str)
    assert len(reply.json["error"]) < 400
    if status == 405:
        assert "allow" in reply.headers


def test_there_are_at_least_sixty():
    assert len(ALL) >= 60


def test_nothing_malformed_is_told_back_at_length_or_names_a_file(server):
    reply = ask(server.port, with_input(name="z" * 5000))
    assert len(reply.body) < 600
    for what in ("path: a path above", "JSON: no JSON", "framing: a folded header"):
        assert str(Path(mha_deploy.__file__).parents[1]).encode() not in ask(server.port, ALL[what][0]).body
        assert b".py" not in ask(server.port, ALL[what][0]).body


def test_the_server_is_as_well_afterwards_as_before(server):
    """All of them at once: every one is answered, memory stays bounded, and a good request is served."""
    process = psutil.Process()
    before = process.memory_info().rss
    good = ask(server.port, infer_request(X, MASK)).y
    with ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(lambda case: ask(server.port, case[0]), list(ALL.values()) * 2))
    assert all(reply is not None and 400 <= reply.status < 500 for reply in replies)
    assert process.memory_info().rss - before < 256 << 20
    assert np.array_equal(ask(server.port, infer_request(X, MASK)).y, good)
    stats = server.stats
    until(lambda: stats.in_progress == 0)
    assert stats.received == sum(stats.outcomes.values())
    assert stats.outcomes["failed"] == 0


def test_senders_who_promise_much_and_send_little_hold_little(server):
    process = psutil.Process()
    start = http("POST", INFER, content_length=str(1 << 20)) + bytes(10)
    before = process.memory_info().rss
    connections = [Connection(server.port) for _ in range(40)]
    for connection in connections:
        connection.send(start)
    replies = [connection.reply() for connection in connections]
    assert {reply.status for reply in replies} == {408}
    assert process.memory_info().rss - before < 30 << 20
    for connection in connections:
        connection.socket.close()


def test_a_body_slower_than_its_least_rate_is_given_up(server):
    with Connection(server.port) as connection:
        connection.send(post()[:-200])
        for _ in range(100):  # a byte every few ms: never silent, and never done
            try:
                connection.send(b"\0")
            except OSError:
                break
            connection.socket.settimeout(0.02)
            try:
                if connection.socket.recv(1, 2):  # MSG_PEEK
                    break
            except TimeoutError:
                continue
        connection.socket.settimeout(10)
        assert connection.reply().status == 408


def test_a_chunk_that_goes_wrong_amid_a_body_is_answered_at_once():
    """The time for bodies is far longer than this test waits."""
    with (
        serving(fake_runner(), limits=Limits(body_s=600)) as running,
        Connection(running.port, 5) as connection,
    ):
        connection.send(chunked(b"5\r\nabcde\r\n", tail=b""))
        until(lambda: running.stats.in_progress == 1)
        connection.send(b"zz\r\nabc\r\n")
        reply = connection.reply()
    assert (reply.status, reply.json) == (400, {"error": "the body is framed wrongly, or ended too early"})


def test_more_connections_than_allowed_are_told_so():
    with serving(fake_runner(), limits=Limits(connections=3)) as running:
        held = [Connection(running.port) for _ in range(3)]
        for connection in held:
            connection.send(http("GET", "/v2/health/live"))
            assert connection.reply().status == 200
        with Connection(running.port) as one_more:
            reply = one_more.reply()
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")
        held[0].socket.close()
        assert get(running.port, "/v2/health/live").status in (200, 503)
        for connection in held:
            connection.socket.close()


def test_an_idle_connection_is_closed():
    with serving(fake_runner(), limits=Limits(idle_s=0.2)) as running, Connection(running.port) as connection:
        connection.send(http("GET", "/v2/health/live"))
        assert connection.reply().status == 200
        assert connection.closed()


def test_bodies_in_progress_are_bounded_together():
    limits = Limits(body_bytes=1000, bodies_bytes=1000, body_s=5)
    with serving(fake_runner(), limits=limits) as running, Connection(running.port) as holder:
        holder.send(http("POST", INFER, content_length="1000") + bytes(900))
        held = b'mha_request_bytes_in_progress{model="small",version="1"} 900'
        until(lambda: held in get(running.port, "/metrics").body)
        reply = ask(running.port, infer_request(X, MASK))
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")
        assert "at most 1000" in reply.json["error"]


def test_a_body_that_needs_more_than_all_may_hold_is_not_told_to_come_again():
    """What it unpacks to fits, and so does what was sent, but not both."""
    packed = gzip.compress(BODY, 0)
    limits = Limits(body_bytes=len(packed), bodies_bytes=len(packed) + 100)
    with serving(fake_runner(), limits=limits) as running:
        reply = ask(running.port, post(packed, content_encoding="gzip"))
    assert (reply.status, reply.headers.get("retry-after")) == (413, None)
    assert "this request would hold more than the" in reply.json["error"]


def test_a_body_larger_than_all_may_hold_together_cannot_be_allowed():
    Limits(body_bytes=512 << 20)
    with pytest.raises(InputError, match=r"body_bytes = 1001; expected at most bodies_bytes = 1000, what"):
        Limits(body_bytes=1001, bodies_bytes=1000)


GARBAGE = b"GARBAGE\r\n\r\n"
BEHIND = {
    "nothing but garbage": ([GARBAGE], [400]),
    "a request, then garbage": ([post() + GARBAGE], [200, 400]),
    "two requests, then garbage": ([post() * 2 + GARBAGE], [200, 200, 400]),
    "no body, then garbage": ([http("GET", "/v2") + GARBAGE], [200, 400]),
    "chunks, then garbage": (
        [chunked(b"%x\r\n%s\r\n" % (len(BODY), BODY), inference_header_content_length=HEAD) + GARBAGE],
        [200, 400],
    ),
    "a request, then a wrong chunk": ([post() + chunked(b"zz\r\nabc\r\n")], [200, 400]),
    "the rest of a body, then garbage": ([post()[:-100], post()[-100:] + GARBAGE], [200, 400]),
    "garbage, then a request": ([GARBAGE + post()], [400]),
    "more requests than are queued": ([post() * 100 + GARBAGE], [200] * 100 + [400]),
    "as many in two parts": (
        [post() * 50 + post()[:99], post()[99:] + post() * 49 + GARBAGE],
        [200] * 100 + [400],
    ),
}


@pytest.mark.parametrize("what", BEHIND)
def test_what_is_wrong_behind_a_request_takes_nothing_from_it(server, what):
    parts, expected = BEHIND[what]
    before = server.stats.outcomes["answered"]
    with Connection(server.port) as connection:
        for part in parts:
            connection.send(part)
            time.sleep(0.05)
        statuses = [reply.status for reply in iter(connection.reply, None)]
    assert statuses == expected
    if what != "no body, then garbage":
        assert server.stats.outcomes["answered"] - before == expected.count(200)
