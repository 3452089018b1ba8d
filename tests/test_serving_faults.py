"""What goes wrong around a request: each has its answer and its counter, and the counters add up."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from serving import Connection, ask, fake_runner, get, http, infer_request, serving, until

from mha_deploy.errors import GraphError
from mha_deploy.serving import Limits

X = np.ones((1, 4, 32), np.float32)
RAISES = 13.0  # a value that the fake session does not stand
SECRET = "a path /srv/models/secret.onnx"


class Gate:
    """A fake session's function that waits until it is let through, and raises where x holds `RAISES`."""

    def __init__(self, *, open_at_once=False):
        self.opened, self.entered = threading.Event(), threading.Event()
        if open_at_once:
            self.opened.set()

    def __call__(self, feeds):
        self.entered.set()
        assert self.opened.wait(30)
        if (feeds["x"] == RAISES).any():
            raise GraphError(SECRET)
        return {"y": feeds["x"]}


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.opened.set()


def outcomes(running):
    """The server's counters, once nothing is in progress, and that they add up with the runner's."""
    until(lambda: running.stats.in_progress == 0)
    until(lambda: running.runner.load().pending == 0)
    stats, snapshot = running.stats, running.runner.snapshot()
    assert stats.received == sum(stats.outcomes.values())
    assert snapshot.received == sum(snapshot.outcomes.values())
    return {outcome.value: count for outcome, count in stats.outcomes.items() if count}


def test_a_session_that_raises_is_a_500_for_that_request_alone():
    with serving(fake_runner(Gate(open_at_once=True))) as running:
        bad = ask(running.port, infer_request(np.full_like(X, RAISES)))
        assert (bad.status, ask(running.port, infer_request(X)).status) == (500, 200)
        assert bad.json == {"error": "the session failed to run this request (GraphError)"}
        assert outcomes(running) == {"failed": 1, "answered": 1}


def test_one_bad_row_fails_its_request_and_no_other(gate):
    with serving(fake_runner(gate)) as running, ThreadPoolExecutor(8) as pool:
        rows = np.concatenate([X, np.full_like(X, RAISES), X])
        pending = [pool.submit(ask, running.port, infer_request(each)) for each in (X, rows, X, X)]
        until(lambda: running.runner.load().pending == 6)
        gate.opened.set()
        assert [each.result().status for each in pending] == [200, 500, 200, 200]
        assert outcomes(running) == {"answered": 3, "failed": 1}


def test_a_session_that_hangs_costs_its_callers_their_deadline_and_no_more(gate):
    with serving(fake_runner(gate), limits=Limits(request_s=0.2)) as running:
        running_one = ask(running.port, infer_request(X))
        queued_one = ask(running.port, infer_request(X, timeout=100_000))
        assert (running_one.status, queued_one.status) == (504, 504)
        assert "within the 0.2 s" in running_one.json["error"]
        assert get(running.port, "/v2/health/live").status == 200
        assert outcomes(running) == {"expired": 2}


def test_a_client_that_leaves_takes_its_queued_work_along(gate):
    with serving(fake_runner(gate)) as running:
        first, *others = connections = [Connection(running.port) for _ in range(4)]
        first.send(infer_request(X))
        until(gate.entered.is_set)
        for connection in others:
            connection.send(infer_request(X))
        until(lambda: running.runner.load().queued_requests == 3)
        for connection in others[:2]:
            connection.socket.close()
        until(lambda: running.runner.load().queued_requests == 1)
        gate.opened.set()
        assert (first.reply().status, others[2].reply().status) == (200, 200)
        for connection in connections:
            connection.socket.close()
        assert outcomes(running) == {"answered": 2, "cancelled": 2}
        assert running.runner.snapshot().outcomes["cancelled"] == 2
        metrics = get(running.port, "/metrics").body.decode()
        assert 'nv_inference_request_failure{model="small",version="1",reason="CANCELED"} 2' in metrics


def test_a_client_that_leaves_amid_its_body_is_counted_too(gate):
    with serving(fake_runner(gate)) as running:
        with Connection(running.port) as connection:
            connection.send(infer_request(X)[:-50])
            until(lambda: running.stats.in_progress == 1)
        assert outcomes(running) == {"cancelled": 1}


