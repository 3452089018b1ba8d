"""Where the time goes: bounds, the profile of nodes, the roofline."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest

from mha_deploy.benchmark import draw_roofline, profile
from mha_deploy.benchmark.bounds import bound_of, traffic_bytes
from mha_deploy.benchmark.ceilings import Ceilings
from mha_deploy.benchmark.operators import read_profile
from mha_deploy.errors import BenchError, MissingError

ROOFS = Ceilings(100.0, 10.0, 50.0, 0.01, 1000, "a MatMul", {})


@pytest.mark.parametrize(
    ("flops", "traffic", "by", "least_ms"),
    [
        (10**9, 1000, "compute", 10.0),
        (1000, 10**8, "memory", 10.0),  # beyond the cache: at 10 GB/s
        (10, 999, "overhead", 0.01),
        (10**6, 10**5, "compute", 0.01),  # a tie of all three
    ],
)
def test_the_verdict_is_the_largest_of_the_three_least_times(flops, traffic, by, least_ms):
    found = bound_of(flops, traffic, ROOFS, took_ms=20.0)
    assert (found.by, found.to_json()["verdict"]) == (by, f"{by}-bound")
    assert found.share == pytest.approx(least_ms / 20)


def test_what_fits_into_the_cache_is_held_against_its_bandwidth():
    assert bound_of(0, 1000, ROOFS, 1.0).memory_ms == pytest.approx(1000 / 50 / 1e6)
    assert bound_of(0, 1001, ROOFS, 1.0).memory_ms == pytest.approx(1001 / 10 / 1e6)


def test_traffic_counts_inputs_outputs_and_weights_once(small_bundle):
    artifact, sizes = small_bundle.artifact(), {"batch": 2, "seq": 8}
    tensors = 2 * 8 * (4 * 32 + 1 + 4 * 32)
    weights = small_bundle.manifest.weights.bytes
    assert traffic_bytes(small_bundle, artifact, sizes) == tensors + weights // 4 * 4
    assert weights == pytest.approx(4 * (4 * 32 * 32 + 4 * 32), rel=0.1)


def test_the_profile_names_every_node_with_its_time(small_bundle):
    found = profile(small_bundle, {"batch": 2, "seq": 8})
    kinds = [each.operator for each in found.operators]
    assert kinds.count("MatMul") == 4
    assert kinds.count("Attention") == 1
    assert {each.provider for each in found.operators} == {"CPUExecutionProvider"}
    assert found.runs == 30
    data = json.loads(json.dumps(found.to_json()))
    assert 0 < sum(each["share"] for each in data["operators"]) <= 1.5


def test_the_profile_leaves_out_the_runs_of_the_warm_up():
    def run(start, node_us):
        arguments = {"op_name": "MatMul", "provider": "CPU"}
        node = {"name": "n_kernel_time", "ts": start + 1, "dur": node_us, "args": arguments}
        return [node, {"name": "model_run", "ts": start, "dur": node_us + 10}]

    events = [{"name": "session_initialization", "ts": 0, "dur": 5}]
    events += [*run(1000, 9000), *run(20000, 40), *run(30000, 60), *run(40000, 50)]
    found = read_profile(events, {"batch": 1}, 1)
    assert [(each.node, each.median_ms) for each in found.operators] == [("n", 0.05)]
    assert (found.run_ms, found.runs) == (0.06, 3)
    assert found.between_ms == pytest.approx(0.01)


def test_an_engine_has_no_profile_of_onnx_runtime(small_bundle):
    engine = replace(small_bundle.artifact(), name="engine", runtime="tensorrt")
    bundle = replace(small_bundle, manifest=small_bundle.manifest.with_artifact(engine))
    with pytest.raises(BenchError, match="'engine' runs in tensorrt; the profile is ONNX Runtime's"):
        profile(bundle, {"batch": 1, "seq": 1}, "engine")


def test_the_roofline_is_a_picture_of_every_size(bench_report, tmp_path):
    for name, start in (("roofline.png", b"\x89PNG"), ("roofline.svg", b"<?xml")):
        draw_roofline(bench_report, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(start)
    drawn = (tmp_path / "roofline.svg").read_text()
    for text in ("1 x 8", "2 x 8", "MatMul ", "memory ", "GFLOP/s at the median latency"):
        assert f"<!-- {text}" in drawn
    assert len(list(tmp_path.iterdir())) == 2


def test_a_picture_of_another_kind_is_refused_before_anything_is_measured(cli, small_bundle, tmp_path):
    result = cli("bench", small_bundle.folder, "--roofline", tmp_path / "roofline.txt")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "is no picture's name; expected one that ends in .png, .svg, .pdf" in result.stderr


def test_without_matplotlib_the_way_to_it_is_said(cli, small_bundle, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = cli("bench", small_bundle.folder, "--roofline", tmp_path / "roofline.png")
    assert (result.exit_code, result.stderr.count("\n")) == (MissingError.exit_code, 1)
    assert "pip install 'mha-deploy[pictures]'" in result.stderr
