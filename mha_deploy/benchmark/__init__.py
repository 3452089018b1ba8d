"""bench: latency that can be believed, and where the time goes.

    rounds.py      the protocol: turns, rounds, samples by round
    turns.py       sessions as turns, the sizes and inputs that they run on
    comparison.py  which of two is faster, by the interval of their ratio
    block.py       which block was timed
    conditions.py  neighbours, stolen time, throttling, drift
    ceilings.py    what the machine can do: MatMul, bandwidth, overhead; ceilings_cpu.py, ceilings_gpu.py
    bounds.py      what holds a run back
    report.py      bench
    candidates.py  bench --compare
    baseline.py    bench --baseline; the file that it names in baseline_file.py
    operators.py   bench --profile
    picture.py     bench --roofline

`measure` and `compare` take any callables; nothing in them knows of attention.
"""

from __future__ import annotations

from mha_deploy.benchmark.baseline import GateReport, gate
from mha_deploy.benchmark.candidates import Candidate, ContestReport, candidate, contest
from mha_deploy.benchmark.comparison import Comparison, Estimate, compare, compare_medians
from mha_deploy.benchmark.conditions import Conditions, watch
from mha_deploy.benchmark.operators import Profile, check_profiled, profile
from mha_deploy.benchmark.picture import check_picture, draw_roofline
from mha_deploy.benchmark.report import BenchReport, Cell, bench
from mha_deploy.benchmark.rounds import Samples, Schedule, Turn, measure
from mha_deploy.benchmark.turns import ReopenedSession, random_feeds, session_turn

__all__ = [
    "BenchReport",
    "Candidate",
    "Cell",
    "Comparison",
    "Conditions",
    "ContestReport",
    "Estimate",
    "GateReport",
    "Profile",
    "ReopenedSession",
    "Samples",
    "Schedule",
    "Turn",
    "bench",
    "candidate",
    "check_picture",
    "check_profiled",
    "compare",
    "compare_medians",
    "contest",
    "draw_roofline",
    "gate",
    "measure",
    "profile",
    "random_feeds",
    "session_turn",
    "watch",
]
