"""The canonical graph in ONNX Runtime on the CPU, and the session settings that can matter to it.

Of its settings two are tried. Threads that wait for work at full speed win where the cores are free and
lose where others use them; one thread wins on runs that are over before a second has started. Memory
pattern and arena, measured off and on beside these, made no difference that stood out of the noise;
the execution mode has nothing to run in parallel in a chain of products, and the level of graph
optimisation is the highest by default.
"""

from __future__ import annotations

from typing import Any

from mha_deploy import machine
from mha_deploy.bundle import CANONICAL, Bundle
from mha_deploy.manifest import Artifact
from mha_deploy.precision import Precision
from mha_deploy.search.candidate import Candidate, Make, Status, canonical, variant_of
from mha_deploy.sessions import Placement

RANK = 0


def on_the_cpu(_bundle: Bundle, placement: Placement) -> str:
    return "" if placement.device == "cpu" else f"runs on the CPU; {placement.device} was asked for"


def _several_threads(bundle: Bundle, placement: Placement) -> str:
    threads = placement.threads or machine.usable_cpus()
    return on_the_cpu(bundle, placement) or ("" if threads > 1 else "there is one thread in any case")


def _with(name: str, **settings: Any) -> Make:
    def make(bundle: Bundle, status: Status) -> Artifact:
        details = {"made_from": CANONICAL, "settings": settings}
        return variant_of(canonical(bundle, status), name, details=details)

    return make


CANDIDATES = (
    Candidate(CANONICAL, Precision.FP32, canonical, on_the_cpu),
    Candidate("no-spinning", Precision.FP32, _with("no-spinning", spinning=False), _several_threads),
    Candidate("one-thread", Precision.FP32, _with("one-thread", threads=1), _several_threads),
)
