"""bench --baseline: what is a regression, and which baselines are refused."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from measured import samples
from rich.console import Console

from mha_deploy.benchmark.baseline import GateReport, gate, judge
from mha_deploy.benchmark.baseline_file import Baseline
from mha_deploy.benchmark.ceilings import COMPUTE
from mha_deploy.benchmark.turns import cells_of, default_grid
from mha_deploy.errors import BenchError
from mha_deploy.render_bench import gate_table
from mha_deploy.sessions import Placement

GRID = {"batch": [1, 2], "seq": [8]}


@pytest.fixture
def baseline(bench_report, tmp_path):
    """Write the report's data, changed by a function, as a baseline."""

    def write(change=lambda _: None):
        data = json.loads(json.dumps(bench_report.to_json()))
        change(data)
        path = tmp_path / "baseline.json"
        path.write_text(json.dumps(data))
        return path

    return write


def judged(bench_report, before, ratio, ceiling_ratio=1.0, limit=1.05):
    """The outcome where the first size takes `ratio` of its time before, and the ceiling likewise."""
    random = np.random.default_rng(0)
    noise = random.lognormal(0, 0.01, (2, 8))
    cell = replace(bench_report.cells[0], samples=samples("now", *(ratio * noise[0])))
    ceilings = {COMPUTE: samples(COMPUTE, *(ceiling_ratio * noise[1]))}
    now = replace(bench_report, ceilings=replace(bench_report.ceilings, samples=ceilings))
    return judge(before, cell, now, limit)


def steady(data):
    """A baseline whose rounds took 1 ms, each, block and ceiling."""
    noise = np.random.default_rng(1).lognormal(0, 0.01, 8)
    for cell in data["cells"]:
        cell["rounds_ms"] = [[value] for value in noise]
    data["ceiling"]["samples"][COMPUTE]["rounds_ms"] = [[1.0]] * 8


@pytest.mark.parametrize(
    ("ratio", "ceiling_ratio", "outcome"),
    [
        (1.0, 1.0, "passed"),
        (0.5, 1.0, "passed"),
        (1.15, 1.0, "regression"),
        (1.5, 1.5, "inconclusive"),  # the whole machine is slower
        (1.0, 0.8, "inconclusive"),  # the machine is faster and the block is not
        (1.055, 1.0, "inconclusive"),
    ],
)
def test_a_size_regresses_where_it_is_slower_as_timed_and_beside_the_ceiling(
    bench_report, baseline, ratio, ceiling_ratio, outcome
):
    found = judged(bench_report, Baseline.read(baseline(steady)), ratio, ceiling_ratio)
    assert found.outcome == outcome
    assert found.timed.ratio == pytest.approx(ratio, rel=0.02)
    assert GateReport(bench_report, "file", 0.05, (found,)).passed == (outcome != "regression")


def test_more_regression_passes_where_more_is_allowed(bench_report, baseline):
    assert judged(bench_report, Baseline.read(baseline(steady)), 1.15, limit=1.3).outcome == "passed"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda d: d["machine"].update(cpu="Another CPU"),
            "another machine: its cpu is 'Another CPU', here it is",
        ),
        (lambda d: d["machine"].update(usable_cpus=99), "another machine: its usable cpus is 99, here it is"),
        (lambda d: d.update(subject="other"), "another block: its name is 'other', here it is 'small'"),
        (
            lambda d: d["block"].update(causal=True),
            "another block: its causal is True, here it is False",
        ),
        (lambda d: d["block"].update(num_heads=8), "another block: its num_heads is 8, here it is 4"),
        (lambda d: d.update(artifact="fp16"), "another artifact: its name is 'fp16', here it is 'canonical'"),
        (
            lambda d: d.update(precision="fp16"),
            "another artifact: its precision is 'fp16', here it is 'fp32'",
        ),
        (lambda d: d.update(threads=7), "another placement: its threads is 7, here it is 1"),
        (
            lambda d: d["cells"][0].update(flops=1),
            "another block: its FLOPs at batch=1, seq=8 is 1, here it is",
        ),
        (lambda d: d["cells"].pop(), "has no shape batch=2, seq=8; it has batch=1, seq=8"),
    ],
)
def test_a_baseline_of_something_else_is_refused_by_what_differs(small_bundle, baseline, change, message):
    before = Baseline.read(baseline(change))
    cells = cells_of(small_bundle.spec, GRID, default_grid(small_bundle.spec))
    with pytest.raises(BenchError, match=message):
        before.admit(small_bundle, "", Placement(threads=1), cells)


