"""What the server says of itself: metrics, statistics, latency, the last minutes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving import ask, fake_runner, get, infer_request, serving

from mha_deploy.latency import nearest_rank
from mha_deploy.runner.histogram import Recording
from mha_deploy.serving.metrics import BOUNDS_US
from mha_deploy.serving.stats import latency_json

parser = pytest.importorskip("prometheus_client.parser")
X = np.ones((1, 4, 32), np.float32)


@pytest.fixture(scope="module")
def server():
    """A server that has answered 5 requests of 7 rows in all, and refused one."""
    with serving(fake_runner()) as running:
        for _ in range(4):
            assert ask(running.port, infer_request(X)).status == 200
        assert ask(running.port, infer_request(np.repeat(X, 3, 0))).status == 200
        assert ask(running.port, infer_request(np.repeat(X, 7, 0))).status == 400
        yield running


@pytest.fixture
def families(server):
    text = get(server.port, "/metrics").body.decode()
    return {family.name: family for family in parser.text_string_to_metric_families(text)}


def test_metrics_are_what_prometheus_reads(server, families):
    assert get(server.port, "/metrics").headers["content-type"].startswith("text/plain; version=0.0.4")
    for family in families.values():
        assert family.documentation
        for sample in family.samples:
            assert sample.labels["model"] == "small"
            assert sample.labels["version"] == "1"


def test_the_names_are_tritons(families):
    counters = (
        "request_success request_failure count exec_count request_duration_us queue_duration_us "
        "compute_input_duration_us compute_infer_duration_us compute_output_duration_us"
    )
    assert {f"nv_inference_{name}" for name in counters.split()} <= set(families)
    assert families["nv_inference_pending_request_count"].type == "gauge"
    value = {name: family.samples[0].value for name, family in families.items()}
    assert (value["nv_inference_request_success"], value["nv_inference_count"]) == (5, 7)
    reasons = {s.labels["reason"]: s.value for s in families["nv_inference_request_failure"].samples}
    assert reasons == {"REJECTED": 0, "CANCELED": 0, "BACKEND": 0, "OTHER": 1}


def test_counts_add_up(families):
    def total(name):
        return sum(s.value for s in families[name].samples if s.name == f"{name}_total")

    assert total("mha_requests") == total("mha_requests_received") == 6
    assert total("mha_rows") == total("mha_rows_received") == 7
    assert total("mha_batches") == families["nv_inference_exec_count"].samples[0].value


def test_histograms_are_cumulative_and_end_in_their_count(families):
    for name in ("mha_request_duration_seconds", "mha_row_duration_seconds", "mha_batch_rows"):
        series = {}
        for sample in families[name].samples:
            if sample.name.endswith("_bucket"):
                series.setdefault(sample.labels.get("phase", ""), []).append(sample)
        counts = {
            s.labels.get("phase", ""): s.value for s in families[name].samples if s.name.endswith("_count")
        }
        assert set(series) == set(counts)
        for phase, samples in series.items():
            assert [s.labels["le"] for s in samples][-1] == "+Inf"
            assert [s.value for s in samples] == sorted(s.value for s in samples)
            assert samples[-1].value == counts[phase]
    durations = families["mha_request_duration_seconds"].samples
    (count,) = [s.value for s in durations if s.name.endswith("_count")]
    assert count == 5


@given(st.lists(st.floats(1, 9e7), min_size=1, max_size=60))
def test_a_bucket_counts_what_lies_below_its_bound(durations_us):
    recording = Recording()
    for us in durations_us:
        recording.record(us)
    counts = recording.taken().at_or_below(BOUNDS_US)
    for bound, count in zip(BOUNDS_US, counts, strict=True):
        assert sum(us <= bound for us in durations_us) <= count
        assert count <= sum(us <= bound * 1.02 for us in durations_us)


def test_statistics_are_in_tritons_form(server):
    (stats,) = get(server.port, "/v2/models/stats").json["model_stats"]
    assert stats == get(server.port, "/v2/models/small/versions/1/stats").json["model_stats"][0]
    assert (stats["name"], stats["version"], stats["inference_count"]) == ("small", "1", 7)
    per_request = stats["inference_stats"]
    assert per_request["success"]["count"] == per_request["compute_infer"]["count"] == 5
    assert per_request["fail"]["count"] == 1
    batches = stats["batch_stats"]
    assert sum(each["compute_infer"]["count"] for each in batches) == stats["execution_count"]
    assert sum(each["batch_size"] * each["compute_infer"]["count"] for each in batches) == 7
    parts = sum(
        per_request[name]["ns"] for name in ("queue", "compute_input", "compute_infer", "compute_output")
    )
    assert 0 < parts < per_request["success"]["ns"]
    assert stats["last_inference"] > 1_700_000_000_000


def test_latency_gives_no_percentile_from_too_few(server):
    found = get(server.port, "/v2/models/small/latency").json
    total = found["request"]["total"]
    assert total["count"] == found["request"]["window"]["count"] == 5
    assert found["rows"]["compute"]["total"]["count"] == 7
    assert total["p50_ms"] is None
    assert total["p99.9_ms"] is None
    assert total["max_ms"] >= total["mean_ms"] > 0


def test_latency_is_by_nearest_rank_with_an_interval_around_it(random):
    samples = random.lognormal(7, 1, 5000)
    recording = Recording()
    for us in samples:
        recording.record(float(us))
    found = latency_json(recording.taken())
    for name, q in (("p50", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99), ("p99.9", 0.999)):
        exact = nearest_rank(samples.tolist(), q) / 1e3
        assert math.isclose(found[f"{name}_ms"], exact, rel_tol=0.01)
        low, high = found[f"{name}_interval_ms"]
        assert low <= found[f"{name}_ms"]
        assert high is None or high >= found[f"{name}_ms"]
    assert found["p50_interval_ms"][1] is not None


def test_the_last_minutes_are_kept_second_by_second(server):
    import time

    async def close_second():
        server.stats.close_second(int(time.time()), server.runner.load())

    for _ in range(3):
        assert ask(server.port, infer_request(np.repeat(X, 2, 0))).status == 200
    server.call(close_second())
    live = get(server.port, "/live.json").json
    last = [second for second in live["seconds"] if second["answered"]]
    assert sum(second["answered"] for second in last) >= 3
    assert last[-1]["p50_ms"] <= last[-1]["p99_ms"]
    assert sum(live["outcomes"].values()) + live["in_progress"] == live["received"]
    rows = sum(int(size) * count for second in last for size, count in second["batches"].items())
    assert rows == pytest.approx(server.stats.rows, abs=0.01)
    assert get(server.port, f"/live.json?since={last[-1]['time_s']}").json["seconds"] == [
        second for second in live["seconds"] if second["time_s"] > last[-1]["time_s"]
    ]
