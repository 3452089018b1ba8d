"""What must hold of attention whatever the numbers are: for the reference, and seen where it does not."""

from __future__ import annotations

import json

import numpy as np
import pytest
from conftest import small_spec
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mha_deploy.attention import MultiHeadAttention
from mha_deploy.precision import Precision
from mha_deploy.sessions.fake import FakeSession
from mha_deploy.sessions.reference import ReferenceSession
from mha_deploy.signature import Dim
from mha_deploy.verification import DECLARED, FAILED, NOT_CHECKED, PASSED, Judge, VerifyReport
from mha_deploy.verification.properties import NAMES, properties

DIMS = (Dim("batch", 1, 2, 6), Dim("q_len", 1, 8, 64), Dim("kv_len", 1, 8, 64))
BLOCKS = {
    "self": {},
    "causal": {"causal": True},
    "full": {"mask": "full"},
    "full causal": {"mask": "full", "causal": True},
    "no mask": {"mask": "none"},
    "pre-norm": {"norm": "pre"},
    "post-norm": {"norm": "post"},
    "grouped": {"num_kv_heads": 2, "bias": ()},
    "cross": {"kind": "cross", "dims": DIMS, "kdim": 24, "vdim": 40},
    "cross full": {"kind": "cross", "dims": DIMS, "mask": "full"},
    "cross no mask": {"kind": "cross", "dims": DIMS, "mask": "none", "norm": "pre"},
}


def module_of(spec):
    import torch

    torch.manual_seed(0)
    return MultiHeadAttention(spec).eval()


def held(spec, *, seed=0, session=None, budget=0.0, **how):
    module = module_of(spec)
    session = session or ReferenceSession(module, Precision.FP32)
    judge = Judge(module, max_relative_error=budget)
    return {p.name: judge.hold(session, "it", p, **how) for p in properties(spec, seed)}


def around(spec, change, precision=Precision.FP32):
    """The reference with something done to its inputs and its answer."""
    inner = ReferenceSession(module_of(spec), Precision.FP32)
    return FakeSession(
        spec.signature,
        lambda feeds: {"y": change(dict(feeds), lambda f: inner.run(f)["y"]).astype(np.float32)},
        precision=precision,
    )


@pytest.mark.parametrize("block", BLOCKS)
def test_every_property_that_can_be_checked_holds_for_the_reference(block):
    results = held(small_spec(**BLOCKS[block]))
    assert tuple(results) == NAMES
    assert {r.outcome for r in results.values()} == {PASSED, NOT_CHECKED}
    assert all(r.note for r in results.values() if r.outcome == NOT_CHECKED)


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**31), block=st.sampled_from(sorted(BLOCKS)))
@example(4161, "full")  # a key that no query sees, and that as a query sees others
def test_the_properties_hold_for_the_reference_whatever_the_inputs(seed, block):
    failed = [r for r in held(small_spec(**BLOCKS[block]), seed=seed).values() if r.outcome == FAILED]
    assert failed == []


NOT_CHECKED_IN = {
    "self": {"no-look-ahead": "not causal"},
    "causal": {"key-order": "order of keys means something"},
    "no mask": {
        "no-look-ahead": "not causal",
        "more-padding": "takes no mask",
        "padding-contents": "takes no mask",
        "value-scale": "sees several keys",
        "value-shift": "sees several keys",
    },
    "post-norm": {"no-look-ahead": "", "value-scale": "follows the output", "value-shift": "follows"},
    "pre-norm": {"no-look-ahead": "", "value-scale": "before the values", "value-shift": "before"},
    "cross": {"no-look-ahead": "not causal"},
}


@pytest.mark.parametrize("block", NOT_CHECKED_IN)
def test_the_report_says_what_could_not_be_checked_for_a_block_and_why(block):
    results = held(small_spec(**BLOCKS[block]))
    notes = {r.name: r.note for r in results.values() if r.outcome == NOT_CHECKED}
    assert set(notes) == set(NOT_CHECKED_IN[block])
    assert all(words in notes[name] for name, words in NOT_CHECKED_IN[block].items())


