"""The runner over a packed artifact: requests of any lengths share a run, and nothing is padded for it."""

import json
import time

import numpy as np
import pytest
from conftest import small_spec
from hypothesis import given, settings
from hypothesis import strategies as st
from runner_blocks import SELF, Cheap, counted
from serving import ask, infer_request, serving
from test_packed_session import Opened
from test_runner_bits import answered, random_request, solo

from mha_deploy.errors import FeedError
from mha_deploy.packed import graph_signature
from mha_deploy.pipeline import export
from mha_deploy.ragged import Request
from mha_deploy.runner import BatchRunner, RunnerOptions
from mha_deploy.runner.calibration import FOLDER, calibrate, calibrated
from mha_deploy.sessions import DEFAULT_PLACEMENT, Placement
from mha_deploy.sessions.fake import FakeSession
from mha_deploy.sessions.packed import PackedSession
from mha_deploy.signature import Dim

ONE = Placement(threads=1)
CROSS_DIMS = (Dim("batch", 1, 2, 6), Dim("q_len", 1, 8, 64), Dim("kv_len", 1, 8, 64))
SPECS = {
    "self": small_spec(),
    "cross": small_spec(name="cross", kind="cross", causal=True, kdim=20, vdim=24, dims=CROSS_DIMS),
    "unmasked": small_spec(name="unmasked", causal=True, mask="none", norm="pre"),
}


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """One to calibrate in."""
    return export(SPECS["self"], tmp_path_factory.mktemp("own") / "bundle", layout="packed")


@pytest.fixture(scope="module", params=SPECS)
def block(request, tmp_path_factory):
    return Opened(SPECS[request.param], tmp_path_factory.mktemp("packed"))


def runner_over(block, **options):
    """`Cheap` makes everything that can share a run do so."""

    def open_session(_threads):
        return PackedSession(block.graph(), block.spec)

    return BatchRunner(open_session, block.spec, RunnerOptions(**options), Cheap(block.spec, {}))


def close(answer, right):
    np.testing.assert_allclose(answer, right, rtol=0, atol=1e-6 * abs(right).max())


def drawn(block, random, lengths):
    return [random_request(block.spec, random, q, kv, holes) for q, kv, holes in lengths]


lengths = st.lists(
    st.tuples(st.integers(1, 64), st.sampled_from([1, 5, 16, 64]), st.booleans()), min_size=1, max_size=40
)


def test_any_mix_of_lengths_is_answered_as_each_alone_without_a_padded_token(block):
    shared, tokens, may_hide = set(), 0, block.spec.mask == "padding"
    with runner_over(block, workers=2, mode="fast") as runner:

        @settings(deadline=None, max_examples=15)
        @given(lengths=lengths, seed=st.integers(0, 1000))
        def check(lengths, seed):
            nonlocal tokens
            lengths = [(q, kv, may_hide and holes) for q, kv, holes in lengths]
            requests = drawn(block, np.random.default_rng(seed), lengths)
            for answer, request in zip(answered(runner, requests), requests, strict=True):
                close(answer.y, block.alone(request))
                shared.add((answer.batch, request.q_len, request.kv_len))
            tokens += sum(request.tokens(block.spec) for request in requests)

        check()
        seen = runner.snapshot()
        assert counted(runner) == {"answered": seen.received}
    assert (seen.tokens, seen.padded_tokens) == (tokens, 0)
    batches = [batch for batch, *_ in shared]
    assert len(batches) > len(set(batches))  # some runs held several lengths, or nothing was shown


def test_exact_mode_puts_equal_lengths_only_into_a_run_bit_for_bit(block, random):
    requests = drawn(block, random, [(5, 5, False), (9, 9, False), (5, 5, False), (1, 1, False)] * 2)
    with runner_over(block) as runner:
        alone = [runner.submit(request).result(20).y for request in requests]
        together = [future.result(20) for future in runner.submit_all(requests)]
    for answer, y in zip(together, alone, strict=True):
        np.testing.assert_array_equal(answer.y, y)
    lengths_of = {}
    for answer, request in zip(together, requests, strict=True):
        lengths_of.setdefault(answer.batch, set()).add(request.q_len)
    assert all(len(lengths) == 1 for lengths in lengths_of.values())
    assert max(answer.batch_size for answer in together) > 1


