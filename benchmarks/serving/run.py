"""This project's server against Triton (Python backend), LitServe, MLServer and Ray Serve: one ONNX file.

    python benchmarks/serving/run.py [--peers triton,ray] [--rounds 5] [--seconds 10] [--on CPU]
    python benchmarks/serving/run.py --tables FILE

Installs what is missing (benchmarks/.envs), lets `optimize` choose this project's engine, finds each peer's
better variant, then in alternating rounds the highest Poisson rate at which each system holds the p99 target.
Writes build/serving-benchmark.json, with all that was found, benchmarks/results/serving.json, with what is
kept of it, and from that docs/serving-benchmarks.md (with --on, serving-CPU.json, serving-benchmarks-CPU.md).
--tables writes that page anew. Exit code 1: a target was missed; 2: asked for what is not there.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import overhead
import results
from document import written
from subject import exported, in_bf16
from systems import FLOOR, NAMES, OUR_ARGUMENTS, OURS, PEER_VARIANTS, System, declared, prepare, started

from mha_deploy.benchmark.rounds import ROUNDS
from mha_deploy.bundle import Bundle
from mha_deploy.errors import CheckError, InputError, MissingError
from mha_deploy.latency import figure
from mha_deploy.load import (
    Arrivals,
    LoadOptions,
    LoadReport,
    ReferenceChecker,
    SearchReport,
    closed_plan,
    find_rate,
    open_plan,
    parse_lengths,
    run_load,
)
from mha_deploy.machine import describe, usable_cpus
from mha_deploy.search import optimize

ROOT = Path(__file__).parents[2]
COMMAND = "benchmarks/serving/run.py"
LENGTHS = "lognormal:27:2:160"
LEAST = 460  # a p99 takes 459 samples


def main(arguments: Sequence[str]) -> int:
    """Measure, write, and say whether the targets were met; with --tables only write."""
    options = _options(arguments)
    if options.tables:
        try:
            kept, cpu = results.read(options.tables), results.cpu_of(options.tables)
        except InputError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        return _paged(kept, cpu)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    data = {"command": shlex.join(["python", COMMAND, *arguments]), **_measured(options)}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(data) + "\n", encoding="utf-8")
    file = ROOT / "benchmarks" / "results" / results.name_of(options.on)
    results.write(results.compacted(data), file)
    return _paged(results.read(file), options.on)


def _measured(options: argparse.Namespace) -> dict[str, Any]:
    bundle = exported()
    search = _Search(bundle, options.seconds, options.p99_ms, options.tolerance)
    ours, left_out = list(OUR_ARGUMENTS), {}
    try:
        search.serve("bf16", in_bf16(bundle))
    except (MissingError, CheckError) as error:
        ours.remove("bf16")
        left_out[str(System(OURS, "bf16"))] = str(error)
    engine = optimize(bundle).artifact  # which `serve` runs from then on
    print(f"optimize chose {engine}", file=sys.stderr, flush=True)
    lone = overhead.measure(options.overhead_rounds, usable_cpus())
    chosen = [*(System(OURS, variant) for variant in ours), System(FLOOR, "default")]
    missing, tried = {}, {}
    for name in options.peers.split(","):
        reason = prepare(name)
        found: dict[str, float] = {}
        for variant in () if reason else PEER_VARIANTS:
            try:
                found[variant] = search(System(name, variant), seed=0).rate_per_s
            except InputError as error:
                reason = left_out[str(System(name, variant))] = _reason(error)
        tried[name] = found
        if found:
            chosen.append(System(name, max(found, key=lambda each: found[each])))
        else:
            missing[name] = reason
    rounds = []
    for number in range(options.rounds):
        turn = number % len(chosen)
        order = chosen[turn:] + chosen[:turn]
        rounds.append({str(system): _found(search, system, number + 1) for system in order})
    return {
        "machine": describe(),
        "conditions": {
            "lengths": LENGTHS,
            "arrivals": "poisson",
            "p99_ms": options.p99_ms,
            "seconds": options.seconds,
            "tolerance": options.tolerance,
            "d_model": bundle.spec.d_model,
        },
        "variants_tried_per_s": tried,
        "peers": {name: declared(name) for name in options.peers.split(",")},
        "engine": engine,
        "missing": missing,
        "left_out": left_out,
        "systems": [str(system) for system in chosen],
        "rounds": rounds,
        "lone_request": lone,
    }


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--peers", default=",".join(NAMES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each trial")
    parser.add_argument("--p99-ms", type=float, default=20.0)
    parser.add_argument("--tolerance", type=float, default=0.05)
    parser.add_argument("--overhead-rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "serving-benchmark.json")
    parser.add_argument("--on", default="", metavar="CPU", help="what to call this kind of CPU, as avx2")
    parser.add_argument(
        "--tables", type=Path, metavar="FILE", help="measure nothing; the page of that serving[-CPU].json"
    )
    options = parser.parse_args(arguments)
    unknown = set(options.peers.split(",")) - set(NAMES)
    named = re.fullmatch("[a-z0-9]*", options.on)
    if unknown or not named or options.rounds < 1 or options.overhead_rounds < ROUNDS:
        parser.error(
            f"peers are {', '.join(NAMES)}; rounds at least 1; overhead rounds at least {ROUNDS}; --on takes "
            "small letters and digits"
        )
    return options


def _found(search: _Search, system: System, seed: int) -> dict[str, Any]:
    """What a system held in a round; one that did not start or broke off held nothing, for that reason."""
    try:
        return search(system, seed=seed).to_json()
    except InputError as error:
        reason = _reason(error)
        print(f"{system}: {reason}", file=sys.stderr, flush=True)
        return results.failure(reason)


def _reason(error: InputError) -> str:
    """As it may be committed: a log's last line can name where this checkout lies."""
    return str(error).replace(f"{ROOT}/", "")


