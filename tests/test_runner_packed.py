"""The runner over a packed artifact: requests of any lengths share a run, and nothing is padded for it."""

import json

import numpy as np
import pytest
from conftest import small_spec
from hypothesis import given, settings
from hypothesis import strategies as st
from runner_blocks import Cheap, counted
from serving import ask, infer_request, serving
from test_runner_bits import answered, random_request, solo

from mha_deploy.pipeline import export
from mha_deploy.ragged import Request
from mha_deploy.runner import BatchRunner, RunnerOptions
from mha_deploy.runner.calibration import FOLDER, calibrated
from mha_deploy.sessions import DEFAULT_PLACEMENT, Placement
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
def bundle(request, own, tmp_path_factory):
    if request.param == "self":
        return own
    return export(SPECS[request.param], tmp_path_factory.mktemp("packed") / "bundle", layout="packed")


def runner_over(bundle, model=None, **options):
    def open_session(threads):
        return bundle.open_session("packed", Placement(threads=threads))

    return BatchRunner(open_session, bundle.spec, RunnerOptions(threads=1, **options), model)


lengths = st.lists(
    st.tuples(st.integers(1, 64), st.sampled_from([1, 5, 16, 64]), st.booleans()), min_size=1, max_size=40
)


def test_any_mix_of_lengths_is_answered_as_each_alone_without_a_padded_token(bundle):
    shared, spec, tokens = set(), bundle.spec, 0
    # Two workers, callers of all kinds at once; `Cheap` makes everything that can share a run do so.
    with (
        runner_over(bundle, Cheap(spec, {}), workers=2, mode="fast") as runner,
        bundle.open_session("canonical", ONE) as session,
    ):

        @settings(deadline=None, max_examples=8)
        @given(lengths=lengths, seed=st.integers(0, 1000))
        def check(lengths, seed):
            nonlocal tokens
            random = np.random.default_rng(seed)
            holes = spec.mask == "padding"
            requests = [random_request(spec, random, q, kv, holes and h) for q, kv, h in lengths]
            for answer, request in zip(answered(runner, requests), requests, strict=True):
                right = padded_solo(spec, session, request)
                np.testing.assert_allclose(answer.y, right, rtol=0, atol=1e-6 * abs(right).max())
                shared.add((answer.batch, request.q_len, request.kv_len))
            tokens += sum(request.tokens(spec) for request in requests)

        check()
        seen = runner.snapshot()
        assert counted(runner) == {"answered": seen.received}
    assert (seen.tokens, seen.padded_tokens) == (tokens, 0)
    batches = [batch for batch, *_ in shared]
    assert len(batches) > len(set(batches))  # some runs held several lengths, or nothing was shown


def padded_solo(spec, session, request):
    if spec.mask == "padding":
        return solo(session, request)["y"][0]
    return session.run({name: array[None] for name, array in request.tensors.items()})["y"][0]


def test_exact_mode_puts_equal_lengths_only_into_a_run_bit_for_bit(bundle, random):
    spec = bundle.spec
    requests = [random_request(spec, random, *pair, False) for pair in [(5, 5), (9, 9), (5, 5), (1, 1)] * 6]
    with runner_over(bundle, Cheap(spec, {}), workers=1) as runner:
        alone = [runner.submit(request).result(20).y for request in requests]
        together = [future.result(20) for future in runner.submit_all(requests)]
    for answer, y in zip(together, alone, strict=True):
        np.testing.assert_array_equal(answer.y, y)
    lengths_of = {}
    for answer, request in zip(together, requests, strict=True):
        lengths_of.setdefault(answer.batch, set()).add(request.q_len)
    assert all(len(lengths) == 1 for lengths in lengths_of.values())
    assert max(answer.batch_size for answer in together) > 1


def test_what_hangs_behind_a_mask_reaches_nobody_in_a_shared_run(own, random):
    clean = random_request(own.spec, random, 7, 7, True)
    dirty = Request({"x": clean.tensors["x"].copy()}, 7, 7, clean.mask)
    dirty.tensors["x"][~clean.mask] = np.nan
    with runner_over(own, Cheap(own.spec, {}), workers=1, mode="fast") as runner:
        first, second = (future.result(20) for future in runner.submit_all([clean, dirty]))
    assert first.batch == second.batch
    np.testing.assert_array_equal(second.y, first.y)


def test_a_request_beyond_the_range_is_refused_though_a_packed_graph_would_hold_its_tokens(own, random):
    with runner_over(own) as runner, pytest.raises(Exception, match=r"seq = 65; this block takes seq 1..64"):
        runner.submit(random_request(own.spec, random, 65, 65, False))


def test_calibration_measures_what_packing_saves_and_what_mixed_lengths_change(own):
    found = calibrated(own, "packed", ONE, RunnerOptions(workers=1, threads=1))
    assert 0 <= found.model.slack <= 1
    assert 0 <= found.mixed_drift <= 1e-6
    (path,) = (own.folder / FOLDER).glob("packed-*.json")
    stored = json.loads(path.read_text())
    assert (stored["cost_model"]["slack"], stored["mixed_drift"]) == (found.model.slack, found.mixed_drift)
    assert calibrated(own, "canonical", ONE, RunnerOptions(workers=1, threads=1)).model.slack == 1


def test_a_runner_over_a_packed_artifact_serves_it_natively(own, random):
    options = RunnerOptions(workers=1, threads=1, mode="fast")
    requests = [random_request(own.spec, random, n, n, False) for n in (3, 64, 1, 9)]
    with BatchRunner.over(own, "packed", placement=DEFAULT_PLACEMENT, options=options) as runner:
        assert runner.signature == own.signature
        answers = [future.result(20) for future in runner.submit_all(requests)]
        seen = runner.snapshot()
    with own.open_session("canonical", ONE) as session:
        for answer, request in zip(answers, requests, strict=True):
            right = solo(session, request)["y"][0]
            np.testing.assert_allclose(answer.y, right, rtol=0, atol=1e-6 * abs(right).max())
    assert (seen.name, seen.tokens, seen.padded_tokens) == ("packed", 77, 0)


def test_a_ragged_batch_is_served_from_a_packed_artifact(own, random):
    x = random.standard_normal((4, 20, 32), dtype=np.float32)
    mask = np.arange(20) < np.array([20, 3, 11, 1])[:, None]
    with (
        runner_over(own, Cheap(own.spec, {}), workers=1, mode="fast") as runner,
        serving(runner) as server,
    ):
        y = ask(server.port, infer_request(x, mask)).y
        seen = runner.snapshot()
    with own.open_session("canonical", ONE) as session:
        right = session.run({"x": x, "mask": mask})["y"]
    right[~mask] = 0
    np.testing.assert_allclose(y, right, rtol=0, atol=1e-6 * abs(right).max())
    assert (seen.tokens, seen.padded_tokens) == (35, 0)
