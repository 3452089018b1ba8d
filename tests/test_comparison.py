"""Which of two is faster: how often the answer is wrong, and that differences are found."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from measured import FakeMachine, samples

from mha_deploy.benchmark import Comparison, Estimate, Schedule, compare, measure
from mha_deploy.benchmark.comparison import _rank_sum_counts, _signed_rank_counts, compare_apart
from mha_deploy.errors import BenchError
from mha_deploy.latency import Interval

RECORDED = json.loads((Path(__file__).parent / "recorded" / "one_thing_twice.json").read_text())
TIMES = 100


def heavy_tails(random):
    return lambda _: 1 + 0.1 * random.pareto(1.1)


def drift(random):
    slope = random.uniform(0.05, 0.1)
    return lambda now: (1 + slope * now) * random.lognormal(0, 0.01)


def correlated(random):
    """Disturbances that last for some runs, a round or several."""
    state = [0.0]

    def slows(now):
        state[0] = 0.98 * state[0] + random.normal(0, 0.05)
        return math.exp(state[0])

    return slows


def bimodal(random):
    """Two speeds, each kept for a while: a neighbour that comes and goes."""
    state = [1.0, 0.0]

    def slows(now):
        if now > state[1]:
            state[:] = [1.0 if state[0] > 1 else 1.6, now + random.exponential(0.4)]
        return state[0] * random.lognormal(0, 0.02)

    return slows


def play(noise, seed, *, ratio=1.0, rounds=20):
    """A comparison of a thing with itself, or with one that takes `ratio` times as long."""
    machine = FakeMachine(noise(np.random.default_rng(seed)))
    turns = [machine.turn("a", 5), machine.turn("b", 5 * ratio)]
    schedule = Schedule(seconds=0.4, rounds=rounds, warm_up_runs=0, seed=seed)
    taken = measure(turns, schedule, clock=machine.clock)
    return compare(taken["a"], taken["b"])


def replay(record, seed, *, ratio=1.0, rounds=20):
    """The same on samples of this machine, from a stretch of rounds; the coins are tossed again.

    A round's two turns are exchangeable but for the coin that named them: one session, opened twice.
    """
    random = np.random.default_rng(seed)
    start = random.integers(len(record["a"]) - rounds)
    pairs = [
        (one, two) if random.random() < 0.5 else (two, one)
        for one, two in zip(record["a"], record["b"], strict=True)
    ][start : start + rounds]
    a, b = zip(*pairs, strict=True)
    return compare(samples("a", *map(list, a)), samples("b", *([ratio * x for x in r] for r in b)))


@pytest.mark.parametrize("noise", [heavy_tails, drift, correlated, bimodal])
def test_the_same_against_itself_is_called_different_five_times_in_a_hundred_at_most(noise):
    wrong = sum(play(noise, seed).answer == "different" for seed in range(TIMES))
    assert wrong <= 5


@pytest.mark.parametrize("record", RECORDED)
def test_one_session_opened_twice_is_called_different_five_times_in_a_hundred_at_most(record):
    wrong = sum(replay(RECORDED[record], seed).answer == "different" for seed in range(TIMES))
    assert wrong <= 5


@pytest.mark.parametrize("record", RECORDED)
def test_as_recorded_one_session_opened_twice_is_not_called_different(record):
    whole = RECORDED[record]
    answers = [
        compare(
            samples("a", *map(list, whole["a"][i : i + 20])), samples("b", *map(list, whole["b"][i : i + 20]))
        ).answer
        for i in range(0, len(whole["a"]) - 19, 20)
    ]
    assert len(answers) >= 15
    assert answers.count("different") <= 1


@pytest.mark.parametrize("noise", [heavy_tails, drift, correlated, bimodal])
def test_ten_percent_more_time_is_found(noise):
    found = [play(noise, seed, ratio=1.1, rounds=40) for seed in range(20)]
    assert sum(each.answer == "different" and each.estimate.ratio > 1 for each in found) >= 15


@pytest.mark.parametrize("record", RECORDED)
def test_ten_percent_more_time_is_found_among_recorded_samples(record):
    found = [replay(RECORDED[record], seed, ratio=1.1, rounds=40) for seed in range(20)]
    assert sum(each.answer == "different" and each.estimate.ratio > 1 for each in found) >= 15


def test_samples_of_one_round_count_as_one():
    """A hundred samples of one disturbance say no more than one of them."""
    random = np.random.default_rng(0)
    rounds = [(random.lognormal(0, 0.2), random.lognormal(0, 0.2)) for _ in range(12)]
    few = compare(*(samples(str(i), *(r[i] for r in rounds)) for i in (0, 1)))
    many = compare(*(samples(str(i), *([r[i]] * 100 for r in rounds)) for i in (0, 1)))
    assert few.estimate == many.estimate


@pytest.mark.parametrize(
    ("low", "high", "answer"),
    [
        (1.01, 1.2, "different"),
        (0.8, 0.99, "different"),
        (1.001, 1.002, "different"),
        (0.97, 1.03, "no difference"),
        (1.0, 1.01, "no difference"),
        (0.96, 1.01, "inconclusive"),
        (0.99, 1.04, "inconclusive"),
        (0.5, 2.0, "inconclusive"),
    ],
)
def test_the_answer_is_read_off_the_interval(low, high, answer):
    one = samples("a", 1)
    assert Comparison(one, one, Estimate(1.0, Interval(low, high))).answer == answer


def test_the_ratio_and_its_interval_are_hodges_and_lehmanns():
    logs = [-0.3, 0.1, 0.2, 0.4, 0.5, 0.6, 0.7, 1.1]
    found = compare(samples("a", *[1] * 8), samples("b", *map(math.exp, logs))).estimate
    walsh = [(x + y) / 2 for i, x in enumerate(logs) for y in logs[i:]]
    assert math.log(found.ratio) == pytest.approx(np.median(walsh))
    # 8 rounds at 99 %: one choice of signs in 256 has the smallest sum of ranks, two the two smallest.
    assert (found.interval.low, found.interval.high) == pytest.approx((math.exp(-0.3), math.exp(1.1)))


def test_the_interval_excludes_one_just_where_the_signed_rank_test_rejects():
    random = np.random.default_rng(3)
    for _ in range(200):
        logs = random.normal(0.25, 0.4, 10)
        ranks = np.abs(logs).argsort().argsort() + 1
        statistic = min(ranks[logs > 0].sum(), ranks[logs < 0].sum())
        sums = [sum(r for r, s in zip(range(1, 11), signs, strict=True) if s) for signs in SIGNS]
        p = 2 * np.mean(np.array(sums) <= statistic)
        answer = compare(samples("a", *[1] * 10), samples("b", *np.exp(logs))).answer
        assert (answer == "different") == (p <= 0.01)


SIGNS = list(itertools.product((0, 1), repeat=10))


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_signed_ranks_are_counted_as_they_are_when_listed(n):
    sums = [
        sum(rank for rank, sign in zip(range(1, n + 1), signs, strict=True) if sign)
        for signs in itertools.product((0, 1), repeat=n)
    ]
    assert _signed_rank_counts(n) == [sums.count(k) for k in range(n * (n + 1) // 2 + 1)]


@pytest.mark.parametrize(("m", "n"), [(1, 1), (2, 3), (4, 3), (4, 4)])
def test_rank_sums_are_counted_as_they_are_when_listed(m, n):
    orders = itertools.combinations(range(m + n), m)
    found = [sum(order) - m * (m - 1) // 2 for order in orders]
    assert _rank_sum_counts(m, n) == [found.count(k) for k in range(m * n + 1)]


@settings(deadline=None, max_examples=50)
@given(
    logs=st.lists(st.floats(-1, 1), min_size=8, max_size=20),
    factor=st.floats(0.5, 2),
)
def test_a_slower_second_scales_the_ratio_and_its_interval(logs, factor):
    a, b = samples("a", *[1] * len(logs)), [math.exp(log) for log in logs]
    found = compare(a, samples("b", *b)).estimate
    scaled = compare(a, samples("b", *(factor * value for value in b))).estimate
    swapped = compare(samples("b", *b), a).estimate
    assert found.interval.low <= found.ratio <= found.interval.high
    assert scaled.ratio == pytest.approx(factor * found.ratio)
    assert scaled.interval.low == pytest.approx(factor * found.interval.low)
    assert swapped.interval.high == pytest.approx(1 / found.interval.low)


def test_too_few_rounds_give_no_answer():
    one = samples("a", *[1] * 7)
    with pytest.raises(BenchError, match="7 rounds; a 99% interval takes 8 or more: ask for more rounds"):
        compare(one, one)


def test_rounds_that_are_not_the_same_are_not_compared():
    with pytest.raises(BenchError, match="a has 8 rounds and b 9; expected two turns of the same rounds"):
        compare(samples("a", *[1] * 8), samples("b", *[1] * 9))


def test_measurements_at_different_times_are_compared_by_rank_sums():
    random = np.random.default_rng(0)
    hits = 0
    for _ in range(300):
        a, b = random.lognormal(0, 0.1, 8), 1.2 * random.lognormal(0, 0.1, 8)
        found = compare_apart(a, b)
        assert found.interval.low <= found.ratio <= found.interval.high
        hits += 1.2 in found.interval
    assert hits >= 291


def test_too_few_rounds_at_different_times_give_no_interval():
    assert math.isnan(compare_apart([1.0] * 3, [1.0] * 3).interval.low)
