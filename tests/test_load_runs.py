"""Load runs against a real server, a real runner, and targets that misbehave on purpose."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
from conftest import small_spec
from rich.console import Console
from serving import bundle_runner, fake_runner, serving

from mha_deploy.errors import BenchError, InputError, MissingError
from mha_deploy.load import (
    Arrivals,
    LoadOptions,
    ReferenceChecker,
    RunnerTarget,
    closed_plan,
    draw_percentiles,
    find_rate,
    open_plan,
    parse_lengths,
    run_load,
    server_target,
)
from mha_deploy.load.alarm import Alarm
from mha_deploy.load.client import address
from mha_deploy.load.drive import drive
from mha_deploy.load.inputs import VARIANTS, Inputs
from mha_deploy.load.records import Outcome
from mha_deploy.load.target import Target, variant_of
from mha_deploy.render_load import search_tables

LENGTHS = parse_lengths("uniform:1:64")
QUICK = LoadOptions(warm_up=4, sample=8, drain_s=10.0)


def poisson(count, rate=400.0):
    return open_plan(Arrivals("poisson", rate), LENGTHS, count)


def run(port, plan, options=QUICK, checker=None, **how):
    target = server_target(f"http://127.0.0.1:{port}", 64, **how)
    return run_load(target, plan, options, *([checker] if checker else []))


def others(report):
    return {name: count for name, count in report.outcomes.items() if count}


@pytest.fixture(scope="module")
def port(small_bundle):
    with serving(bundle_runner(small_bundle)) as running:
        yield running.port


class Scripted(Target):
    """Answers with what `script(index)` says, as soon as the loop is free; None leaves it unanswered."""

    name = "scripted"

    def __init__(self, script):
        self.script, self.sent = script, []
        self.inputs = Inputs.for_signature(small_spec().signature, 64)

    async def open(self, _lengths):
        self.loop = asyncio.get_running_loop()

    def send(self, index, _length, done):
        self.sent.append(index)
        outcome = self.script(index)
        if outcome is not None:
            self.loop.call_soon(lambda: done(index, outcome, time.monotonic(), b"", outcome.name))

    def decode(self, _answer):
        raise InputError("no tensor")

    async def close(self):
        pass


def driven(script, plan, **options):
    async def go():
        target = Scripted(script)
        await target.open(plan.lengths)
        return target, await drive(target, plan, **options)

    return asyncio.run(go())


def test_an_open_loop_against_a_server_answers_all_and_its_answers_are_right(port, small_bundle):
    report = run(port, poisson(60), checker=ReferenceChecker(small_bundle))
    assert others(report) == {"answered": 60}
    assert (report.check.sampled, report.check.failed) == (8, 0)
    assert 0 < report.check.max_abs_error <= report.check.allowed
    assert report.tokens == poisson(60).lengths.sum()
    assert min(report.records.lag_ms()) >= 0
    assert report.machine["generator_priority"] in ("real-time", "normal")


def test_the_thread_has_its_own_priority_back_after_a_run():
    before = os.sched_getscheduler(0)
    seen = []

    def script(_):
        seen.append(os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK)
        return Outcome.ANSWERED

    report = run_load(Scripted(script), closed_plan(1, LENGTHS, 3), LoadOptions(warm_up=0, sample=0))
    expected = os.SCHED_FIFO if report.machine["generator_priority"] == "real-time" else before
    assert seen == [expected] * 3
    assert os.sched_getscheduler(0) == before


def test_a_closed_loop_against_a_server_answers_all(port):
    report = run(port, closed_plan(3, LENGTHS, 50))
    assert others(report) == {"answered": 50}
    assert report.check.passed
    assert "no bundle was given" in report.check.rule


def test_a_closed_loop_has_so_many_requests_on_their_way_and_no_more():
    on_their_way, most = set(), 0

    class Counting(Scripted):
        def send(self, index, length, done):
            nonlocal most
            on_their_way.add(index)
            most = max(most, len(on_their_way))

            def ended(*arguments):
                on_their_way.discard(index)
                done(*arguments)

            super().send(index, length, ended)

    async def go():
        target = Counting(lambda _: Outcome.ANSWERED)
        await target.open(())
        return await drive(target, closed_plan(3, LENGTHS, 40))

    found = asyncio.run(go())
    assert most == 3
    assert found.records.counts()["answered"] == 40


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


def test_an_open_loop_against_a_runner_in_this_process(small_bundle):
    with bundle_runner(small_bundle) as runner:
        report = run_load(RunnerTarget(runner, 64), poisson(60), QUICK, ReferenceChecker(small_bundle))
    assert others(report) == {"answered": 60}
    assert report.check.passed
    assert report.check.max_abs_error > 0


def test_wrong_answers_are_found(small_bundle):
    with serving(fake_runner(lambda feeds: {"y": feeds["x"] * 1.001})) as running:
        report = run(running.port, poisson(10), checker=ReferenceChecker(small_bundle))
    assert others(report) == {"answered": 10}
    assert report.check.failed == 8
    assert ": off by " in report.check.first_failure
    assert not report.passed


def test_an_answer_that_holds_nan_is_found_without_a_reference():
    with serving(fake_runner(lambda feeds: {"y": feeds["x"] * np.float32(np.nan)})) as running:
        report = run(running.port, poisson(10))
    assert report.check.failed == 8
    assert report.check.first_failure.endswith("y holds NaN or inf")


def test_requests_of_one_length_carry_different_values():
    inputs = Inputs.for_signature(small_spec().signature, 64)
    drawn = [inputs.feeds(64, variant)["x"] for variant in range(VARIANTS)]
    assert len({array.tobytes() for array in drawn}) == VARIANTS
    assert {variant_of(index) for index in range(9)} == set(range(VARIANTS))
    assert all(array.shape == (1, 64, 32) and array.flags.c_contiguous for array in drawn)


def test_a_full_queue_and_a_deadline_have_outcomes_of_their_own():
    def slow(feeds):
        time.sleep(0.05)
        return {"y": feeds["x"]}

    lengths = parse_lengths("fixed:4")
    burst = open_plan(Arrivals("constant", 1e6), lengths, 12)
    with serving(fake_runner(slow, max_queue_requests=2, mode="exact")) as running:
        refused = run(running.port, burst, LoadOptions(warm_up=0, sample=0))
    assert refused.outcomes["refused"] > 0
    assert refused.outcomes["answered"] + refused.outcomes["refused"] == refused.planned == 12
    assert any("status 503" in note for note in refused.notes)
    spread = open_plan(Arrivals("constant", 100.0), LENGTHS, 12)
    with fake_runner(slow) as runner:
        expired = run_load(RunnerTarget(runner, 64, timeout_s=0.04), spread, LoadOptions(warm_up=0, sample=0))
    assert expired.outcomes["expired"] > 0
    assert expired.planned == 12


def test_what_a_server_refuses_is_an_error_with_the_servers_words(port):
    target = server_target(f"http://127.0.0.1:{port}", 80)
    report = run_load(target, open_plan(Arrivals("constant", 1e3), parse_lengths("fixed:80"), 5), QUICK)
    assert others(report) == {"error": 5}
    assert list(report.notes.values()) == [5]
    assert "seq = 80; this block takes seq 1..64" in next(iter(report.notes))


def test_a_token_is_sent_to_the_server(small_bundle):
    with serving(fake_runner(), token="secret") as running:
        assert others(run(running.port, poisson(5), token="secret")) == {"answered": 5}
        with pytest.raises(InputError, match=r"401 .*this server wants a token"):
            run(running.port, poisson(5))


def test_an_open_loop_does_not_wait_for_answers():
    plan = open_plan(Arrivals("constant", 1000.0), LENGTHS, 20)
    target, found = driven(lambda index: None if index < 15 else Outcome.ANSWERED, plan, drain_s=0.05)
    assert target.sent == list(range(20))
    assert found.records.counts() == dict.fromkeys(found.records.counts(), 0) | {
        "answered": 5,
        "unanswered": 15,
    }


def test_requests_beyond_the_bound_in_flight_are_not_sent_and_counted():
    plan = open_plan(Arrivals("constant", 1000.0), LENGTHS, 10)
    target, found = driven(lambda _: None, plan, max_in_flight=4, drain_s=0.05)
    assert target.sent == [0, 1, 2, 3]
    assert found.records.counts()["not_sent"] == 6
    assert found.records.counts()["unanswered"] == 4
    assert found.notes == {"4 requests were on their way already": 6}


def test_a_closed_loop_whose_target_hangs_ends_and_says_what_was_never_sent():
    _, found = driven(
        lambda i: Outcome.ANSWERED if i < 5 else None, closed_plan(2, LENGTHS, 20), drain_s=0.05
    )
    counts = found.records.counts()
    assert (counts["answered"], counts["unanswered"], counts["not_sent"]) == (5, 2, 13)


def test_a_generator_that_is_held_up_counts_the_delay_and_makes_the_run_invalid():
    def block(index):
        if index == 0:
            time.sleep(0.1)
        return Outcome.ANSWERED

    plan = open_plan(Arrivals("constant", 1000.0), LENGTHS, 50)
    _, found = driven(block, plan)
    late = found.records.lag_ms()
    assert min(late[1:40]) >= 50
    assert found.records.latency_ms()[1] >= 90
    assert max(found.records.service_ms()[1:]) < found.records.latency_ms()[1] + 1e3

    class Blocking(Scripted):
        pass

    report = run_load(Blocking(block), plan, LoadOptions(warm_up=0, sample=0))
    assert not report.valid
    assert "the generator sent late" in report.faults[0]


@contextmanager
def listening(answer):
    """A server that reads what comes and sends `answer`, then closes."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.05)
    ended = threading.Event()

    def serve():
        while not ended.is_set():
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            threading.Thread(target=reply, args=(connection,), daemon=True).start()

    def reply(connection):
        with connection:
            if connection.recv(1 << 20):
                connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        ended.set()
        thread.join()
        listener.close()


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


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://127.0.0.1:1", "expected http://HOST:PORT"),
        ("http://127.0.0.1:1/v2", "expected http://HOST:PORT, without a path"),
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


