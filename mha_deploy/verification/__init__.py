"""Does an artifact compute what PyTorch computes? Truth, yardstick and verdict.

Truth is the reference in fp64. The yardstick is PyTorch at the artifact's own precision: what it
scatters there is what that precision costs, and an artifact is held to that, not to a guessed
tolerance. Integer precisions have no yardstick; they are held to a budget that is declared,
on real inputs.

    metrics.py     how far an answer is from the truth, and where
    yardstick.py   the reference's answers, each computed once
    properties.py  what must hold whatever the numbers are
    report.py      what was found, as plain data
    judge.py       one session on one case or property
    suite.py       the cases and properties of one verification
    run.py         every artifact of a bundle on every case and property
    junit.py       a report for CI systems
    heatmap.py     one artifact's error on one case over position and head
    artifact_map.py, context_value.py    where the artifact's values come from
    picture.py     a heat map drawn
"""

from mha_deploy.verification.judge import Judge, as_inputs, decides
from mha_deploy.verification.report import (
    DECLARED,
    FAILED,
    FEATURE_RULE,
    INFORMS,
    NOT_CHECKED,
    OUT_OF_RANGE,
    PASSED,
    RULE,
    CaseResult,
    FeatureError,
    Hop,
    PropertyResult,
    VerifyReport,
)
from mha_deploy.verification.run import Bench, Observe, Planned, failed_case, suite_of, verify
from mha_deploy.verification.suite import Suite
from mha_deploy.verification.yardstick import Reference, References

__all__ = [
    "DECLARED",
    "FAILED",
    "FEATURE_RULE",
    "INFORMS",
    "NOT_CHECKED",
    "OUT_OF_RANGE",
    "PASSED",
    "RULE",
    "Bench",
    "CaseResult",
    "FeatureError",
    "Hop",
    "Judge",
    "Observe",
    "Planned",
    "PropertyResult",
    "Reference",
    "References",
    "Suite",
    "VerifyReport",
    "as_inputs",
    "decides",
    "failed_case",
    "suite_of",
    "verify",
]
