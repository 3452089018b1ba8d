"""bench: figures with their conditions."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from rich.console import Console

from mha_deploy.benchmark import Schedule, measure
from mha_deploy.benchmark.ceilings import CACHE, COMPUTE, MEMORY, OVERHEAD
from mha_deploy.benchmark.ceilings_gpu import gpu_yardsticks
from mha_deploy.benchmark.report import cell_of, check_dims
from mha_deploy.benchmark.turns import cells_of, default_grid, optimum
from mha_deploy.benchmark.where import stages_of
from mha_deploy.errors import BenchError, FeedError
from mha_deploy.precision import Precision
from mha_deploy.render_bench import bench_table
from mha_deploy.sessions.stages import Stages
from mha_deploy.signature import Dim


def test_every_size_has_samples_of_every_round_and_an_interval_around_its_median(bench_report):
    assert [dict(cell.sizes) for cell in bench_report.cells] == [
        {"batch": 1, "seq": 8},
        {"batch": 2, "seq": 8},
    ]
    for cell in bench_report.cells:
        assert len(cell.samples.rounds_ms) == 8
        assert min(map(len, cell.samples.rounds_ms)) >= 2
        assert cell.latency.p50_ms in cell.p50_interval_ms
        assert cell.first_run_ms > 0


def test_the_json_keeps_raw_samples_by_round_and_what_they_stand_on(bench_report):
    data = json.loads(json.dumps(bench_report.to_json()))
    for cell, source in zip(data["cells"], bench_report.cells, strict=True):
        assert cell["rounds_ms"] == [list(taken) for taken in source.samples.rounds_ms]
        assert sum(map(len, cell["rounds_ms"])) == cell["samples"]
        assert (cell["p99_ms"] is None) == (cell["samples"] < 459)
        assert (cell["warm_up_runs"], cell["device_stages"]) == (5, [])
    assert data["protocol"]["rounds"] == len(data["ceiling"]["samples"][COMPUTE]["rounds_ms"]) == 8
    assert set(data["ceiling"]["samples"]) == {COMPUTE, MEMORY, CACHE, OVERHEAD}
    assert data["conditions"]["seconds"] > 0
    assert data["machine"]["versions"]["onnxruntime"]


def test_ceilings_are_the_best_of_their_runs(bench_report):
    took = {name: min(each.merged_ms) for name, each in bench_report.ceilings.samples.items()}
    assert bench_report.ceilings.gflops == pytest.approx(2 * 512**3 / took[COMPUTE] / 1e6)
    assert bench_report.ceilings.cache_gb_s == pytest.approx(2 * 2**20 / took[CACHE] / 1e6)
    assert bench_report.ceilings.memory_gb_s < bench_report.ceilings.cache_gb_s
    assert bench_report.ceilings.overhead_ms == took[OVERHEAD]


def test_a_size_above_its_ceiling_and_a_late_shape_are_noticed(bench_report):
    cell = bench_report.cells[0]
    wrong = replace(cell, bound=replace(cell.bound, share=1.2))
    late = replace(cell, samples=replace(cell.samples, late_first_runs_ms={"x [9]": 30_000.0}))
    notices = replace(bench_report, cells=(wrong, late)).notices()
    assert "batch=1, seq=8 ran above its ceiling: believe neither figure, measure for longer" in notices
    assert (
        "batch=1, seq=8: the first run of x [9] came after the warm-up (30000.0 ms, not counted)" in notices
    )


def test_the_default_grid_is_clipped_to_what_the_block_takes(small_bundle):
    assert default_grid(small_bundle.spec) == {"batch": [1, 2], "seq": [8, 16, 64]}
    assert optimum(small_bundle.spec) == {"batch": [2], "seq": [8]}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"batch": [7]}, r"grid has batch = 7; this block takes batch 1\.\.6"),
        ({"length": [1]}, "grid names length; the dims are batch, seq"),
    ],
)
def test_sizes_that_the_block_does_not_take_are_refused(small_bundle, asked, message):
    with pytest.raises(FeedError, match=message):
        cells_of(small_bundle.spec, asked, default_grid(small_bundle.spec))


def test_an_artifact_of_other_dims_is_refused(small_bundle):
    artifact = small_bundle.artifact()
    other = replace(
        artifact, signature=replace(artifact.signature, inputs=(), outputs=(), dims=(Dim("tokens", 1, 2, 3),))
    )
    with pytest.raises(BenchError, match="'canonical' has dims tokens; the grid is one of batch, seq"):
        check_dims(small_bundle, other)


def test_a_device_that_is_not_to_be_had_is_missing_unless_the_cpu_will_do(cli, small_bundle, bench_report):
    result = cli("bench", small_bundle.folder, "--device", "cuda")
    assert (result.exit_code, result.stderr.count("\n")) == (3, 1)
    assert "CUDAExecutionProvider was asked for, but" in result.stderr
    fallen = replace(bench_report, device="cuda")
    assert fallen.notices()[0] == "asked for cuda, which is not to be had here: ran on CPUExecutionProvider"
    assert fallen.to_json()["device_asked_for"] == "cuda"


def test_a_list_of_the_cpu_alone_is_no_fallback(bench_report):
    assert not any("asked for" in notice for notice in bench_report.notices())


def test_stages_are_of_sessions_on_a_device_and_the_cache_is_emptied(small_bundle):
    class OnADevice:
        def run_in_stages(self, _feeds, *, cold):
            assert cold
            return Stages(1, 2, 3)

    assert set(stages_of(OnADevice(), {})) == {Stages(1, 2, 3)}
    with small_bundle.open_session() as session:
        assert stages_of(session, {}) == ()


def test_what_a_device_computes_is_held_against_its_own_time_and_shown(bench_report):
    """With its copies a run takes 9 ms; the ceilings are the device's, so 2 ms of computing count."""
    cell = bench_report.cells[0]
    stages = (Stages(3.0, 2.0, 4.0),) * 5
    on_device = cell_of(
        bench_report.ceilings,
        cell.sizes,
        tokens=8,
        flops=cell.flops,
        traffic=1,
        samples=cell.samples,
        stages=stages,
    )
    assert on_device.took_ms == 2
    assert on_device.gflops == pytest.approx(cell.flops / 2 / 1e6)
    assert on_device.tokens_per_s == cell.tokens_per_s
    assert on_device.to_json()["device_stages"][0] == {"upload_ms": 3, "compute_ms": 2, "download_ms": 4}
    screen = Console(record=True, width=120)
    bench_table(screen, replace(bench_report, cells=(on_device,)))
    assert "compute ms" in (text := screen.export_text())
    assert [part for part in text.splitlines() if "3.000" in part and "2.000" in part and "4.000" in part]


@pytest.mark.gpu
def test_the_ceilings_of_a_gpu_are_measured():
    turns = gpu_yardsticks(Precision.FP16)
    found = turns.read(measure(turns.turns, Schedule(seconds=0.2)))
    assert found.memory_gb_s > 100
    assert found.gflops > 1000
    assert found.overhead_ms < 1


def test_a_size_that_is_asked_for_twice_is_measured_once(small_bundle):
    asked = {"batch": [2, 1, 2], "seq": [8, 8]}
    cells = cells_of(small_bundle.spec, asked, default_grid(small_bundle.spec))
    assert cells == [{"batch": 2, "seq": 8}, {"batch": 1, "seq": 8}]
