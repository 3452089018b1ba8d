"""`BatchRunner`: many callers, few sessions.

options.py      bounds and rules, as the owner asks for them
ticket.py       a request on its way, and what its caller holds
layout.py       requests to a session's inputs, outputs to answers
cost.py         what a batch will cost
trial.py        one session, timed on noise
crew.py         how many workers of how many threads, and whether a soloist pays
calibration.py  all that is measured at load, kept in the bundle
heap.py         tickets in order, out of which any may fall
planner.py      which requests run together
backlog.py      the requests that wait
desk.py         what the threads share, behind one lock
worker.py       a thread with a session
histogram.py    durations, mergeable, of all time and of the last seconds
recorder.py     counters, and the snapshot that others read
runner.py       the runner
"""

from mha_deploy.runner.cost import CostModel
from mha_deploy.runner.crew import Soloist
from mha_deploy.runner.histogram import Histogram
from mha_deploy.runner.options import DEFAULT_OPTIONS, RunnerOptions
from mha_deploy.runner.recorder import PHASES, BatchFigures, RunnerLoad, RunnerSnapshot
from mha_deploy.runner.runner import BatchRunner
from mha_deploy.runner.ticket import Answer, Outcome

__all__ = [
    "DEFAULT_OPTIONS",
    "PHASES",
    "Answer",
    "BatchFigures",
    "BatchRunner",
    "CostModel",
    "Histogram",
    "Outcome",
    "RunnerLoad",
    "RunnerOptions",
    "RunnerSnapshot",
    "Soloist",
]