def test_a_server_or_model_that_is_not_there_is_told(port):
    with socket.create_server(("127.0.0.1", 0)) as free:
        unused = free.getsockname()[1]
    with pytest.raises(InputError, match=r"no server answers at 127.0.0.1"):
        server_target(f"http://127.0.0.1:{unused}", 8)
    with pytest.raises(InputError, match=r"404 .*no model"):
        server_target(f"http://127.0.0.1:{port}", 8, model="other")


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


def test_lengths_beyond_the_block_are_refused_before_the_run(small_bundle):
    with (
        bundle_runner(small_bundle) as runner,
        pytest.raises(InputError, match="length 65; this block takes seq up to 64"),
    ):
        RunnerTarget(runner, 65)


def test_options_below_nothing_are_refused():
    with pytest.raises(InputError, match="expected numbers of at least 0"):
        LoadOptions(sample=-1)


def test_an_alarm_rings_once_and_not_before_its_time():
    async def go():
        rung = []
        alarm = Alarm(asyncio.get_running_loop(), lambda: rung.append(time.monotonic()))
        at = time.monotonic() + 0.02
        alarm.set(at)
        await asyncio.sleep(0.1)
        alarm.close()
        return at, rung

    at, rung = asyncio.run(go())
    assert len(rung) == 1
    assert rung[0] >= at


