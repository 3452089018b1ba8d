"""The candidates, one file a kind. A new file with a `CANDIDATES` tuple is found by itself.

`RANK` orders the files: of two candidates that are equally fast, the simpler one (the lower rank, then
the earlier in its file) wins.
"""

from __future__ import annotations

import importlib
import pkgutil

from mha_deploy.search.candidate import Candidate


def all_candidates() -> tuple[Candidate, ...]:
    """Every candidate, the simplest first."""
    names = (found.name for found in pkgutil.iter_modules(__path__))
    modules = [importlib.import_module(f"{__name__}.{name}") for name in sorted(names)]
    return tuple(each for module in sorted(modules, key=lambda m: int(m.RANK)) for each in module.CANDIDATES)
