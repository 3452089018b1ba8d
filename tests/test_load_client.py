"""The client of load against real servers, and against ones that misbehave on purpose."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest
from conftest import small_spec
from loading import LENGTHS, QUICK, listening, others, poisson, run
from serving import bundle_runner, fake_runner, serving

from mha_deploy.errors import InputError
from mha_deploy.load import (
    Arrivals,
    LoadOptions,
    RunnerTarget,
    client,
    closed_plan,
    open_plan,
    parse_lengths,
    run_load,
    server,
    server_target,
)
from mha_deploy.load.encoding import HEAD_LENGTH, BinaryEncoding, Reply
from mha_deploy.load.inputs import Inputs
from mha_deploy.load.server import address
from mha_deploy.signature import Dim


@pytest.fixture(scope="module")
def port(small_bundle):
    """Of a server over the small bundle."""
    with serving(bundle_runner(small_bundle)) as running:
        yield running.port


def test_connections_are_used_again(port):
    target = server_target(f"http://127.0.0.1:{port}", 64)
    connected, opened = target._connected, []

    async def counted():
        opened.append(1)
        return await connected()

    target._connected = counted
    report = run_load(target, closed_plan(1, LENGTHS, 30), LoadOptions(warm_up=0, sample=0))
    assert others(report) == {"answered": 30}
    assert len(opened) == 16


def test_more_requests_than_connections_at_once_are_all_answered(port):
    burst = open_plan(Arrivals("constant", 1e6), LENGTHS, 60)
    assert others(run(port, burst)) == {"answered": 60}


def test_what_a_server_refuses_is_an_error_with_the_servers_words(port):
    target = server_target(f"http://127.0.0.1:{port}", 64)
    target.inputs = Inputs.of(target.inputs.tensors, 80)
    report = run_load(target, open_plan(Arrivals("constant", 1e3), parse_lengths("fixed:80"), 5), QUICK)
    assert others(report) == {"error": 5}
    assert list(report.notes.values()) == [5]
    assert "seq = 80; this block takes seq 1..64" in next(iter(report.notes))


def test_lengths_beyond_what_a_servers_configuration_says_are_refused(port):
    with pytest.raises(InputError, match="a request of length 65; this block takes seq up to 64"):
        server_target(f"http://127.0.0.1:{port}", 65)
    cross = small_spec(kind="cross", dims=(Dim("q_len", 4, 8, 40), Dim("kv_len", 4, 8, 30)))
    for mask, shortest, longest, words in (
        ("none", 4, 31, "length 31; this block takes kv_len up to 30"),
        ("none", 3, 30, "length 3; this block takes q_len from 4 up"),
        ("padding", 0, 31, "length 31; this block takes kv_len up to 30"),
    ):
        runner = fake_runner(spec=replace(cross, mask=mask))
        with serving(runner) as running, pytest.raises(InputError, match=words):
            server_target(f"http://127.0.0.1:{running.port}", longest, shortest=shortest)
        with fake_runner(spec=replace(cross, mask=mask)) as runner, pytest.raises(InputError, match=words):
            RunnerTarget(runner, longest, shortest=shortest)


@pytest.mark.parametrize(
    "config",
    [
        None,
        [],
        {},
        {"parameters": None},
        {"parameters": {"seq": 64}},
        {"parameters": {"seq": {"string_value": None}, "batch": {"string_value": "1..8"}}},
        {"parameters": {"seq": {"string_value": "64"}, "mode": {"string_value": "exact"}}},
    ],
)
def test_a_configuration_without_ranges_limits_no_length(config):
    assert server._ranges(config) == {}


def test_a_token_is_sent_to_the_server(small_bundle):
    with serving(fake_runner(), token="secret") as running:
        assert others(run(running.port, poisson(5), token="secret")) == {"answered": 5}
        with pytest.raises(InputError, match=r"401 .*this server wants a token"):
            run(running.port, poisson(5))


@pytest.mark.parametrize("name", ["my block \u00e9", "\u6a21\u578b", "a/b?c#d%41"])
@pytest.mark.parametrize("named", [False, True])
def test_a_model_is_loaded_whatever_its_name(name, named):
    with serving(fake_runner(spec=small_spec(name=name))) as running:
        report = run(running.port, poisson(5), model=name if named else "")
    assert others(report) == {"answered": 5}
    assert report.target.startswith(f"{name} at ")


@pytest.mark.parametrize("name", ["a\r\nX: y", "a HTTP/1.1\r\n\r\n", "\udcff", "\u6a21\u578b"])
def test_no_name_of_a_model_reaches_beyond_the_path(port, name):
    with pytest.raises(InputError, match=r"404 Not Found' .*no model"):
        server_target(f"http://127.0.0.1:{port}", 8, model=name)
    (head, *_) = BinaryEncoding(name).request("h", Inputs.of((), 1).feeds(1, 0))
    assert head.split(b"\r\n")[0].count(b" ") == 2
    assert [line.split(b":")[0] for line in head.split(b"\r\n")[1:3]] == [
        b"Host",
        b"inference-header-content-length",
    ]


@pytest.mark.parametrize(
    ("answer", "outcome", "note"),
    [
        (b"", "disconnected", "the connection ended before the answer"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf", "disconnected", "ended before the answer"),
        (b"nonsense\r\n\r\n", "error", "an answer without a status and a length: 'nonsense'"),
        (b"HTTP/1.1 418 Tea\r\ncontent-length: 3\r\n\r\ntea", "error", "status 418: 'tea'"),
        (b"HTTP/1.1 504 Late\r\nContent-Length: 0\r\n\r\n", "expired", "status 504"),
        (b"HTTP/1.1 429 Slow\r\nContent-Length: 0\r\n\r\n", "refused", "status 429"),
    ],
)
def test_answers_that_are_none_have_the_outcome_that_they_are(port, answer, outcome, note):
    target = server_target(f"http://127.0.0.1:{port}", 64)
    with listening(answer) as other:
        target._port = other
        report = run_load(target, closed_plan(1, LENGTHS, 1), LoadOptions(warm_up=0, sample=0))
    assert others(report) == {outcome: 1}
    assert note in next(iter(report.notes))


def test_a_body_that_is_no_answer_fails_the_check(port):
    target = server_target(f"http://127.0.0.1:{port}", 64)
    with listening(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}") as other:
        target._port = other
        report = run_load(target, closed_plan(1, LENGTHS, 1), LoadOptions(warm_up=0, sample=8))
    assert others(report) == {"answered": 1}
    assert (report.check.failed, report.passed) == (1, False)
    assert "an answer that cannot be read" in report.check.first_failure
    deep = b"[" * 100_000
    with pytest.raises(InputError, match="an answer that cannot be read"):
        target.decode(Reply(200, {HEAD_LENGTH: str(len(deep))}, deep))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://127.0.0.1:1", "load does not speak TLS; expected http://HOST:PORT"),
        ("http://127.0.0.1:1/v2", "expected http://HOST:PORT, without a path or a query"),
        ("http://127.0.0.1:1?model=a", "expected http://HOST:PORT, without a path or a query"),
        ("http://127.0.0.1:1/#a", "expected http://HOST:PORT, without a path or a query"),
        ("http://:secret@127.0.0.1:1", "expected http://HOST:PORT"),
        ("http://127.0.0.1:0", "expected http://HOST:PORT"),
        ("http://a..b", "label empty or too long.*; expected http://HOST:PORT"),
        (f"http://{'a' * 64}:80", "label .*too long.*; expected http://HOST:PORT"),
        ("http://127.0.0.1:99999", "expected http://HOST:PORT"),
        ("http://192.0.2.7:80", "192.0.2.7 is another machine, .* --allow-remote if it is yours"),
        ("http://:80", "expected http://HOST:PORT"),
    ],
)
def test_urls_that_are_no_servers_of_this_machine_are_refused(url, message):
    with pytest.raises(InputError, match=message):
        address(url)


def test_another_machine_is_allowed_when_it_is_asked_for():
    assert address("http://192.0.2.7", allow_remote=True) == ("192.0.2.7", 80)
    assert address("http://[::1]:8000") == ("::1", 8000)
    assert address("http://b\u00fccher.example:81", allow_remote=True) == ("xn--bcher-kva.example", 81)


def test_a_server_or_model_that_is_not_there_is_told(port):
    with socket.create_server(("127.0.0.1", 0)) as free:
        unused = free.getsockname()[1]
    with pytest.raises(InputError, match=r"no server answers at 127.0.0.1"):
        server_target(f"http://127.0.0.1:{unused}", 8)
    with pytest.raises(InputError, match=r"404 .*no model"):
        server_target(f"http://127.0.0.1:{port}", 8, model="other")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"null", "gives None for its list of models; name the model with --model"),
        (b'{"name": "a"}', "gives .* for its list of models; name the model with --model"),
        (b'[null, {"name": 7}, {"name": [1]}, {"name": ""}, {}]', "has models none; choose one with --model"),
        (b"[" * 100_000, "gave no JSON"),
    ],
)
def test_an_index_that_lists_no_model_is_told(body, message):
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)
    with listening(head + body) as other, pytest.raises(InputError, match=message):
        server_target(f"http://127.0.0.1:{other}", 8)


def test_a_server_that_takes_its_time_is_told_with_the_time_that_it_had(monkeypatch):
    for module in (client, server):
        monkeypatch.setattr(module, "CONNECT_S", 0.05)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(InputError, match=r"no server answers at 127.0.0.1:\d+: no answer within 0.05 s"),
    ):
        server_target(f"http://127.0.0.1:{silent.getsockname()[1]}", 8)


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"inputs": [{"name": "x", "datatype": "BYTES", "shape": [-1]}]},
        {"inputs": [{"name": "x", "datatype": "FP32", "shape": 3}]},
        {"inputs": [{"name": "x", "datatype": "INT64", "shape": [-1, -1]}]},
    ],
)
def test_metadata_that_are_not_of_attention_are_refused(metadata):
    with pytest.raises(InputError, match=r"the server describes its inputs as|cannot make requests for"):
        Inputs.for_metadata(metadata, 8)
