"""Named inputs to verify with, made from a spec and a seed.

case.py        Case: inputs, what the reference gets, which rows count
sizes.py       sizes that fit a spec's dims and this machine's memory
draw.py        random inputs of one case
masks.py       padding right, left and with holes; empty rows; garbage where nobody may look
magnitudes.py  sharp and flat softmax, near-ties, outlier channels, numbers near overflow
real.py        requests that were given
suite.py       the cases of `verify`
lattice.py     the sizes that prove dynamic axes
"""

from mha_deploy.cases.case import Case, describe
from mha_deploy.cases.lattice import lattice_cases, sized_case
from mha_deploy.cases.real import masked_real_cases, padded_case, real_case, real_cases
from mha_deploy.cases.sizes import Sizing
from mha_deploy.cases.suite import QUICK, case_names, standard_cases

__all__ = [
    "QUICK",
    "Case",
    "Sizing",
    "case_names",
    "describe",
    "lattice_cases",
    "masked_real_cases",
    "padded_case",
    "real_case",
    "real_cases",
    "sized_case",
    "standard_cases",
]