def test_a_full_queue_is_a_503_that_says_when_to_come_again(gate):
    with serving(fake_runner(gate, max_queue_requests=2)) as running, ThreadPoolExecutor(8) as pool:
        pending = [pool.submit(ask, running.port, infer_request(X))]
        until(gate.entered.is_set)
        pending += [pool.submit(ask, running.port, infer_request(X)) for _ in range(2)]
        until(lambda: running.runner.load().queued_requests == 2)
        refused = ask(running.port, infer_request(X))
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert "the queue is full: it holds 2 of 2 requests" in refused.json["error"]
        gate.opened.set()
        assert [each.result().status for each in pending] == [200] * 3
        assert outcomes(running) == {"answered": 3, "overloaded": 1}
        metrics = get(running.port, "/metrics").body.decode()
        assert 'nv_inference_request_failure{model="small",version="1",reason="REJECTED"} 1' in metrics


def test_a_request_of_many_rows_that_does_not_fit_leaves_none_behind(gate):
    with serving(fake_runner(gate, max_queue_requests=5)) as running, ThreadPoolExecutor(2) as pool:
        pending = [pool.submit(ask, running.port, infer_request(X))]
        until(gate.entered.is_set)
        pending.append(pool.submit(ask, running.port, infer_request(X)))
        until(lambda: running.runner.load().queued_requests == 1)
        assert ask(running.port, infer_request(np.repeat(X, 5, 0))).status == 503
        until(lambda: running.runner.load().queued_requests == 1)
        gate.opened.set()
        assert [each.result().status for each in pending] == [200, 200]
        assert outcomes(running) == {"answered": 2, "overloaded": 1}


@pytest.mark.parametrize(
    ("bound", "words"),
    [
        ({"max_queue_requests": 3}, "a request of 4 rows, but the queue holds 3 (--queue-requests)"),
        ({"max_queue_tokens": 15}, "a request of 16 tokens, but the queue holds 15 (--queue-tokens)"),
        ({"max_queue_bytes": 2000}, "a request of 2048 bytes, but the queue holds 2000 (--queue-bytes)"),
    ],
)
def test_rows_that_no_queue_of_this_server_can_hold_are_not_told_to_come_again(bound, words):
    with serving(fake_runner(**bound)) as running:
        refused = ask(running.port, infer_request(np.repeat(X, 4, 0)))
        assert (refused.status, "retry-after" in refused.headers) == (413, False)
        assert words in refused.json["error"]
        assert outcomes(running) == {"refused": 1}


def test_a_body_that_still_arrives_at_the_end_is_answered_so():
    with serving(fake_runner()) as running, Connection(running.port) as slow:
        slow.send(infer_request(X)[:-10])
        until(lambda: running.stats.in_progress == 1)
        report = running.stop(0.0)
        reply = slow.reply()
        assert (reply.status, reply.headers["connection"]) == (503, "close")
        assert reply.json == {"error": "the server is shutting down; the body had not arrived"}
        assert slow.closed()
    assert {name: count for name, count in report.outcomes.items() if count} == {"closing": 1}


def test_an_expired_deadline_is_a_504_and_is_never_run(gate):
    seen = []

    def function(feeds):
        seen.append(float(feeds["x"][0, 0, 0]))
        return gate(feeds)

    with serving(fake_runner(function)) as running, ThreadPoolExecutor(2) as pool:
        pending = pool.submit(ask, running.port, infer_request(X))
        until(gate.entered.is_set)
        late = ask(running.port, infer_request(X * 2, timeout=50_000))
        assert late.status == 504
        assert "no answer within the 50 ms" in late.json["error"]
        gate.opened.set()
        assert pending.result().status == 200
        assert outcomes(running) == {"answered": 1, "expired": 1}
    assert seen == [1.0]


def test_draining_finishes_what_was_accepted_and_refuses_the_rest(gate):
    """S11: one running and five queued at the stop: six answers, and a seventh is refused."""
    with (
        serving(fake_runner(gate)) as running,
        ThreadPoolExecutor(8) as pool,
        Connection(running.port) as waiting,
    ):
        pending = [pool.submit(ask, running.port, infer_request(X)) for _ in range(6)]
        until(lambda: running.runner.load().pending == 6)
        stopping = pool.submit(running.stop, 10.0)
        until(lambda: get(running.port, "/v2/health/ready").status == 503)
        assert get(running.port, "/v2/health/live").status == 200
        waiting.send(infer_request(X))
        refused = waiting.reply()
        assert (refused.status, refused.headers["connection"]) == (503, "close")
        assert "shutting down" in refused.json["error"]
        gate.opened.set()
        assert [each.result().status for each in pending] == [200] * 6
        report = stopping.result()
    assert (report.received, report.outcomes) == (7, {"answered": 6, "closing": 1})


