"""Named inputs to verify with, made from a spec and a seed.

case.py        Case: inputs, what the reference gets, which rows count
sizes.py       sizes that fit a spec's dims and this machine's memory
draw.py        random inputs of one case, at a scale
masks.py       padding right, left and with holes; empty rows; garbage where nobody may look
real.py        real requests, as they came and masked further
suite.py       the cases of `verify`
lattice.py     the sizes that prove dynamic axes
"""

from mha_deploy.cases.case import Case, describe
from mha_deploy.cases.lattice import lattice_cases, sized_case
from mha_deploy.cases.real import masked_real_cases, real_case
from mha_deploy.cases.suite import standard_cases

__all__ = [
    "Case",
    "describe",
    "lattice_cases",
    "masked_real_cases",
    "real_case",
    "sized_case",
    "standard_cases",
]
