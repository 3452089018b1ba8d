"""Does an artifact compute what PyTorch computes? Truth, yardstick and verdict.

Truth is the reference in fp64. The yardstick is PyTorch at the artifact's own precision: what it
scatters there is what that precision costs, and an artifact is held to that, not to a guessed
tolerance. Integer precisions have no yardstick; they are held to a budget that is declared,
on real inputs.

    metrics.py     how far an answer is from the truth, and where
    report.py      what was found, as plain data
    judge.py       one session on one case
    run.py         every artifact of a bundle on every case
"""

from mha_deploy.verification.judge import Judge, as_inputs, decides
from mha_deploy.verification.report import (
    FAILED,
    INFORMS,
    OUT_OF_RANGE,
    PASSED,
    RULE,
    CaseResult,
    VerifyReport,
)
from mha_deploy.verification.run import verify

__all__ = [
    "FAILED",
    "INFORMS",
    "OUT_OF_RANGE",
    "PASSED",
    "RULE",
    "CaseResult",
    "Judge",
    "VerifyReport",
    "as_inputs",
    "decides",
    "verify",
]
