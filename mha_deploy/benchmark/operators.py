"""Where the time of a run goes, node by node: ONNX Runtime's own profile."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mha_deploy.benchmark.turns import random_feeds
from mha_deploy.bundle import Bundle
from mha_deploy.errors import BenchError
from mha_deploy.latency import nearest_rank
from mha_deploy.manifest import Artifact
from mha_deploy.sessions import DEFAULT_PLACEMENT, Placement, open_onnx_runtime
from mha_deploy.signature import Sizes

WARM_UP_RUNS, RUNS = 5, 30
Events = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Operator:
    """One node of the graph as ONNX Runtime runs it, fused as it fuses; the median over runs."""

    node: str
    operator: str
    provider: str
    median_ms: float


@dataclass(frozen=True, slots=True)
class Profile:
    """The nodes in their order, and the whole run; both slowed by the profiling itself."""

    sizes: Mapping[str, int]
    operators: tuple[Operator, ...]
    run_ms: float
    runs: int

    @property
    def between_ms(self) -> float:
        """What of a run is in no node."""
        return max(0.0, self.run_ms - sum(operator.median_ms for operator in self.operators))

    def to_json(self) -> dict[str, Any]:
        return {
            "sizes": dict(self.sizes),
            "run_ms": self.run_ms,
            "between_nodes_ms": self.between_ms,
            "runs": self.runs,
            "operators": [
                {
                    "node": each.node,
                    "operator": each.operator,
                    "provider": each.provider,
                    "median_ms": each.median_ms,
                    "share": each.median_ms / self.run_ms,
                }
                for each in self.operators
            ],
        }


def check_profiled(
    bundle: Bundle, artifact: str = "", *, placement: Placement = DEFAULT_PLACEMENT
) -> Artifact:
    """The artifact that would be profiled.

    Raises:
        BenchError: it is not ONNX Runtime's.
    """
    chosen = bundle.artifact(artifact, placement)
    if chosen.runtime != "onnxruntime":
        raise BenchError(
            f"artifact {chosen.name!r} runs in {chosen.runtime}; the profile is ONNX Runtime's: name an "
            "artifact that runs there, as --artifact canonical"
        )
    return chosen


def profile(
    bundle: Bundle, sizes: Sizes, artifact: str = "", *, placement: Placement = DEFAULT_PLACEMENT
) -> Profile:
    """Run one size under ONNX Runtime's profiler, in a session of its own.

    It is opened as the bundle opens the artifact, but without CUDA graphs, in which no node is seen.

    Raises:
        BenchError: as `check_profiled`.
        BundleError, MissingError, GraphError: as `Bundle.open_session`.
    """
    chosen = check_profiled(bundle, artifact, placement=placement)
    with tempfile.TemporaryDirectory() as folder:
        with open_onnx_runtime(bundle.folder, chosen, placement, profile_into=folder) as session:
            feeds = random_feeds(session.signature, sizes)
            for _ in range(WARM_UP_RUNS + RUNS):
                session.run(feeds)
        (file,) = Path(folder).iterdir()
        return read_profile(json.loads(file.read_text(encoding="utf-8")), sizes, WARM_UP_RUNS)


def read_profile(events: Events, sizes: Sizes, warm_up_runs: int) -> Profile:
    """The profile of a trace by ONNX Runtime, without its first runs.

    Every run is an event "model_run" that spans those of its nodes, "NAME_kernel_time"; times are in us.
    """
    runs = sorted((e for e in events if e.get("name") == "model_run"), key=lambda event: int(event["ts"]))
    counted = runs[warm_up_runs:]
    taken: defaultdict[tuple[str, str, str], list[float]] = defaultdict(list)
    for event in _within(events, counted):
        arguments = event["args"]
        name = event["name"].removesuffix("_kernel_time")
        taken[name, arguments["op_name"], arguments["provider"]].append(event["dur"] / 1e3)
    return Profile(
        sizes,
        tuple(Operator(*key, nearest_rank(durations, 0.5)) for key, durations in taken.items()),
        nearest_rank([run["dur"] / 1e3 for run in counted], 0.5),
        len(counted),
    )


def _within(events: Events, runs: Events) -> Iterator[dict[str, Any]]:
    """Events of nodes from the first of `runs` on, in their order."""
    start = runs[0]["ts"]
    nodes = (e for e in events if e["name"].endswith("_kernel_time") and e["ts"] >= start)
    yield from sorted(nodes, key=lambda event: int(event["ts"]))
