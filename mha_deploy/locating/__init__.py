"""Where does an artifact go wrong? Its values, one by one, against the reference's in fp64.

report.py       what was found, as plain data
double.py       a graph's fp64 twin
exposed.py      a graph with inner values made outputs; the node at which it stops running
expected.py     what the artifact's graph should be, made again from the weights
inputs.py       what a graph gets of a case, packed where it is
budgets.py      what each inner value may be off by
pairing.py      which value is which in two graphs
differences.py  how a node differs from the reference's
walk.py         down the graph to the first value that is out of its budget
search.py       one artifact on one case
smallest.py     the smallest set with which something holds
spliced.py      a quantised graph with some nodes as they were
fp32.py         which nodes to keep in fp32
run.py          every artifact that did not pass
"""

from mha_deploy.locating.fp32 import Fp32Nodes
from mha_deploy.locating.report import (
    CANNOT_RUN,
    FUSION,
    NOT_FOUND,
    OVERFLOW,
    UNREADABLE,
    VALUE,
    Located,
    Place,
)
from mha_deploy.locating.run import LocateReport, locate
from mha_deploy.locating.search import Locator

__all__ = [
    "CANNOT_RUN",
    "FUSION",
    "NOT_FOUND",
    "OVERFLOW",
    "UNREADABLE",
    "VALUE",
    "Fp32Nodes",
    "LocateReport",
    "Located",
    "Locator",
    "Place",
    "locate",
]