def test_the_picture_is_drawn_and_a_name_that_is_no_pictures_is_refused(tmp_path, monkeypatch):
    report = run_load(Scripted(lambda _: Outcome.ANSWERED), closed_plan(2, LENGTHS, 30), QUICK)
    draw_percentiles(report, tmp_path / "load.png")
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(BenchError, match=r"expected one that ends in .png"):
        draw_percentiles(report, tmp_path / "load.jpg")
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(MissingError, match=r"pip install 'mha-deploy\[pictures\]'"):
        draw_percentiles(report, tmp_path / "load.png")


def test_the_command_loads_a_server_and_writes_its_report(cli, port, small_bundle, tmp_path):
    done = cli(
        *("load", f"http://127.0.0.1:{port}", "--rate", 300, "--requests", 40, "--lengths", "uniform:1:64"),
        *("--bundle", small_bundle.folder, "--check", 4, "-o", tmp_path / "load.json", "--json"),
        *("--picture", tmp_path / "load.png"),
    )
    data = json.loads(done.stdout)
    assert data["outcomes"]["answered"] == data["planned"] == 40
    assert data["check"]["sampled"] == 4
    assert data["check"]["passed"]
    assert done.exit_code == (0 if data["valid"] else 1)
    assert len(json.loads((tmp_path / "load.json").read_text())["samples"]["sent_s"]) == 40
    assert (tmp_path / "load.png").exists()


def test_the_command_loads_a_bundle_in_this_process_and_prints_tables(cli, small_bundle, tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(f'{{"at_s": {i / 500}, "length": {i % 9 + 1}}}\n' for i in range(30)))
    done = cli("load", small_bundle.folder, "--trace", trace, "--workers", 1, "--threads", 1)
    assert done.exit_code in (0, 1), done.stderr
    assert "30 requests: 30 answered, 0 refused" in done.stdout
    assert "latency from the intended send" in done.stdout
    assert ("INVALID" in done.stdout) == (done.exit_code == 1)


def test_the_command_searches_for_a_rate_and_fails_where_there_is_none(cli, small_bundle):
    search = ("load", small_bundle.folder, "--p99-ms", 1e-6, "--lengths", "fixed:2", "--check", 0)
    done = cli(*search, "--workers", 1, "--threads", 1, "--json")
    data = json.loads(done.stdout)
    assert (data["rate_per_s"], data["trials"], done.exit_code) == (0.0, [], 1)
    assert data["alone"]["outcomes"]["answered"] == 460


def test_a_search_is_printed_as_a_table(small_bundle, capsys):
    with bundle_runner(small_bundle) as runner:
        target = RunnerTarget(runner, 64)
        alone = run_load(target, closed_plan(1, LENGTHS, 460), QUICK)
        found = find_rate(lambda _: alone, alone, 1e6, tolerance=1e9)
    search_tables(Console(width=120), found)
    printed = capsys.readouterr().out
    assert "the highest rate at p99 <= 1e+06 ms" in printed
    assert "one at a time" in printed
    assert "460 of 460" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "load was given 0 of --rate, --trace, --concurrency and --p99-ms"),
        (("--rate", 1, "--concurrency", 2), "load was given 2 of"),
        (("--p99-ms", 5, "--picture", "p.png"), "--picture draws one run"),
        (("--rate", 1, "--lengths", "zipf:3"), "lengths 'zipf:3'"),
        (("--rate", 1, "--lengths", "fixed:900"), "length 900; this block takes seq up to 64"),
    ],
)
def test_the_command_refuses_what_makes_no_run(cli, small_bundle, arguments, message):
    done = cli("load", small_bundle.folder, "--workers", 1, "--threads", 1, *arguments)
    assert done.exit_code == 2
    assert message in done.stderr
