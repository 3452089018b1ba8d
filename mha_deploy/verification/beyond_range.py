"""What keeps nodes in fp32 so as to stay in range is judged where PyTorch at 16 bits is not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mha_deploy.cases import Case
from mha_deploy.precision import Precision
from mha_deploy.sessions import Session
from mha_deploy.signature import Array, Feeds
from mha_deploy.verification.judge import Judge
from mha_deploy.verification.report import FAILED, OUT_OF_RANGE, PASSED, CaseResult


def judged_beyond_range(judge: Judge, session: Session, artifact: str, case: Case) -> CaseResult:
    """`judge`'s result but, where PyTorch at the session's precision is not finite and the session is,
    held to fp32's budget times the ratio of the two eps.

    To first order a rounding error grows with eps (Higham, Accuracy and Stability of Numerical
    Algorithms, section 3.1), so that this is what 16 bits would scatter if they had fp32's range.
    """
    result = judge(session, artifact, case)
    if result.outcome != OUT_OF_RANGE or not np.isfinite(result.max_abs_error):
        return result
    ratio = session.precision.eps / Precision.FP32.eps
    fine = judge(_AsFp32(session), artifact, case)
    allowed, feature = fine.allowed * ratio, fine.by_feature
    feature = replace(feature, yardstick=feature.yardstick * ratio, allowed=feature.allowed * ratio)
    return replace(
        result,
        outcome=PASSED if result.max_abs_error <= allowed and feature.held else FAILED,
        yardstick=fine.yardstick * ratio,
        allowed=allowed,
        relative_yardstick=fine.relative_yardstick * ratio,
        by_feature=feature,
        note=f"PyTorch at {result.precision.value} is not finite here: held to fp32's budget x {ratio:g}",
    )


class _AsFp32(Session):
    """The same answers under fp32's name, so that they meet fp32's yardstick."""

    def __init__(self, inner: Session) -> None:
        super().__init__(inner.name, inner.signature, Precision.FP32, inner.provider)
        self._inner = inner

    def _execute(self, feeds: Feeds) -> dict[str, Array]:
        return self._inner.run(feeds)
