"""Measuring a session on this machine: the crew that it wants, and what its batches cost."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mha_deploy import machine
from mha_deploy.bundle import Bundle
from mha_deploy.errors import BundleError
from mha_deploy.manifest import Artifact
from mha_deploy.runner.cost import CostModel, Size
from mha_deploy.runner.crew import OpenSession, Soloist, best_crew, crews, soloist
from mha_deploy.runner.layout import positions
from mha_deploy.runner.options import RunnerOptions
from mha_deploy.runner.ticket import Shape
from mha_deploy.runner.trial import RUNS_A_CELL, Trial, noise
from mha_deploy.sessions import DEFAULT_PLACEMENT, Placement, Session, placed
from mha_deploy.signature import Array, Dim
from mha_deploy.spec import AttentionSpec
from mha_deploy.staging import make_folder, staged_file

FOLDER = "calibration"
# Counted up where the same sessions would measure otherwise: 2, workers of one thread share their weights;
# 3, a soloist is looked for from the dearest request down; 4, OpenVINO's threads may run on any core;
# 5, opening its sessions is no part of the time in which a soloist is looked for, and it plays from half way
# between the sizes that pay and those that do not.
FORMAT = 5
GRID_S, MIXED_S = 0.8, 0.3
ON_CPU = ("onnxruntime", "openvino", "routed")  # runtimes whose sessions share a CPU's cores


@dataclass(frozen=True, slots=True)
class Calibration:
    """How many workers of how many threads, what their batches cost, and whether mates leave a trace.

    `drift` is the largest difference between an answer alone and the same one in a batch of its length,
    relative to the answer's largest |y|: 0 where the bits were the same in every batch measured. A
    runtime may choose other kernels for other batch sizes, or scale a batch as one; then it is not.
    `mixed_drift` is the same in a batch of many lengths; 0 where lengths cannot be mixed.
    """

    workers: int
    threads: int
    drift: float
    mixed_drift: float
    model: CostModel
    soloist: Soloist | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "workers": self.workers,
            "threads": self.threads,
            "drift": self.drift,
            "mixed_drift": self.mixed_drift,
            "cost_model": self.model.to_json(),
            "soloist": asdict(self.soloist) if self.soloist else None,
        }

    @classmethod
    def from_json(cls, spec: AttentionSpec, data: Mapping[str, Any]) -> Calibration:
        """Inverse of `to_json`, but for the cost model's corrections.

        Raises:
            BundleError: the data is not a calibration's.
        """
        try:
            workers, threads = data["workers"], data["threads"]
            drift, mixed_drift = float(data["drift"]), float(data["mixed_drift"])
            model = CostModel.from_json(spec, data["cost_model"])
            found = Soloist(**data["soloist"]) if data["soloist"] is not None else None
        except (KeyError, TypeError, ValueError) as error:
            raise BundleError(f"a stored calibration is malformed: {error!r}") from error
        numbers = all(type(each) is int for each in (workers, threads)) and workers >= 1 and threads >= 0
        if not numbers or not drift >= 0 or not mixed_drift >= 0:
            raise BundleError(
                f"a stored calibration is malformed: workers {workers!r}, threads {threads!r}, "
                f"drift {drift}, mixed_drift {mixed_drift}"
            )
        return cls(workers, threads, drift, mixed_drift, model, found)


def calibrated(bundle: Bundle, name: str, placement: Placement, options: RunnerOptions) -> Calibration:
    """The calibration kept in the bundle for this artifact on this machine, or a new one, kept then.

    A folder that cannot be written is calibrated for at each load. Where the artifact's own settings fix
    the threads of its sessions, those go before the ones in `options`.
    """
    artifact = bundle.artifact(name)
    options = _with_own_threads(artifact, options)
    path = _path(bundle, name, placement, options)
    found = stored(bundle, name, placement, options)
    if found:
        return found

    def open_session(threads: int) -> Session:
        return bundle.open_session(name, replace(placement, threads=threads, shares=True))

    on_cpu = artifact.runtime in ON_CPU and placed(artifact, placement).device == "cpu"
    cores = (placement.threads or machine.usable_cpus()) if on_cpu else 1
    found = calibrate(open_session, bundle.spec, options, cores=cores)
    with contextlib.suppress(BundleError):
        make_folder(path.parent)
        with staged_file(path) as staging:
            staging.write_text(json.dumps(found.to_json(), indent=1) + "\n", encoding="utf-8")
    return found


def stored(bundle: Bundle, name: str, placement: Placement, options: RunnerOptions) -> Calibration | None:
    """The calibration kept in the bundle for this artifact on this machine, if there is a sound one."""
    try:
        options = _with_own_threads(bundle.artifact(name), options)
        text = _path(bundle, name, placement, options).read_text(encoding="utf-8")
        return Calibration.from_json(bundle.spec, json.loads(text))
    except (OSError, ValueError, BundleError):
        return None


def _with_own_threads(artifact: Artifact, options: RunnerOptions) -> RunnerOptions:
    """`options` with the threads that every session of `artifact` has whatever it is asked for, if so."""
    threads = placed(artifact, DEFAULT_PLACEMENT).threads
    return replace(options, threads=threads) if threads else options


def _path(bundle: Bundle, name: str, placement: Placement, options: RunnerOptions) -> Path:
    """Its name carries a hash of everything that the figures depend on."""
    depends = {
        "format": FORMAT,
        "files": [record.sha256 for record in bundle.artifact(name).files],
        "placement": asdict(placement),
        "workers": options.workers,
        "threads": options.threads,
        "machine": machine.describe(),
    }
    key = hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()
    return bundle.folder / FOLDER / f"{name}-{key[:16]}.json"


def calibrate(
    open_session: OpenSession, spec: AttentionSpec, options: RunnerOptions, *, cores: int
) -> Calibration:
    """Measure, for less than 2 s: the workers first (where options leave them open), then the costs.

    `cores` is how many threads all workers may have together; 1 where threads do not matter (a GPU).
    """
    possible = crews(options, cores)
    workers, threads = best_crew(open_session, spec, possible)
    with open_session(threads) as session:
        model, drift = measured(session, spec, GRID_S)
        slack, mixed_drift = _mixed(Trial(session, spec), model)
    several = len(possible) > 1 and (workers, threads) == (cores, 1)
    found = soloist(open_session, spec, model, cores) if several else None
    return Calibration(
        workers, threads, drift, mixed_drift, CostModel(spec, model.samples, slack=slack), found
    )


def measured(session: Session, spec: AttentionSpec, seconds: float) -> tuple[CostModel, float]:
    """Costs of sizes, the cheapest first, until the time is over; and the drift (see `Calibration`)."""
    end = time.perf_counter() + seconds
    bench = Trial(session, spec)
    samples: dict[Size, float] = {}
    alone: dict[Shape, Array] = {}
    drift = 0.0
    for size in _cells(spec):
        requests = noise(bench.layout, spec, [size[1:]] * size[0])
        y = bench.run(requests)[0]
        drift = max(drift, _distance(y, alone.setdefault(size[1:], y)))
        samples[size] = took = bench.timed(requests)
        # The next cell is about as dear as this one, or up to four times.
        if time.perf_counter() + (RUNS_A_CELL + 2) * 2 * took / 1e6 > end:
            break
    return CostModel(spec, samples), drift


def _mixed(bench: Trial, model: CostModel) -> tuple[float, float]:
    """The cost model's slack, and the drift in a batch of many lengths: each half of the one before.

    It is as large as `MIXED_S` allows, for the larger the batch the less its overhead hides.
    """
    sizes = [size for size in model.samples if size[0] > 1]
    if not bench.layout.mixes or not sizes:
        return 1.0, 0.0
    fitting = [size for size in sizes if model.samples[size] * 3 * RUNS_A_CELL < MIXED_S * 1e6]
    rows, q, kv = size = max(fitting or sizes[:1], key=model.samples.__getitem__)
    shapes = [(max(1, q >> row), max(1, kv >> row)) for row in range(rows)]
    requests = noise(bench.layout, bench.spec, shapes)
    pairs = zip(bench.run(requests), requests, strict=True)
    drift = max(_distance(y, bench.run([request])[0]) for y, request in pairs)
    if not bench.layout.packs:
        return 1.0, drift
    tokens = sum(request.tokens(bench.spec) for request in requests)
    fill = tokens / (rows * positions(bench.spec, (q, kv)))
    saved = 1 - bench.timed(requests) / bench.timed(noise(bench.layout, bench.spec, [(q, kv)] * rows))
    most = (1 - fill) * model.projected(size)
    return min(1.0, max(0.0, 1 - saved / most)) if most > 0 else 1.0, drift


def _distance(y: Array, alone: Array) -> float:
    """The largest difference, relative to the answer's largest |y|."""
    solo = alone.astype(np.float64)
    return float(abs(y - solo).max() / max(abs(solo).max(), np.finfo(np.float32).tiny))


def _cells(spec: AttentionSpec) -> list[Size]:
    """Powers of two of rows, powers of four of lengths, and the range's ends, the cheapest first."""
    rows = _steps(spec.dims[0], 2)
    lengths = [_steps(dim, 4) for dim in spec.dims[1:]]
    cells = [(b, each[0], each[-1]) for b, *each in itertools.product(rows, *lengths)]
    names = (spec.dims[0].name, spec.query_axis, spec.key_axis)
    return sorted(cells, key=lambda cell: spec.flops(dict(zip(names, cell, strict=True))))


def _steps(dim: Dim, factor: int) -> list[int]:
    powers = [factor**power for power in range(dim.max.bit_length())]
    return sorted({dim.min, dim.max, *(power for power in powers if dim.min <= power <= dim.max)})
