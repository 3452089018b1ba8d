"""int8 for ONNX Runtime, kept only where it passes on real inputs.

Random inputs have none of the outliers that real activations have, and outliers are what breaks
int8. So scales are calibrated on one half of the bundle's real requests, and the error that decides
is the one on the other half.

    products.py    the matrix products with constant weights, and what they are for
    candidate.py   what is tried, in the order of its predicted cost
    calibration.py ranges of activations on real inputs
    plan.py        the block, and how it is to be rewritten
    smoothing.py   outliers moved from activations into weights
    rewrite.py     a candidate as an ONNX graph
    evidence.py    real requests, half to calibrate and half to judge on; errors on them
    trial.py       one candidate, made and judged
    search.py      candidates one after another until one passes
    report.py      what was found, as plain data
    artifact.py    the one that passed, as an artifact of the bundle
"""

from mha_deploy.quantization.artifact import quantize
from mha_deploy.quantization.candidate import INT8, SCHEMES, Candidate
from mha_deploy.quantization.report import KEPT, QuantizationReport, Tried
from mha_deploy.quantization.search import Wanted

__all__ = ["INT8", "KEPT", "SCHEMES", "Candidate", "QuantizationReport", "Tried", "Wanted", "quantize"]
