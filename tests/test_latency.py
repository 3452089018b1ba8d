"""The percentile's definition, and how many samples it takes to say one."""

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mha_deploy.latency import Interval, Percentiles, median_interval, nearest_rank, samples_needed


def test_a_bound_on_p99_with_99_percent_confidence_takes_459_samples():
    assert samples_needed(0.99) == 459


@pytest.mark.parametrize(("q", "needed"), [("0.5", 7), ("0.9", 44), ("0.99", 459), ("0.999", 4603)])
def test_the_number_needed_is_the_first_that_reaches_the_confidence(q, needed):
    assert samples_needed(float(q)) == needed
    assert 1 - Fraction(q) ** needed >= Fraction(99, 100) > 1 - Fraction(q) ** (needed - 1)


def test_less_confidence_takes_fewer_samples():
    assert samples_needed(0.99, confidence=0.5) == 69


def test_nine_fives_and_a_thousand_have_a_p90_of_five():
    samples = [5.0] * 9 + [1000.0]
    assert nearest_rank(samples, 0.9) == 5
    assert nearest_rank(samples, 0.91) == 1000


def test_percentiles_are_taken_of_the_merged_samples():
    merged = [10.0] * 1000 + [2000.0] * 10
    assert [nearest_rank(merged, q) for q in (0.95, 0.99, 0.995)] == [10, 10, 2000]


@settings(deadline=None)
@given(
    samples=st.lists(st.floats(0, 1e6), min_size=1, max_size=300),
    q=st.sampled_from(["0.01", "0.5", "0.9", "0.95", "0.99", "0.999", "1"]),
)
def test_the_nearest_rank_is_the_smallest_sample_with_that_share_at_or_below(samples, q):
    def share(value):
        return Fraction(sum(each <= value for each in samples), len(samples))

    enough = [value for value in samples if share(value) >= Fraction(q)]
    assert nearest_rank(samples, float(q)) == min(enough)


@pytest.mark.parametrize(("q", "n"), [(0.07, 100), (0.55, 100)])
def test_a_rank_that_is_a_whole_number_is_not_rounded_up_by_floating_point(q, n):
    assert nearest_rank(range(1, n + 1), q) == round(q * n)


def test_the_order_of_the_samples_does_not_matter_and_they_are_left_alone():
    samples = [3.0, 1.0, 2.0]
    assert nearest_rank(samples, 0.5) == 2
    assert samples == [3.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("count", "said"), [(6, (False, False, False)), (7, (True, False, False)), (43, (True, False, False)),
                        (44, (True, True, False)), (458, (True, True, False)), (459, (True, True, True))]
)  # fmt: skip
def test_a_percentile_is_nan_until_there_are_enough_samples(count, said):
    found = Percentiles.of([1.0] * count)
    assert tuple(not math.isnan(p) for p in (found.p50_ms, found.p90_ms, found.p99_ms)) == said
    assert found.samples == count


def test_no_samples_give_no_percentile():
    assert math.isnan(Percentiles.of([]).p50_ms)


def test_percentiles_of_enough_samples_are_their_nearest_ranks():
    assert Percentiles.of([float(i) for i in range(1, 501)]) == Percentiles(250.0, 450.0, 495.0, 500)


@pytest.mark.parametrize(
    ("n", "rank"), [(8, 1), (11, 1), (12, 2), (20, 4), (40, 12), (100, 37)]
)  # n and the rank of the lower end: tables of the sign test, two-sided 1 %
def test_the_medians_interval_ends_at_the_ranks_of_the_sign_test(n, rank):
    found = median_interval([float(i) for i in range(n, 0, -1)])
    assert found == Interval(rank, n + 1 - rank)


@pytest.mark.parametrize("n", [8, 9, 13, 30])
def test_the_interval_is_the_narrowest_that_holds_the_median_99_times_in_100(n):
    low = median_interval([float(i) for i in range(1, n + 1)]).low

    def outside(rank):
        return 2 * Fraction(sum(math.comb(n, k) for k in range(int(rank))), 2**n)

    assert outside(low) <= Fraction(1, 100) < outside(low + 1)


@pytest.mark.parametrize("n", [0, 1, 7])
def test_seven_values_are_too_few_for_an_interval(n):
    found = median_interval([1.0] * n)
    assert math.isnan(found.low)
    assert 1.0 not in found
    assert found.to_json() == [None, None]