def test_with_no_grace_every_request_is_told_and_none_hangs(gate):
    with serving(fake_runner(gate)) as running, ThreadPoolExecutor(8) as pool:
        pending = [pool.submit(ask, running.port, infer_request(X)) for _ in range(6)]
        until(lambda: running.runner.load().pending == 6)
        report = running.stop(0.0)
        replies = [each.result() for each in pending]
    assert [reply.status for reply in replies] == [503] * 6
    assert "was closed before this request was answered" in replies[0].json["error"]
    assert (report.received, report.outcomes) == (6, {"closing": 6})


def test_every_request_of_a_storm_ends_in_one_outcome(random):
    """Good, bad, raising, leaving, late and refused ones at once: what clients saw is what was counted."""

    def function(feeds):
        time.sleep(0.002)
        if (feeds["x"] == RAISES).any():
            raise GraphError(SECRET)
        return {"y": feeds["x"]}

    kinds = {
        "good": infer_request(X),
        "bad": infer_request(np.ones((1, 70, 32), np.float32)),
        "raising": infer_request(np.full((1, 3, 32), RAISES, np.float32)),
        "late": infer_request(X, timeout=1),
    }

    def client(kind):
        with Connection(running.port) as connection:
            if kind == "leaving":
                connection.send(infer_request(X)[:-20])
                return 499
            connection.send(kinds[kind])
            return connection.reply().status

    with serving(fake_runner(function, max_queue_requests=12)) as running, ThreadPoolExecutor(32) as pool:
        statuses = list(pool.map(client, random.choice([*kinds, "leaving"], 300)))
        seen = outcomes(running)
        snapshot = running.runner.snapshot()
    by_status = {status: statuses.count(status) for status in set(statuses)}
    assert seen["answered"] == by_status[200]
    assert seen["refused"] == by_status[400]
    assert seen["failed"] == by_status[500]
    assert seen["cancelled"] == by_status[499]
    assert seen["expired"] == by_status.get(504, 0)
    assert seen.get("overloaded", 0) == by_status.get(503, 0)
    assert snapshot.outcomes["answered"] == seen["answered"]
    assert snapshot.outcomes["failed"] == seen["failed"]
    assert running.stats.received == 300


def test_a_client_that_does_not_take_its_answer_is_dropped():
    """It asks on and on and reads nothing: once the sockets are full, an answer waits for its reader."""
    wide = np.ones((6, 64, 32), np.float32)
    with serving(fake_runner(), limits=Limits(write_s=0.2)) as running:
        with Connection(running.port) as connection:
            for _ in range(400):
                try:
                    connection.socket.settimeout(0.5)
                    connection.send(infer_request(wide))
                except (TimeoutError, OSError):
                    break
            until(lambda: running.stats.outcomes["cancelled"] == 1)
        assert outcomes(running)["cancelled"] == 1


@pytest.mark.parametrize("last", ["keep-alive", "close"])
def test_a_client_that_leaves_a_little_of_its_last_answer_is_dropped_in_the_end(last):
    """Less than a transport holds before it says so: it was handed over, and nobody waits for it."""
    wide, limits = np.ones((2, 16, 32), np.float32), Limits(write_s=0.3, idle_s=0.3)
    with serving(fake_runner(), limits=limits) as running, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", running.port))
        count = 0
        while not running.unsent():
            client.sendall(infer_request(wide))
            count += 1
            until(lambda sent=count: running.stats.outcomes["answered"] == sent)
        if last == "close":
            client.sendall(infer_request(wide).replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
            count += 1
        until(lambda: not running.call(running.connections()))
        assert outcomes(running) == {"answered": count}


def test_no_tensor_and_no_path_is_logged(caplog, capfd):
    with caplog.at_level("DEBUG"), serving(fake_runner(Gate(open_at_once=True))) as running:
        ask(running.port, infer_request(np.full_like(X, RAISES)))
        ask(running.port, b"GET /v2 HTTP/1.1\r\nHost: a\r\nsecret\r\n\r\n")
        ask(running.port, http("POST", "/v2/models/small/infer", b'{"secret": 1}'))
    ours = [record.getMessage() for record in caplog.records if not record.name.startswith("asyncio")]
    assert ours == ["a request failed: GraphError"]
    printed = capfd.readouterr()
    assert "secret" not in printed.out + printed.err
