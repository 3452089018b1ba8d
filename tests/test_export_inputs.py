"""Real inputs at export: those that no artifact could be verified on."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import small_spec

from mha_deploy.errors import FeedError
from mha_deploy.pipeline import export


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
def test_inputs_that_are_not_finite_are_refused_by_their_request(tmp_path, value):
    x = np.zeros((5, 32), np.float32 if abs(value) != 1e300 else np.float64)
    x[4, 31] = value
    np.savez(tmp_path / "in.npz", x=x, lengths=np.array([2, 2, 1]))
    with pytest.raises(FeedError, match=r"in\.npz: 'x' of request 2 holds NaN, inf or what fp32 cannot hold"):
        export(small_spec(), tmp_path / "bundle", inputs=tmp_path / "in.npz")
    assert [path.name for path in tmp_path.iterdir()] == ["in.npz"]
