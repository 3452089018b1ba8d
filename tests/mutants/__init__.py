"""Ways to damage the ONNX of an attention block, each small and each one wrong.

A mutant edits a sound model in place and says which nodes it damaged, by their names in the damaged
file. `docs/mutants.md` is the table of them; `python -m mutants`, run in `tests`, writes it again.
"""

from mutants import attention, files, padding, projections, shapes  # noqa: F401  each registers its own
from mutants.graph import Graph
from mutants.mutant import CAUSAL, DEMO, FORMS, MUTANTS, PORTABLE, Mutant
from mutants.table import TABLE, table

__all__ = ["CAUSAL", "DEMO", "FORMS", "MUTANTS", "PORTABLE", "TABLE", "Graph", "Mutant", "table"]
