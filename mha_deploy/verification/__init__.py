"""Does an artifact compute what PyTorch computes? Truth, yardstick and verdict.

Truth is the reference in fp64. The yardstick is PyTorch at the artifact's own precision: what it
scatters there is what that precision costs, and an artifact is held to that, not to a guessed
tolerance. Integer precisions have no yardstick; they are held to a budget that is declared.

    metrics.py     how far an answer is from the truth, and where
    report.py      what was found, as plain data
    judge.py       one session on one case
    run.py         every artifact of a bundle on every case
    junit.py       a report for CI systems
    heatmap.py     one artifact's error on one case over position and head
    artifact_map.py, context_value.py    where the artifact's values come from
    picture.py     a heat map drawn
"""

from mha_deploy.verification.judge import Judge, Reference, as_inputs
from mha_deploy.verification.report import (
    FAILED,
    OUT_OF_RANGE,
    PASSED,
    RULE,
    CaseResult,
    VerifyReport,
)
from mha_deploy.verification.run import Observe, failed_case, judged_or_failed, verify

__all__ = [
    "FAILED",
    "OUT_OF_RANGE",
    "PASSED",
    "RULE",
    "CaseResult",
    "Judge",
    "Observe",
    "Reference",
    "VerifyReport",
    "as_inputs",
    "failed_case",
    "judged_or_failed",
    "verify",
]
