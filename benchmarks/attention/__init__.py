"""Attention against its peers, each in its own environment, all in the same rounds.

run.py           the command: python -m benchmarks.attention.run
roster.py        who takes part
environments.py  a virtual environment for each
worker.py        a peer's process; peers/ has what it runs
connection.py    the parent's end of the pipe to it
subjects.py      blocks, shapes, inputs, and what is right
rounds.py        the protocol over processes that take turns
suite.py         sizes and shapes in turn: prepare, check, measure
results.py       what was found, as data and as a file
claims.py        what should hold, and whether it did
tables.py        docs/benchmarks.md
"""
