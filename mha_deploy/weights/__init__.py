"""Checkpoints, in the layouts people have, as the tensors of the reference module.

checkpoint.py   a file on disk -> names, shapes, dtypes and single tensors
layouts.py      the table of known layouts; a new one is one entry
reference.py    the names and shapes that the reference module wants, and seeded ones
fit.py          which layout a prefix holds, and all that does not fit the spec
read.py         read_weights: the four above, in order
"""

from mha_deploy.weights.read import LoadedWeights, read_weights
from mha_deploy.weights.reference import expected_shapes

__all__ = ["LoadedWeights", "expected_shapes", "read_weights"]
