"""What tests of engine sessions share: a plan, its requests and their answers."""

from __future__ import annotations

import numpy as np
from conftest import small_spec
from fake_tensorrt import FakePlan

from mha_deploy.precision import numpy_dtype
from mha_deploy.signature import Dim

SIGNATURE = small_spec(dims=(Dim("batch", 1, 2, 32), Dim("seq", 1, 8, 64))).signature
WHOLE = {"batch": (1, 32), "seq": (1, 64)}
# By the elements of its largest input: the third is smallest, the first largest.
THREE = (
    {"batch": (1, 8), "seq": (1, 64)},
    {"batch": (2, 32), "seq": (4, 8)},
    {"batch": (1, 1), "seq": (1, 64)},
)


def double(feeds):
    """x doubled where the mask is set, 0 elsewhere."""
    return {"y": np.where(feeds["mask"][..., None], feeds["x"] * feeds["x"].dtype.type(2), 0)}


def make_plan(*profiles, signature=SIGNATURE, **fields) -> FakePlan:
    return FakePlan(signature, profiles or (WHOLE,), double, **fields)


def feeds(batch=2, seq=5, *, seed=0, dtype="float32"):
    random = np.random.default_rng((seed, batch, seq))
    x = random.standard_normal((batch, seq, 32)).astype(numpy_dtype(dtype))
    return {"x": x, "mask": random.random((batch, seq)) < 0.7}


def right(session, given):
    np.testing.assert_array_equal(session.run(given)["y"], double(given)["y"])
