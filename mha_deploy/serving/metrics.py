"""Metrics for Prometheus (text format 0.0.4): Triton's names, and histograms that can be added up.

Written here from counts that are kept anyway; a client library would count everything a second time,
in the hot path.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mha_deploy.runner import RunnerLoad, RunnerSnapshot
from mha_deploy.runner.histogram import Histogram
from mha_deploy.serving.faults import Outcome
from mha_deploy.serving.stats import PHASES, ServerStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Upper bounds in microseconds: 100 us to 10 s in steps of 1, 2.5, 5.
BOUNDS_US = (*(step * 10.0**power for power in range(2, 7) for step in (1, 2.5, 5)), 1e7, math.inf)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, math.inf)
# Triton's reasons of failure.
_TRITON_REASONS: Mapping[str, tuple[Outcome, ...]] = {
    "REJECTED": (Outcome.OVERLOADED, Outcome.EXPIRED, Outcome.CLOSING),
    "CANCELED": (Outcome.CANCELLED,),
    "BACKEND": (Outcome.FAILED,),
    "OTHER": (Outcome.REFUSED,),
}
_TRITON_DURATIONS = {
    "queue": ("nv_inference_queue_duration_us", "Cumulative time that answered requests waited"),
    "batch": ("nv_inference_compute_input_duration_us", "Cumulative time of putting inputs together"),
    "compute": ("nv_inference_compute_infer_duration_us", "Cumulative time of running the model"),
    "scatter": ("nv_inference_compute_output_duration_us", "Cumulative time of taking outputs apart"),
}


class _Text:
    """Lines of metrics that share their labels."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels, self.lines = labels, list[str]()

    def metric(
        self, name: str, kind: str, text: str, samples: Iterable[tuple[dict[str, str], float]]
    ) -> None:
        self.lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        self.lines += [self._sample(name, labels, value) for labels, value in samples]

    def single(self, name: str, kind: str, text: str, value: float) -> None:
        self.metric(name, kind, text, [({}, value)])

    def histogram(
        self, name: str, text: str, parts: Iterable[tuple[dict[str, str], dict[float, int], float]]
    ) -> None:
        """`parts`: labels, the cumulated count up to each bound, and the sum."""
        self.lines += [f"# HELP {name} {text}", f"# TYPE {name} histogram"]
        for labels, cumulated, total in parts:
            for bound, count in cumulated.items():
                le = "+Inf" if bound == math.inf else f"{bound:.9g}"
                self.lines.append(self._sample(f"{name}_bucket", {**labels, "le": le}, count))
            self.lines.append(self._sample(f"{name}_sum", labels, total))
            self.lines.append(self._sample(f"{name}_count", labels, cumulated[math.inf]))

    def _sample(self, name: str, labels: Mapping[str, str], value: float) -> str:
        pairs = ",".join(f'{key}="{_escaped(text)}"' for key, text in {**self._labels, **labels}.items())
        return f"{name}{{{pairs}}} {value:.15g}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


@dataclass(frozen=True, slots=True)
class Figures:
    """What metrics are made of; `body_bytes` is what the bodies of requests in progress hold."""

    model: str
    version: str
    stats: ServerStats
    snapshot: RunnerSnapshot
    load: RunnerLoad
    body_bytes: int


def render(figures: Figures) -> str:
    """All metrics of one model."""
    stats, snapshot, load = figures.stats, figures.snapshot, figures.load
    text = _Text({"model": figures.model, "version": figures.version})
    _triton(text, stats, snapshot, load)
    _requests(text, stats, figures.body_bytes)
    _rows(text, snapshot, load)
    return "\n".join(text.lines) + "\n"


