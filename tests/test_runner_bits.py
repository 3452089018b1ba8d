"""Answers through the runner, many callers at once, are bit for bit those of a session of their own."""

import asyncio
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mha_deploy.ragged import Request
from mha_deploy.runner import BatchRunner, RunnerOptions
from mha_deploy.sessions import Placement

CALLERS = 4


def runner_over(bundle, **options):
    def open_session(threads):
        return bundle.open_session("", Placement(threads=threads))

    return BatchRunner(open_session, bundle.spec, RunnerOptions(workers=2, threads=1, **options))


def random_request(spec, random, q_len, kv_len, holes):
    if spec.kind == "self":
        kv_len = q_len
    tensors = {
        tensor.name: random.standard_normal(
            (q_len if tensor.shape[1] == spec.query_axis else kv_len, tensor.shape[-1]), dtype=np.float32
        )
        for tensor in spec.signature.inputs
        if tensor.is_float
    }
    mask = random.random(kv_len) > 0.3 if holes else np.zeros(0, bool)
    return Request(tensors, q_len, kv_len, mask)


def solo(session, request):
    mask = request.mask if request.mask.size else np.ones(request.kv_len, bool)
    return session.run({name: array[None] for name, array in request.tensors.items()} | {"mask": mask[None]})


def answered(runner, requests):
    """Answers of requests that callers on several threads, and on an event loop, submit at once."""
    answers, barrier = [None] * len(requests), threading.Barrier(CALLERS)

    def caller(first):
        barrier.wait()
        futures = [(i, runner.submit(requests[i])) for i in range(first, len(requests), CALLERS)]
        for i, future in futures:
            answers[i] = future.result(20)

    async def on_a_loop(first):
        async def one(i):
            answers[i] = await runner.submit_async(requests[i], timeout_s=20)

        await asyncio.gather(*(one(i) for i in range(first, len(requests), CALLERS)))

    def loop(first):
        barrier.wait()
        asyncio.run(on_a_loop(first))

    threads = [threading.Thread(target=caller, args=(first,)) for first in range(CALLERS - 1)]
    threads.append(threading.Thread(target=loop, args=(CALLERS - 1,)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


lengths = st.lists(
    st.tuples(st.sampled_from([1, 2, 3, 7, 16, 33]), st.sampled_from([1, 5, 16]), st.booleans()),
    min_size=1,
    max_size=60,
)


@pytest.mark.parametrize("kind", ["self", "cross"])
def test_answers_do_not_depend_on_batch_mates(kind, small_bundle, cross_bundle):
    bundle = small_bundle if kind == "self" else cross_bundle
    shared = set()
    with runner_over(bundle) as runner, bundle.open_session("", Placement(threads=1)) as session:

        @settings(deadline=None, max_examples=25)
        @given(lengths=lengths, seed=st.integers(0, 1000))
        def check(lengths, seed):
            random = np.random.default_rng(seed)
            requests = [random_request(bundle.spec, random, *each) for each in lengths]
            for answer, request in zip(answered(runner, requests), requests, strict=True):
                np.testing.assert_array_equal(answer.y, solo(session, request)["y"][0])
                shared.add(answer.batch_size)

        check()
        assert runner.snapshot().padded_tokens == 0
    assert max(shared) > 1  # or nothing was shown


def test_fast_mode_agrees_within_a_millionth_of_the_largest_answer(small_bundle, random):
    lengths = random.integers(1, 12, 200).tolist()
    requests = [random_request(small_bundle.spec, random, each, each, False) for each in lengths]
    with runner_over(small_bundle, mode="fast") as runner:
        answers = [future.result(20) for future in runner.submit_all(requests)]
        assert runner.snapshot().padded_tokens > 0
    with small_bundle.open_session("", Placement(threads=1)) as session:
        for answer, request in zip(answers, requests, strict=True):
            right = solo(session, request)["y"][0]
            np.testing.assert_allclose(answer.y, right, rtol=0, atol=1e-6 * abs(right).max())
