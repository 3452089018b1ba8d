"""`search.json`: a cache, whatever it holds, and of every search that writes to it."""

import json
import math
import subprocess
import sys

import pytest

from mha_deploy.search.gate import Verdict
from mha_deploy.search.measuring import Timing
from mha_deploy.search.record import FILE_NAME, Record
from mha_deploy.search.recorded import Found
from mha_deploy.staging import locked

VERDICT = Verdict(True, 0.25, "opt", 9)
NO = Verdict(False, math.inf, "opt", 1, "an axis is frozen")
TIMINGS = {
    "fast": Timing(True, 1.0, 0.5, 0.75, 200, (0.5, 0.5)),
    "near": Timing(True, 1.25, 0.625, math.inf, 160, (0.75, 0.625)),
    "slow": Timing(False, 2.5, 1.25, 1.5, 20, (1.25, 1.25, 1.5)),
}
FOUND = Found(TIMINGS, 100.0, ("something else ran",))
RUNS = """
import sys
from pathlib import Path
from mha_deploy.search.gate import Verdict
from mha_deploy.search.record import Record
from mha_deploy.staging import locked
folder = Path(sys.argv[1])
record = Record.load(folder, lambda: locked(folder))
print("loaded", flush=True)
sys.stdin.readline()
for number in range(20):
    record.keep_verdict([sys.argv[2], number], Verdict(True, 0.5, "opt", 1))
"""


def loaded(folder):
    return Record.load(folder, lambda: locked(folder))


@pytest.fixture
def record(tmp_path):
    record = loaded(tmp_path)
    record.keep_verdict("verdict", VERDICT)
    record.keep_verdict("no", NO)
    record.keep_timings("timings", FOUND)
    return record


def changed(record, kind, change):
    """The record as read after `change` to what was found, in the file."""
    data = json.loads(record.path.read_text())
    (entry,) = (each for each in data["entries"].values() if each["stands_on"] == kind)
    change(entry)
    record.path.write_text(json.dumps(data))
    return loaded(record.path.parent)


def put(*path, value):
    def change(entry):
        held = entry
        for name in path[:-1]:
            held = held[name]
        held[path[-1]] = value

    return change


def without(*path):
    def change(entry):
        held = entry
        for name in path[:-1]:
            held = held[name]
        del held[path[-1]]

    return change


def test_what_was_found_is_read_as_it_was_written(record):
    again = loaded(record.path.parent)
    assert again.verdict("verdict") == VERDICT
    assert again.verdict("no") == NO
    found = again.timings("timings", TIMINGS)
    assert found.timings["slow"] == TIMINGS["slow"]
    assert math.isnan(found.timings["near"].p99_ms)
    assert (found.ceiling_gflops, found.notices) == (100.0, ("something else ran",))


def test_it_is_found_again_under_the_same_conditions_and_no_other(tmp_path):
    conditions = {"machine": "m", "sizes": {"batch": 1}}
    record = loaded(tmp_path)
    record.keep_timings(conditions, FOUND)
    record.keep_verdict({"name": "a"}, NO)
    again = loaded(tmp_path)
    assert again.timings(dict(reversed(conditions.items())), TIMINGS)
    assert again.timings({**conditions, "machine": "other"}, TIMINGS) is None
    assert again.verdict({"name": "b"}) is None


NUMBER = [None, "x", True, 0, -1.0, 0.0, math.nan, math.inf, [], 10**400]
WRONG = {
    "ratio": NUMBER,
    "p50_ms": NUMBER,
    "p99_ms": NUMBER[1:],
    "samples": [None, "x", True, -1, 1.5],
    "final": [None, "x", 0, 1],
    "rounds_p50_ms": [None, "x", [], ["a"], [None], [math.nan, 1.0], [0.0, 1.0], [0.5], {"a": 1}],
}


@pytest.mark.parametrize(
    ("name", "value"), [pytest.param(n, v, id=f"{n}={str(v)[:9]}") for n in WRONG for v in WRONG[n]]
)
def test_a_timing_that_no_search_writes_is_measured_again(record, name, value):
    again = changed(record, "timings", put("found", "candidates", "near", name, value=value))
    assert again.timings("timings", TIMINGS) is None
    again.keep_timings("timings", FOUND)
    assert loaded(record.path.parent).timings("timings", TIMINGS)


@pytest.mark.parametrize(
    "change",
    [
        *(put("found", "ceiling_gflops", value=value) for value in NUMBER),
        *(put("found", "notices", value=value) for value in (None, "x", [1])),
        *(put("found", "candidates", value=value) for value in (None, [], {}, "x")),
        *(put("found", value=value) for value in (None, [1], "x", 1)),
        put("found", "candidates", "near", value=None),
        put("found", "candidates", "near", "more", value=1),
        put("found", "candidates", "another", value=TIMINGS["slow"].to_json()),
        without("found", "candidates", "near"),
        without("found", "candidates", "near", "ratio"),
        without("found", "notices"),
        without("found"),
    ],
)
def test_a_size_that_no_search_writes_is_measured_again(record, change):
    assert changed(record, "timings", change).timings("timings", TIMINGS) is None


@pytest.mark.parametrize(
    "change",
    [
        *(put("found", "error_ratio", value=value) for value in (None, "x", True, -1.0, math.nan, 10**400)),
        *(put("found", "passed", value=value) for value in (None, "x", 1)),
        *(put("found", "cases", value=value) for value in (None, "x", True, -1)),
        put("found", "case", value=None),
        put("found", "note", value=1),
        put("found", "more", value=1),
        put("found", value="abc"),
        without("found", "note"),
        without("found"),
    ],
)
def test_a_verdict_that_no_search_writes_is_asked_for_again(record, change):
    assert changed(record, "verdict", change).verdict("verdict") is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"format": 1}',
        '{"format": 99, "entries": {}}',
        '{"format": 1, "entries": [1]}',
        "[" * 100_000,
        "\xff",
    ],
)
def test_a_file_that_cannot_be_read_counts_as_none_and_is_written_anew(tmp_path, text):
    (tmp_path / FILE_NAME).write_text(text, encoding="latin-1")
    record = loaded(tmp_path)
    assert record.entries == {}
    record.keep_verdict("verdict", VERDICT)
    assert loaded(tmp_path).verdict("verdict") == VERDICT


def test_two_searches_at_once_keep_what_either_found(tmp_path):
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RUNS, str(tmp_path), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("one", "other")
    ]
    for process in processes:
        assert process.stdout.readline() == "loaded\n"
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        process.communicate()
        assert process.returncode == 0
    record = loaded(tmp_path)
    assert all(record.verdict([name, number]) for name in ("one", "other") for number in range(20))
