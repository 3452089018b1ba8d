"""The command load, its tables and its picture."""

from __future__ import annotations

import itertools
import json
import threading

import pytest
from loading import LENGTHS, QUICK, Scripted
from rich.console import Console
from serving import bundle_runner, fake_runner, serving

from mha_deploy.errors import BenchError, MissingError
from mha_deploy.load import (
    RunnerTarget,
    closed_plan,
    draw_percentiles,
    find_rate,
    run_load,
)
from mha_deploy.load.records import Outcome
from mha_deploy.render_load import search_tables


@pytest.fixture(scope="module")
def port(small_bundle):
    """Of a server over the small bundle."""
    with serving(bundle_runner(small_bundle)) as running:
        yield running.port


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
    assert ("VALID" in done.stdout.splitlines()) == (done.exit_code == 0)
    assert ("INVALID: the generator" in done.stdout) == (done.exit_code == 1)


def test_the_command_searches_for_a_rate_and_fails_where_there_is_none(cli, small_bundle):
    search = ("load", small_bundle.folder, "--p99-ms", 1e-6, "--lengths", "fixed:2", "--check", 0)
    done = cli(*search, "--workers", 1, "--threads", 1, "--json")
    data = json.loads(done.stdout)
    assert (data["rate_per_s"], data["trials"], done.exit_code) == (0.0, [], 1)
    assert data["alone"]["outcomes"]["answered"] == 460


def verdict(done):
    """The last lines that the command printed."""
    return [line for line in done.stdout.splitlines() if line.startswith(("VALID", "INVALID", "FAILED"))]


def test_a_server_that_answers_nothing_fails_the_command_with_its_reason(cli):
    def broken(_feeds):
        raise RuntimeError("no weights")

    with serving(fake_runner(broken)) as running:
        load = ("load", f"http://127.0.0.1:{running.port}", "--lengths", "uniform:1:64", "--warm-up", 2)
        done = cli(*load, "--concurrency", 2, "--requests", 20)
        as_json = cli(*load, "--concurrency", 2, "--requests", 20, "--json")
        searched = cli(*load, "--p99-ms", 20)
    assert [done.exit_code, as_json.exit_code, searched.exit_code] == [1, 1, 1]
    failed = (
        "none of 20 requests was answered, so that there is no latency: 20 error; most often: status 500: "
    )
    assert "VALID" not in verdict(done)
    assert verdict(done)[-1].startswith(f"FAILED: {failed}")
    data = json.loads(as_json.stdout)
    assert data["failures"][0].startswith(failed)
    assert not data["passed"]
    assert verdict(searched)[0].startswith("FAILED: one at a time: none of 460 requests was answered")


def test_a_server_that_leaves_in_the_middle_of_a_run_fails_the_command(cli):
    runs = itertools.count()

    def leaves(feeds):
        if next(runs) == 60:
            leaving.start()
        return {"y": feeds["x"]}

    with serving(fake_runner(leaves)) as running:
        leaving = threading.Thread(target=running.stop, args=(0.0,))
        load = ("load", f"http://127.0.0.1:{running.port}", "--lengths", "uniform:1:64", "--warm-up", 2)
        done = cli(*load, "--rate", 200, "--requests", 400, "--json")
        leaving.join()
    data = json.loads(done.stdout)
    lost = data["planned"] - data["outcomes"]["answered"] - data["outcomes"]["refused"]
    assert data["outcomes"]["answered"] > 0
    assert data["outcomes"]["disconnected"] > 0
    assert done.exit_code == 1
    assert data["failures"][0].startswith(f"{lost} of 400 requests got no answer: ")
    assert "no connection: " in data["failures"][0]