def test_a_baseline_of_another_provider_is_refused(baseline):
    with pytest.raises(BenchError, match="its provider is 'CPUExecutionProvider', here it is 'CUDA"):
        Baseline.read(baseline()).admit_provider("CUDAExecutionProvider")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"format": 1}', '{"format": 1, "cells": [{"sizes": {}}]}', '{"format": 2}']
)
def test_a_file_that_is_no_report_is_refused_with_the_way_to_one(tmp_path, text):
    path = tmp_path / "baseline.json"
    path.write_text(text)
    with pytest.raises(
        BenchError, match=r"is no report of this version: .*; write one with: mha-deploy bench BUNDLE -o"
    ):
        Baseline.read(path)
    with pytest.raises(BenchError, match=r"cannot read baseline .*: No such file"):
        Baseline.read(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["cells"][0]["rounds_ms"].pop(), r"cells\[0\] has 7 rounds, the ceiling 8"),
        (
            lambda d: d["cells"][1].update(rounds_ms=[[0.0]] * 8),
            r"cells\[1\].rounds_ms\[0\]\[0\] is 0.0, expe",
        ),
        (
            lambda d: d["cells"][0].update(rounds_ms=[[]] * 8),
            r"rounds_ms\[0\] is \[\], expected a list that is",
        ),
        (lambda d: d["cells"][0].update(rounds_ms=[["slow"]] * 8), r"is 'slow', expected a time in ms"),
        (lambda d: d["cells"][0].update(rounds_ms=[[True]] * 8), r"is True, expected a time in ms"),
        (lambda d: d["cells"][0].update(rounds_ms=[[10**400]] * 8), r"is 10+\.\.\., expected a time in ms"),
        (lambda d: d["cells"][0]["rounds_ms"].insert(0, [float("inf")]), r"is inf, expected a time in ms"),
        (lambda d: d["cells"][0]["rounds_ms"][3].append(float("nan")), r"is nan, expected a time in ms"),
        (
            lambda d: [
                each.update(rounds_ms=[]) for each in (*d["cells"], *d["ceiling"]["samples"].values())
            ],
            r"cells\[0\].rounds_ms is \[\], expected a list that is not empty",
        ),
        (lambda d: d["ceiling"].pop("samples"), "ceiling has no 'samples'"),
        (lambda d: d.update(cells=["none"]), r"cells\[0\] is 'none', expected an object"),
        (lambda d: d.update(cells=[]), r"cells is \[\], expected a list"),
        (lambda d: d.pop("machine"), "it has no 'machine'"),
        (lambda d: d.update(machine=None), "machine is None, expected an object"),
        (lambda d: d.update(machine=[]), r"machine is \[\], expected an object"),
        (lambda d: d.update(threads=True), "threads is True, expected a whole number of at least 1"),
        (lambda d: d.update(provider=None), "provider is None, expected a text"),
        (lambda d: d["cells"][0].pop("flops"), r"cells\[0\] has no 'flops'"),
        *(
            (
                lambda d, seq=seq: d["cells"][0]["sizes"].update(seq=seq),
                r"cells\[0\].sizes.seq is .*whole number",
            )
            for seq in ("8", None, [8], 8.0, True, -8)
        ),
    ],
)
def test_a_report_whose_parts_cannot_be_used_is_refused_by_the_first_of_them(baseline, change, message):
    with pytest.raises(BenchError, match=f"is no report of this version: .*{message}"):
        Baseline.read(baseline(change))


def test_a_file_that_is_no_text_is_refused_in_few_words(tmp_path):
    path = tmp_path / "baseline.json"
    for content in (b"\x80" * 10_000, b"[" * 100_000, b'{"format": "' + b"x" * 10_000 + b'"}'):
        path.write_bytes(content)
        with pytest.raises(BenchError, match="is no report of this version: ") as refused:
            Baseline.read(path)
        assert len(str(refused.value)) < 400 + 2 * len(str(path))


def test_a_value_of_another_machine_is_shown_in_few_words(small_bundle, baseline):
    before = Baseline.read(baseline(lambda d: d["machine"].update(cpu="x" * 10_000)))
    with pytest.raises(BenchError, match=r"another machine: its cpu is 'x{299}\.\.\., here it is"):
        before.admit(small_bundle, "", Placement(threads=1), [])


def test_a_baseline_of_few_rounds_is_refused_since_it_could_never_fail(small_bundle, baseline):
    def cut(data):
        steady(data)
        for each in (*data["cells"], data["ceiling"]["samples"][COMPUTE]):
            each["rounds_ms"] = each["rounds_ms"][:7]

    with pytest.raises(BenchError, match="it has 7 rounds, a 99% interval takes 8 or more; write one with"):
        Baseline.read(baseline(cut))
    with pytest.raises(BenchError, match="7 rounds; a 99% interval takes 8 or more: ask for more rounds"):
        gate(small_bundle, baseline(steady), 0.05, seconds=1e6, rounds=7)


def test_a_gate_that_showed_nothing_says_so(bench_report, baseline, capsys):
    before = Baseline.read(baseline(steady))
    passed, open_, slower = (judged(bench_report, before, ratio) for ratio in (1.0, 1.055, 1.15))
    for judgements, inconclusive, line in (
        (
            (open_, open_),
            True,
            "INCONCLUSIVE: none of 2 sizes was shown to be slower, and none to be as fast",
        ),
        ((passed, open_), False, "PASSED: 0 of 2 sizes regressed, 1 inconclusive"),
        ((slower, open_), False, "FAILED: 1 of 2 sizes regressed, 1 inconclusive"),
        ((passed, passed), False, "PASSED: 0 of 2 sizes regressed"),
    ):
        report = GateReport(bench_report, "file", 0.05, judgements)
        assert report.to_json()["gate"]["inconclusive"] == report.inconclusive == inconclusive
        gate_table(Console(width=200), report)
        assert capsys.readouterr().out.splitlines()[-1].startswith(line)