@dataclass(frozen=True, slots=True)
class Found:
    """A search, and the CPU time that the system took in each of its trials, in ms a request."""

    report: SearchReport
    cpu_ms: tuple[float, ...]

    @property
    def rate_per_s(self) -> float:
        return self.report.rate_per_s

    def to_json(self) -> dict[str, Any]:
        data = self.report.to_json()
        trials = zip(data["trials"], self.cpu_ms, strict=True)
        return {**data, "trials": [{**trial, "cpu_ms": figure(ms)} for trial, ms in trials]}


class _Search:
    """The highest rate of one system, started anew and ended again."""

    def __init__(self, bundle: Bundle, seconds: float, p99_ms: float, tolerance: float) -> None:
        self._served = {"": (bundle, ReferenceChecker(bundle))}
        self._seconds, self._p99_ms, self._tolerance = seconds, p99_ms, tolerance

    def serve(self, variant: str, bundle: Bundle) -> None:
        """Have this variant serve a bundle of its own, its answers held to that one's precision."""
        self._served[variant] = (bundle, ReferenceChecker(bundle))

    def __call__(self, system: System, seed: int) -> Found:
        lengths, driving = parse_lengths(LENGTHS), LoadOptions(warm_up=200, sample=8, seed=seed)
        bundle, checker = self._served.get(system.variant, self._served[""])
        with (
            tempfile.TemporaryDirectory() as folder,
            started(system, bundle.folder, bundle.signature, Path(folder) / "log") as it,
        ):
            cpu_ms: list[float] = []

            def run_at(rate: float) -> LoadReport:
                count = max(LEAST, round(rate * self._seconds))
                plan = open_plan(Arrivals("poisson", rate), lengths, count, seed)
                before_s = it.cpu_s()
                report = run_load(it.target, plan, driving, checker)
                cpu_ms.append((it.cpu_s() - before_s) * 1e3 / (count + driving.warm_up))
                return report

            alone = run_load(it.target, closed_plan(1, lengths, LEAST, seed), driving, checker)
            found = find_rate(run_at, alone, self._p99_ms, tolerance=self._tolerance)
        print(f"{system}: {found.rate_per_s:.1f}/s", file=sys.stderr, flush=True)
        return Found(found, tuple(cpu_ms))


def _paged(kept: dict[str, Any], cpu: str) -> int:
    """Write the page of what was kept, which alone decides what it says."""
    text, met = written(kept)
    page = ROOT / "docs" / (f"serving-benchmarks-{cpu}.md" if cpu else "serving-benchmarks.md")
    page.parent.mkdir(exist_ok=True)
    page.write_text(text, encoding="utf-8")
    print(text)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