def test_wrong_answers_are_in_the_printed_verdict(cli, small_bundle):
    with serving(fake_runner(lambda feeds: {"y": feeds["x"] * 2})) as running:
        load = ("load", f"http://127.0.0.1:{running.port}", "--lengths", "uniform:1:64", "--check", 4)
        done = cli(*load, "--concurrency", 2, "--requests", 20, "--bundle", small_bundle.folder)
    assert done.exit_code == 1
    assert "VALID" not in verdict(done)
    assert verdict(done)[-1].startswith("FAILED: 4 of 4 sampled answers are wrong; first: request ")


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
        (("--rate", 1e308, "--seconds", 1e308), "requests; expected at least 1 and at most"),
        (("--rate", 1, "--lengths", "fixed:900"), "length 900; this block takes seq up to 64"),
    ],
)
def test_the_command_refuses_what_makes_no_run(cli, small_bundle, arguments, message):
    done = cli("load", small_bundle.folder, "--workers", 1, "--threads", 1, *arguments)
    assert done.exit_code == 2
    assert message in done.stderr


@pytest.mark.parametrize("value", ["inf", "nan"])
@pytest.mark.parametrize(
    "arguments",
    [
        ("load", "--rate"),
        ("load", "--p99-ms"),
        *(("load", "--rate", 1, name) for name in ("--seconds", "--timeout-ms", "--drain", "--burst-shape")),
        ("load", "--p99-ms", 1, "--tolerance"),
        ("bench", "--seconds"),
        ("optimize", "--seconds"),
    ],
)
def test_a_number_that_is_not_finite_is_refused_by_every_option(cli, small_bundle, arguments, value):
    command, *options = arguments
    done = cli(command, small_bundle.folder, *options, value)
    assert done.exit_code == 2
    if (options[-1], value) == ("--burst-shape", "inf"):
        assert "inf is not in the range 0<x<=1" in done.stderr
        return
    assert done.stderr == f"error: {options[-1]} {value}; expected a finite number\n"


def test_the_command_refuses_lengths_that_a_server_does_not_take(cli, port):
    done = cli("load", f"http://127.0.0.1:{port}", "--rate", 100)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "; this block takes seq up to 64" in done.stderr
    done = cli("load", f"http://127.0.0.1:{port}", "--p99-ms", 100)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "a request of length 160; this block takes seq up to 64" in done.stderr


def test_a_server_without_its_scheme_is_told_to_have_one(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = cli("load", "127.0.0.1:18100", "--rate", 1)
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert "there is no folder 127.0.0.1:18100; for a server, write http://127.0.0.1:18100" in done.stderr
    (tmp_path / "block:1").mkdir()
    assert "http://" not in cli("load", "block:1", "--rate", 1).stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("DIR", "--rate", 1, "--model", "m"), "--model was given with a DIR"),
        (("DIR", "--rate", 1, "--bundle", "b"), "--bundle was given with a DIR"),
        (("http://127.0.0.1:1", "--rate", 1, "--workers", 2), "--workers was given with a URL"),
        (("http://127.0.0.1:1", "--rate", 1, "--device", "cuda"), "--device was given with a URL without"),
        (("http://127.0.0.1:1", "--rate", 1, "--tolerance", 0.1), "--tolerance was given with no --p99-ms"),
        (("DIR", "--trace", "t", "--requests", 5), "--requests was given with --trace"),
        (("DIR", "--concurrency", 2, "--arrivals", "burst"), "--arrivals was given with --concurrency"),
        (("DIR", "--rate", 1, "--requests", 5, "--seconds", 3), "--seconds was given with --requests"),
        (("DIR", "--rate", 1, "--burst-shape", 0.5), "--burst-shape was given with no --arrivals burst"),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(cli, arguments, message):
    done = cli("load", *arguments)
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert f"error: {message}" in done.stderr
    assert "where it changes nothing; leave it out" in done.stderr


def test_a_file_that_cannot_be_written_costs_no_run(cli, small_bundle, tmp_path):
    out = tmp_path / f"{'x' * 250}.json"
    run = (
        "load",
        small_bundle.folder,
        "--concurrency",
        1,
        "--requests",
        5,
        "--lengths",
        "fixed:4",
        "-o",
        out,
    )
    done = cli(*run, "--workers", 1, "--threads", 1)
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert "File name too long" in done.stderr
    assert "5 requests: 5 answered" in done.stdout
