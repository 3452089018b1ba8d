"""Measuring a session on this machine: how many workers it wants, and what its batches cost."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import time
from collections.abc import Callable, Mapping
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
from mha_deploy.runner.layout import PaddedLayout
from mha_deploy.runner.options import RunnerOptions
from mha_deploy.sessions import Placement, Session
from mha_deploy.signature import Array, Dim
from mha_deploy.spec import AttentionSpec
from mha_deploy.staging import staged_file

FOLDER = "calibration"
CREW_S, CREW_ROUNDS = 0.08, 2
GRID_S = 0.9
RUNS_A_CELL = 3
# A prime number of values, so that rows cut from it one after another differ.
_NOISE: Array = np.random.default_rng(0).standard_normal(65521)

OpenSession = Callable[[int], Session]


@dataclass(frozen=True, slots=True)
class Calibration:
    """How many workers of how many threads, what their batches cost, and whether mates leave a trace.

    `drift` is the largest difference between an answer alone and the same one in a batch of its length,
    relative to the answer's largest |y|: 0 where the bits were the same in every batch measured. A
    runtime may choose other kernels for other batch sizes, or scale a batch as one; then it is not.
    """

    workers: int
    threads: int
    drift: float
    model: CostModel

    def to_json(self) -> dict[str, Any]:
        return {
            "workers": self.workers,
            "threads": self.threads,
            "drift": self.drift,
            "cost_model": self.model.to_json(),
        }

    @classmethod
    def from_json(cls, spec: AttentionSpec, data: Mapping[str, Any]) -> Calibration:
        """Inverse of `to_json`, but for the cost model's corrections.

        Raises:
            BundleError: the data is not a calibration's.
        """
        try:
            workers, threads, drift = data["workers"], data["threads"], float(data["drift"])
            model = CostModel.from_json(spec, data["cost_model"])
        except (KeyError, TypeError, ValueError) as error:
            raise BundleError(f"a stored calibration is malformed: {error!r}") from error
        numbers = all(type(each) is int for each in (workers, threads)) and workers >= 1 and threads >= 0
        if not numbers or not drift >= 0:
            raise BundleError(
                f"a stored calibration is malformed: workers {workers!r}, threads {threads!r}, drift {drift}"
            )
        return cls(workers, threads, drift, model)


def calibrated(bundle: Bundle, name: str, placement: Placement, options: RunnerOptions) -> Calibration:
    """The calibration kept in the bundle for this artifact on this machine, or a new one, kept then.

    A folder that cannot be written is calibrated for at each load.
    """
    path = _path(bundle, name, placement, options)
    found = stored(bundle, name, placement, options)
    if found:
        return found

    def open_session(threads: int) -> Session:
        return bundle.open_padded_session(name, replace(placement, threads=threads))

    on_cpu = bundle.artifact(name).runtime == "onnxruntime" and placement.device == "cpu"
    cores = (placement.threads or machine.usable_cpus()) if on_cpu else 1
    found = calibrate(open_session, bundle.spec, options, cores=cores)
    with contextlib.suppress(BundleError), staged_file(path) as staging:
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
    return Calibration(workers, threads, drift, model)


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
        self._session = stack.enter_context(session)
        self.pool = stack.enter_context(ThreadPoolExecutor(1))
        self._spec = spec

    def runs(self, size: Size) -> int:
        """How many runs `CREW_S` seconds hold, after one that does not count."""
        feeds = PaddedLayout(self._spec).feeds(_requests(self._session, self._spec, size), size[1:])
        self._session.run(feeds)
        end, count = time.perf_counter() + CREW_S, 0
        while time.perf_counter() < end:
            self._session.run(feeds)
            count += 1
        return count


def measured(session: Session, spec: AttentionSpec, seconds: float) -> tuple[CostModel, float]:
    """Costs of sizes, the cheapest first, until the time is over; and the drift (see `Calibration`)."""
    end = time.perf_counter() + seconds
    samples: dict[Size, float] = {}
    alone: dict[tuple[int, int], Array] = {}
    drift = 0.0
    for size in _cells(spec):
        took, y = _timed(session, spec, size)
        samples[size] = took
        solo = alone.setdefault(size[1:], y[0].astype(np.float64))
        drift = max(drift, float(abs(y[0] - solo).max() / max(abs(solo).max(), np.finfo(np.float32).tiny)))
        # The next cell is about as dear as this one, or up to four times.
        if time.perf_counter() + (RUNS_A_CELL + 1) * 2 * took / 1e6 > end:
            break
    return CostModel(spec, samples), drift


def _timed(session: Session, spec: AttentionSpec, size: Size) -> tuple[float, Array]:
    """Inputs put together and run, as a worker does it; after one run that does not count.

    The least of a few: what other work on the machine takes is no cost of the session.
    """
    layout, requests = PaddedLayout(spec), _requests(session, spec, size)
    y = session.run(layout.feeds(requests, size[1:]))["y"]
    times = []
    for _ in range(RUNS_A_CELL):
        begin = time.perf_counter()
        session.run(layout.feeds(requests, size[1:]))
        times.append((time.perf_counter() - begin) * 1e6)
    return min(times), y


def _requests(session: Session, spec: AttentionSpec, size: Size) -> list[Request]:
    """Rows of noise; the first is the same whatever the number of rows."""
    rows, q, kv = size
    arrays = {}
    for tensor in session.signature.inputs:
        if tensor.is_float:
            length = q if tensor.shape[1] == spec.query_axis else kv
            noise = np.resize(_NOISE, (rows, length, int(tensor.shape[-1])))
            arrays[tensor.name] = noise.astype(numpy_dtype(tensor.dtype))
    return [Request({name: array[row] for name, array in arrays.items()}, q, kv) for row in range(rows)]


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