def _triton(text: _Text, stats: ServerStats, snapshot: RunnerSnapshot, load: RunnerLoad) -> None:
    def counter(name: str, about: str, value: float) -> None:
        text.single(name, "counter", about, value)

    counter("nv_inference_request_success", "Answered requests", stats.outcomes[Outcome.ANSWERED])
    failures = [
        ({"reason": reason}, sum(stats.outcomes[outcome] for outcome in outcomes))
        for reason, outcomes in _TRITON_REASONS.items()
    ]
    text.metric("nv_inference_request_failure", "counter", "Requests without an answer", failures)
    counter("nv_inference_count", "Answered rows of requests", stats.rows)
    executions = sum(figures.count for figures in snapshot.batches.values())
    counter("nv_inference_exec_count", "Batches run", executions)
    answered_us = stats.outcome_ns[Outcome.ANSWERED] / 1e3
    counter("nv_inference_request_duration_us", "Cumulative time of answered requests", answered_us)
    for phase in PHASES:
        metric, about = _TRITON_DURATIONS[phase]
        counter(metric, about, stats.phase_ns[phase] / 1e3)
    text.single("nv_inference_pending_request_count", "gauge", "Rows that wait", load.queued_requests)


def _requests(text: _Text, stats: ServerStats, body_bytes: int) -> None:
    text.single("mha_requests_received_total", "counter", "Infer requests received", stats.received)
    outcomes = [({"outcome": outcome.value}, stats.outcomes[outcome]) for outcome in Outcome]
    text.metric("mha_requests_total", "counter", "Infer requests by what became of them", outcomes)
    text.single("mha_requests_in_progress", "gauge", "Infer requests being worked on", stats.in_progress)
    text.single("mha_request_bytes_in_progress", "gauge", "Bytes of their bodies", body_bytes)
    total = stats.latency()[0]
    about = "Answered requests, from their head's arrival to their answer"
    text.histogram("mha_request_duration_seconds", about, [({}, *_cumulated(total))])


def _rows(text: _Text, snapshot: RunnerSnapshot, load: RunnerLoad) -> None:
    phases = [({"phase": phase}, *_cumulated(each)) for phase, each in snapshot.phases.items()]
    text.histogram("mha_row_duration_seconds", "Answered rows by phase in the runner", phases)
    sizes = {
        float(bound): sum(figures.count for size, figures in snapshot.batches.items() if size <= bound)
        for bound in _SIZES
    }
    members = sum(size * figures.count for size, figures in snapshot.batches.items())
    text.histogram("mha_batch_rows", "Rows in a batch", [({}, sizes, members)])
    by: dict[str, tuple[str, str, Mapping[str, Any]]] = {
        "mha_rows_total": ("outcome", "Rows by what became of them", snapshot.outcomes),
        "mha_batches_total": ("reason", "Batches by why they began", snapshot.dispatch_reasons),
    }
    for name, (label, about, counts) in by.items():
        samples = [({label: str(key)}, count) for key, count in counts.items()]
        text.metric(name, "counter", about, samples)
    counts = {
        "mha_rows_received_total": ("Rows received by the runner", snapshot.received),
        "mha_tokens_total": ("Tokens computed", snapshot.tokens),
        "mha_padded_tokens_total": ("Tokens computed that were padding", snapshot.padded_tokens),
    }
    for name, (about, count) in counts.items():
        text.single(name, "counter", about, count)
    gauges = {
        "mha_queue_rows": ("Rows that wait", load.queued_requests),
        "mha_queue_tokens": ("Tokens that wait", load.queued_tokens),
        "mha_workers_busy": ("Sessions at work", load.busy_workers),
        "mha_workers": ("Sessions", snapshot.workers),
    }
    for name, (about, value) in gauges.items():
        text.single(name, "gauge", about, value)


def _cumulated(histogram: Histogram) -> tuple[dict[float, int], float]:
    """Counts up to each bound, in seconds, and the sum in seconds."""
    counts = histogram.at_or_below(BOUNDS_US)
    return {
        bound / 1e6: count for bound, count in zip(BOUNDS_US, counts, strict=True)
    }, histogram.sum_us / 1e6
