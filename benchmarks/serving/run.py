"""This project's server against Triton (Python backend), LitServe, MLServer and Ray Serve: one ONNX file.

    python benchmarks/serving/run.py [--peers triton,ray] [--rounds 3] [--trials 8] [--on CPU]
    python benchmarks/serving/run.py --tables FILE

Installs what is missing (benchmarks/.envs), lets `optimize` choose this project's engine, then finds, round
by round, the Poisson rate at which each system, each peer in both variants, holds the p99 target in half of
its trials; they take turns trial by trial.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import overhead
import results
from document import written
from staircase import FINE, Staircase
from subject import exported, in_bf16
from systems import FLOOR, NAMES, OUR_ARGUMENTS, OURS, PEER_VARIANTS, System, declared, prepare
from turns import Conditions, Served, play

from mha_deploy.benchmark.rounds import ROUNDS
from mha_deploy.errors import CheckError, InputError, MissingError
from mha_deploy.load import ReferenceChecker, parse_lengths
from mha_deploy.machine import describe, usable_cpus
from mha_deploy.search import optimize

ROOT = Path(__file__).parents[2]
COMMAND = "benchmarks/serving/run.py"
LENGTHS = "lognormal:27:2:160"


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
    systems = [System(OURS, variant) for variant in OUR_ARGUMENTS] + [System(FLOOR, "default")]
    served = {"": Served(bundle, ReferenceChecker(bundle))}
    missing, left_out = {}, {}
    try:
        narrow = in_bf16(bundle)
        served["bf16"] = Served(narrow, ReferenceChecker(narrow))
    except (MissingError, CheckError) as error:
        systems.remove(System(OURS, "bf16"))
        left_out[str(System(OURS, "bf16"))] = str(error)
    engine = optimize(bundle).artifact  # which `serve` runs from then on
    print(f"optimize chose {engine}", file=sys.stderr, flush=True)
    for name in options.peers.split(","):
        reason = prepare(name)
        if reason:
            missing[name] = reason
        else:
            systems += [System(name, variant) for variant in PEER_VARIANTS]
    lone = overhead.measure(options.overhead_rounds, usable_cpus())
    conditions = Conditions(parse_lengths(LENGTHS), options.seconds, options.trials, options.p99_ms)
    stairs: dict[System, Staircase] = {}
    rounds = [
        play(systems, lambda system: served.get(system.variant, served[""]), conditions, stairs, number)
        for number in range(1, options.rounds + 1)
    ]
    return {
        "machine": describe(),
        "conditions": {
            "lengths": LENGTHS,
            "arrivals": "poisson",
            "p99_ms": options.p99_ms,
            "seconds": options.seconds,
            "trials": options.trials,
            "step": FINE,
            "d_model": bundle.spec.d_model,
        },
        "peers": {name: declared(name) for name in options.peers.split(",")},
        "engine": engine,
        "missing": missing,
        "left_out": left_out,
        "systems": [str(system) for system in systems],
        "rounds": rounds,
        "lone_request": lone,
    }


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--peers", default=",".join(NAMES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trials", type=int, default=8, help="of each system in each round")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each trial")
    parser.add_argument("--p99-ms", type=float, default=20.0)
    parser.add_argument("--overhead-rounds", type=int, default=60)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "serving-benchmark.json")
    parser.add_argument("--on", default="", metavar="CPU", help="what to call this kind of CPU, as avx2")
    parser.add_argument(
        "--tables", type=Path, metavar="FILE", help="measure nothing; the page of that serving[-CPU].json"
    )
    options = parser.parse_args(arguments)
    unknown = set(options.peers.split(",")) - set(NAMES)
    named = re.fullmatch("[a-z0-9]*", options.on)
    if unknown or not named or min(options.rounds, options.trials) < 1 or options.overhead_rounds < ROUNDS:
        parser.error(
            f"peers are {', '.join(NAMES)}; rounds and trials at least 1; overhead rounds at least {ROUNDS}; "
            "--on takes small letters and digits"
        )
    return options


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
