"""optimize: the fastest way to run the block on this machine, among those that pass.

    candidate.py   what may be tried, as a declaration
    candidates/    one file a kind
    rewritten.py   those that are the canonical graph, rewritten
    gate.py        does it compute what PyTorch computes
    sizes.py       where it is to be fast
    measuring.py   all that pass, in turns: a heat, and a final near its winner
    choice.py      one for all sizes, or one for short and one for long
    routing.py     two artifacts as one
    record.py      what was found before
    recorded.py    what that may hold
    report.py      what was found, as plain data
    run.py         the search

A search leaves `search.json` in the bundle, which an interrupted one goes on from, and the choice in
the manifest, by machine: `Bundle.open_session()` opens it there.
"""

from mha_deploy.search.candidate import Candidate
from mha_deploy.search.choice import RULE, Route
from mha_deploy.search.report import SearchReport
from mha_deploy.search.run import SECONDS, optimize

__all__ = ["RULE", "SECONDS", "Candidate", "Route", "SearchReport", "optimize"]
