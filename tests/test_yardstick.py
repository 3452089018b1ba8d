"""What PyTorch scatters where its inputs cannot be moved: all zeros, which stay zeros."""

from __future__ import annotations

import numpy as np
import pytest

from mha_deploy.cases import padded_case
from mha_deploy.precision import Precision
from mha_deploy.sessions.fake import FakeSession
from mha_deploy.verification import FAILED, PASSED, Judge, References, verify


@pytest.fixture(scope="module")
def zeros():
    return {"x": np.zeros((2, 16, 384), np.float32), "mask": np.ones((2, 16), bool)}


def test_a_sound_engine_passes_on_inputs_that_are_all_zero(demo_bundle, zeros):
    (result,) = verify(demo_bundle, inputs=zeros, names=["real-inputs"]).cases
    assert (result.outcome, result.note) == (PASSED, "")


def test_no_feature_has_a_yardstick_of_almost_nothing_there(demo_bundle, zeros):
    case = padded_case(demo_bundle.spec, zeros)
    for precision in (Precision.FP32, Precision.FP16, Precision.BF16):
        found = References(demo_bundle.reference()).yardstick(case, precision)
        assert found.features.min() > 0.02 * found.features.max()


def test_one_feature_that_is_off_there_by_a_few_eps_fails(demo_bundle, zeros):
    case, judge = padded_case(demo_bundle.spec, zeros), Judge(demo_bundle.reference())
    with demo_bundle.open_session() as session:

        def run(feeds):
            y = session.run(feeds)["y"].copy()
            y[..., 65] += 5e-7
            return {"y": y}

        broken = FakeSession(demo_bundle.spec.signature, run)
        result = judge(broken, "broken", case)
    assert result.outcome == FAILED
