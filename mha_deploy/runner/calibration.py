"""Measuring a session on this machine: how many workers it wants, and what its batches cost."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mha_deploy import machine
from mha_deploy.bundle import Bundle
from mha_deploy.errors import BundleError
from mha_deploy.precision import numpy_dtype
from mha_deploy.ragged import Request
from mha_deploy.runner.cost import CostModel, Size
from mha_deploy.runner.layout import Layout, laid_out, positions
from mha_deploy.runner.options import RunnerOptions
from mha_deploy.runner.ticket import Shape
from mha_deploy.sessions import Placement, Session
from mha_deploy.signature import Array, Dim
from mha_deploy.spec import AttentionSpec
from mha_deploy.staging import make_folder, staged_file

FOLDER = "calibration"
CREW_S, CREW_ROUNDS = 0.08, 2
GRID_S, MIXED_S = 0.8, 0.3
ON_CPU = ("onnxruntime", "openvino", "routed")  # runtimes whose sessions share a CPU's cores
RUNS_A_CELL = 3
# A prime number of values, so that rows cut from it, each so many values further on, differ.
_NOISE: Array = np.random.default_rng(0).standard_normal(65521)
_STRIDE = 7919

OpenSession = Callable[[int], Session]


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

    def to_json(self) -> dict[str, Any]:
        return {
            "workers": self.workers,
            "threads": self.threads,
            "drift": self.drift,
            "mixed_drift": self.mixed_drift,
            "cost_model": self.model.to_json(),
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
        except (KeyError, TypeError, ValueError) as error:
            raise BundleError(f"a stored calibration is malformed: {error!r}") from error
        numbers = all(type(each) is int for each in (workers, threads)) and workers >= 1 and threads >= 0
        if not numbers or not drift >= 0 or not mixed_drift >= 0:
            raise BundleError(
                f"a stored calibration is malformed: workers {workers!r}, threads {threads!r}, "
                f"drift {drift}, mixed_drift {mixed_drift}"
            )
        return cls(workers, threads, drift, mixed_drift, model)


def calibrated(bundle: Bundle, name: str, placement: Placement, options: RunnerOptions) -> Calibration:
    """The calibration kept in the bundle for this artifact on this machine, or a new one, kept then.

    A folder that cannot be written is calibrated for at each load.
    """
    path = _path(bundle, name, placement, options)
    found = stored(bundle, name, placement, options)
    if found:
        return found

    def open_session(threads: int) -> Session:
        return bundle.open_session(name, replace(placement, threads=threads))

    on_cpu = bundle.artifact(name).runtime in ON_CPU and placement.device == "cpu"
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
        text = _path(bundle, name, placement, options).read_text(encoding="utf-8")
        return Calibration.from_json(bundle.spec, json.loads(text))
    except (OSError, ValueError, BundleError):
        return None


def _path(bundle: Bundle, name: str, placement: Placement, options: RunnerOptions) -> Path:
    """Its name carries a hash of everything that the figures depend on."""
    depends = {
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
    workers, threads = _best_crew(open_session, spec, _crews(options, cores))
    with open_session(threads) as session:
        model, drift = measured(session, spec, GRID_S)
        slack, mixed_drift = _mixed(_Bench(session, spec), model)
    return Calibration(workers, threads, drift, mixed_drift, CostModel(spec, model.samples, slack=slack))


def _crews(options: RunnerOptions, cores: int) -> list[tuple[int, int]]:
    """Workers and threads of each that are to be compared; one where the options say."""
    workers, threads = options.workers, options.threads
    if workers or threads:
        return [(workers or max(1, cores // threads), threads or max(1, cores // workers))]
    return sorted({(cores, 1), (1, cores)})


def _best_crew(
    open_session: OpenSession, spec: AttentionSpec, crews: list[tuple[int, int]]
) -> tuple[int, int]:
    """The crew that finishes the most requests of the tuned length a second."""
    if len(crews) == 1:
        return crews[0]
    sizes = (spec.dims[0].min, spec.signature.dim(spec.query_axis).opt, spec.signature.dim(spec.key_axis).opt)
    done = dict.fromkeys(crews, 0)
    with contextlib.ExitStack() as stack:
        teams = {
            crew: [_Member(stack, open_session(crew[1]), spec) for _ in range(crew[0])] for crew in crews
        }
        for _, (crew, team) in itertools.product(range(CREW_ROUNDS), teams.items()):
            counts = [member.pool.submit(member.runs, sizes) for member in team]
            done[crew] += sum(count.result() for count in counts)
    return max(crews, key=done.__getitem__)


class _Member:
    """A session on a thread of its own, as a worker has it."""

    def __init__(self, stack: contextlib.ExitStack, session: Session, spec: AttentionSpec) -> None:
        self._session, self._layout = laid_out(stack.enter_context(session), spec)
        self.pool = stack.enter_context(ThreadPoolExecutor(1))
        self._spec = spec

    def runs(self, size: Size) -> int:
        """How many runs `CREW_S` seconds hold, after one that does not count."""
        requests = noise(self._layout, self._spec, [size[1:]] * size[0])
        feeds = self._layout.feeds(requests, size[1:])
        self._session.run(feeds)
        end, count = time.perf_counter() + CREW_S, 0
        while time.perf_counter() < end:
            self._session.run(feeds)
            count += 1
        return count


class _Bench:
    """One session, timed on batches of noise."""

    def __init__(self, session: Session, spec: AttentionSpec) -> None:
        self.spec = spec
        self._session, self.layout = laid_out(session, spec)

    def run(self, requests: Sequence[Request]) -> list[Array]:
        """Inputs put together, run, and the answers taken apart, as a worker does it."""
        shapes = [self.layout.shape(request) for request in requests]
        longest = (max(q for q, _ in shapes), max(kv for _, kv in shapes))
        return self.layout.answers(self._session.run(self.layout.feeds(requests, longest))["y"], requests)

    def timed(self, requests: Sequence[Request]) -> float:
        """Microseconds of a run, after one that does not count.

        The least of a few: what other work on the machine takes is no cost of the session.
        """
        self.run(requests)
        times = []
        for _ in range(RUNS_A_CELL):
            begin = time.perf_counter()
            self.run(requests)
            times.append((time.perf_counter() - begin) * 1e6)
        return min(times)


def measured(session: Session, spec: AttentionSpec, seconds: float) -> tuple[CostModel, float]:
    """Costs of sizes, the cheapest first, until the time is over; and the drift (see `Calibration`)."""
    end = time.perf_counter() + seconds
    bench = _Bench(session, spec)
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


def _mixed(bench: _Bench, model: CostModel) -> tuple[float, float]:
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


def noise(layout: Layout, spec: AttentionSpec, shapes: Sequence[Shape]) -> list[Request]:
    """A request for each shape; what the first holds does not depend on how many there are."""
    floats = [tensor for tensor in layout.signature.inputs if tensor.is_float]
    requests = []
    for row, (q, kv) in enumerate(shapes):
        values = np.roll(_NOISE, -row * _STRIDE)
        requests.append(
            Request(
                {
                    tensor.name: np.resize(
                        values, (q if tensor.shape[1] == spec.query_axis else kv, int(tensor.shape[-1]))
                    ).astype(numpy_dtype(tensor.dtype))
                    for tensor in floats
                },
                q,
                kv,
            )
        )
    return requests


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