def shares_a_scale(feeds, run):
    """An answer that feels the loudest value of its batch, as one scale for a whole tensor makes it."""
    return run(feeds) * (1 + 1e-3 * np.nanmax(np.abs(np.nan_to_num(feeds["x"], posinf=0, neginf=0))))


def knows_its_place(feeds, run):
    y = run(feeds)
    return y + 1e-3 * np.arange(len(y))[:, None, None]


def counts_padding(feeds, run):
    return run(feeds) * (1 + 1e-3 * feeds["mask"].shape[1])


def reads_padding(feeds, run):
    return run({**feeds, "mask": np.ones_like(feeds["mask"])})


def knows_positions(feeds, run):
    x = feeds["x"] * (1 + 0.01 * np.arange(feeds["x"].shape[1], dtype=np.float32)[None, :, None])
    return run({**feeds, "x": x})


def looks_ahead(feeds, run):
    y = run(feeds)
    y[:, :-1] += 1e-3 * feeds["x"][:, 1:, : y.shape[2]]
    return y


def saturates(feeds, run):
    return run({**feeds, "x": np.tanh(feeds["x"])})


FAULTS = {
    "batch-mates": (shares_a_scale, {}),
    "alone": (shares_a_scale, {}),
    "identical-rows": (knows_its_place, {}),
    "batch-order": (knows_its_place, {}),
    "more-padding": (counts_padding, {}),
    "padding-contents": (reads_padding, {}),
    "key-order": (knows_positions, {}),
    "no-look-ahead": (looks_ahead, {"causal": True}),
    "value-scale": (saturates, {}),
    "value-shift": (saturates, {}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_property_that_does_not_hold_is_seen(name):
    fault, changes = FAULTS[name]
    spec = small_spec(**changes)
    result = held(spec, session=around(spec, fault))[name]
    assert result.outcome == FAILED
    assert result.note or result.deviation > result.allowed


def test_a_session_that_answers_outside_its_range_is_seen():
    spec = small_spec()
    wide = small_spec(dims=(Dim("batch", 1, 2, 60), Dim("seq", 1, 8, 640)))
    result = held(spec, session=around(wide, lambda feeds, run: run(feeds)))["sizes-outside"]
    assert result.outcome == FAILED
    assert "answered outside its range: x [7, 1, 32]" in result.note


def test_one_scale_for_the_whole_batch_lets_a_loud_neighbour_change_the_answer():
    """0.3 beside values within 1 becomes 0.298 in 8 bits; beside 100 it becomes 0."""

    def dynamic(feeds, run):
        step = 2 * np.abs(np.where(feeds["mask"][..., None], feeds["x"], 0)).max() / 255
        return run({**feeds, "x": (np.round(feeds["x"] / step) * step).astype(np.float32)})

    spec = small_spec()
    session = around(spec, dynamic, Precision.INT8)
    shown = held(spec, session=session, budget=0.025)["batch-mates"]
    assert shown.outcome == FAILED
    assert shown.relative > 0.1
    declared = held(spec, session=session, budget=0.025, batch_dependent=True)
    assert declared["batch-mates"].outcome == DECLARED
    assert declared["batch-mates"].relative == shown.relative
    assert declared["key-order"].outcome == PASSED  # only what is about the batch is let off
    told = declared["batch-mates"].to_json()
    assert told["passed"] is None
    assert told["relative"] > 0.1
    assert told["max_relative_error"] == 0.025


def test_a_failed_property_fails_the_report_and_its_deviation_is_in_the_json():
    spec = small_spec()
    results = held(spec, session=around(spec, knows_its_place))
    report = VerifyReport("x", (), {}, properties=tuple(results.values()))
    assert not report.passed
    told = {p["name"]: p for p in json.loads(json.dumps(report.to_json(), allow_nan=False))["properties"]}
    assert set(told) == set(NAMES)
    assert told["identical-rows"]["deviation"] == pytest.approx(3e-3, rel=0.01)
    assert told["identical-rows"]["exact"] is False
    assert told["padding-contents"]["exact"] is True
    assert told["no-look-ahead"]["deviation"] is None
