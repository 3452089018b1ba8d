"""`load`: send requests as users do, and say how long they waited.

arrivals.py    when: Poisson, constant, bursts, a trace file
lengths.py     how long requests are
plan.py        a run, decided before it starts: open or closed loop
records.py     what became of every request, and when
inputs.py      the tensors that requests carry
encoding.py    requests in bytes
target.py      where requests go
client.py      a server, over raw connections
server.py      a server by its URL, and what it says of itself
in_process.py  a runner in this process
alarm.py       a timer in microseconds
drive.py       sends a plan
check.py       are the answers right?
report.py      the figures, and whether they count
run.py         one run
search.py      the highest rate that holds a p99 target
picture.py     latency by percentile, drawn
"""

from mha_deploy.load.arrivals import Arrivals
from mha_deploy.load.check import Checker, CheckReport, ReferenceChecker
from mha_deploy.load.client import HttpTarget
from mha_deploy.load.in_process import RunnerTarget
from mha_deploy.load.lengths import Lengths, parse_lengths
from mha_deploy.load.picture import draw_percentiles
from mha_deploy.load.plan import Plan, closed_plan, open_plan, trace_plan
from mha_deploy.load.records import Outcome, Records
from mha_deploy.load.report import LoadReport, Spread
from mha_deploy.load.run import LoadOptions, run_load
from mha_deploy.load.search import SearchReport, Trial, find_rate
from mha_deploy.load.server import server_target

__all__ = [
    "Arrivals",
    "CheckReport",
    "Checker",
    "HttpTarget",
    "Lengths",
    "LoadOptions",
    "LoadReport",
    "Outcome",
    "Plan",
    "Records",
    "ReferenceChecker",
    "RunnerTarget",
    "SearchReport",
    "Spread",
    "Trial",
    "closed_plan",
    "draw_percentiles",
    "find_rate",
    "open_plan",
    "parse_lengths",
    "run_load",
    "server_target",
    "trace_plan",
]