@pytest.mark.parametrize("block", ["self", "cross"], indirect=True)
def test_what_a_mask_hides_reaches_nobody_in_a_shared_run(block, random):
    clean = random_request(block.spec, random, 7, 7, True)
    hidden = {name: array.copy() for name, array in clean.tensors.items() if name != "query"}
    for array in hidden.values():
        array[~clean.mask] = np.nan
    dirty = Request({**clean.tensors, **hidden}, 7, 7, clean.mask)
    with runner_over(block, mode="fast") as runner:
        first, second = (future.result(20) for future in runner.submit_all([clean, dirty]))
    assert first.batch == second.batch
    np.testing.assert_array_equal(second.y, first.y)


def test_a_request_beyond_the_range_is_refused_though_there_is_room_for_its_tokens(block, random):
    axis = block.spec.query_axis
    with runner_over(block) as runner, pytest.raises(FeedError, match=rf"{axis} = 65; .* {axis} 1..64"):
        runner.submit(random_request(block.spec, random, 65, 65, False))


def test_calibration_measures_what_packing_saves_and_what_mixed_lengths_change(own):
    found = calibrated(own, "packed", ONE, RunnerOptions(workers=1, threads=1))
    assert 0 <= found.model.slack <= 1
    assert 0 <= found.mixed_drift <= 1e-6
    (path,) = (own.folder / FOLDER).glob("packed-*.json")
    stored = json.loads(path.read_text())
    assert (stored["cost_model"]["slack"], stored["mixed_drift"]) == (found.model.slack, found.mixed_drift)
    assert calibrated(own, "canonical", ONE, RunnerOptions(workers=1, threads=1)).model.slack == 1


@pytest.mark.parametrize(("by", "low", "high"), [("x", 0.0, 0.4), ("index", 0.6, 1.0)])
def test_calibration_sees_whether_a_run_takes_its_tokens_time_or_its_positions(by, low, high):
    def run(feeds):
        time.sleep(0.0005 * feeds[by].shape[0] * (feeds[by].shape[1] if by == "index" else 1))
        return {"y": feeds["x"]}

    def open_session(_threads):
        return PackedSession(FakeSession(graph_signature(SELF), run), SELF)

    found = calibrate(open_session, SELF, RunnerOptions(workers=1, threads=1), cores=1)
    assert low <= found.model.slack <= high
    assert (found.drift, found.mixed_drift) == (0, 0)


def test_a_runner_over_a_packed_artifact_serves_it_natively(own, random):
    options = RunnerOptions(workers=1, threads=1, mode="fast")
    requests = [random_request(own.spec, random, n, n, False) for n in (3, 64, 1, 9)]
    with BatchRunner.over(own, "packed", placement=DEFAULT_PLACEMENT, options=options) as runner:
        assert runner.signature == own.signature
        answers = [future.result(20) for future in runner.submit_all(requests)]
        seen = runner.snapshot()
    with own.open_session("canonical", ONE) as session:
        for answer, request in zip(answers, requests, strict=True):
            close(answer.y, solo(session, request)["y"][0])
    assert (seen.name, seen.tokens, seen.padded_tokens) == ("packed", 77, 0)


def test_a_ragged_batch_is_served_from_a_packed_artifact(own, random):
    x = random.standard_normal((4, 20, 32), dtype=np.float32)
    mask = np.arange(20) < np.array([20, 3, 11, 1])[:, None]
    options = RunnerOptions(workers=1, threads=1, mode="fast")
    with BatchRunner.over(own, "packed", placement=ONE, options=options) as runner, serving(runner) as server:
        y = ask(server.port, infer_request(x, mask)).y
        seen = runner.snapshot()
    with own.open_session("canonical", ONE) as session:
        right = session.run({"x": x, "mask": mask})["y"]
    right[~mask] = 0
    close(y, right)
    assert (seen.tokens, seen.padded_tokens) == (35, 0)
