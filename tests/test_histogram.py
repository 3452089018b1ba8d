"""Histograms: within one per cent of the exact percentiles, merged and never averaged, windowed."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mha_deploy.latency import nearest_rank
from mha_deploy.runner import Histogram
from mha_deploy.runner.histogram import WINDOW_S, Recording, WindowedRecordings

durations = st.lists(st.floats(1.0, 100e6), min_size=1, max_size=200)


def recorded(samples):
    recording = Recording()
    for us in samples:
        recording.record(us)
    return recording.taken()


@settings(deadline=None)
@given(samples=durations, q=st.sampled_from([0.01, 0.07, 0.5, 0.9, 0.95, 0.99, 0.999, 1.0]))
def test_percentiles_are_within_one_per_cent_of_the_exact_nearest_rank(samples, q):
    exact = nearest_rank(samples, q)
    assert abs(recorded(samples).percentile_us(q) - exact) <= 0.01 * exact


@settings(deadline=None)
@given(us=st.floats(1.0, 100e6))
def test_a_single_duration_is_reported_exactly(us):
    taken = recorded([us])
    assert (taken.percentile_us(0.5), taken.min_us, taken.max_us, taken.sum_us) == (us, us, us, us)


@settings(deadline=None)
@given(parts=st.lists(durations, min_size=1, max_size=4))
def test_merged_parts_are_the_histogram_of_all_samples(parts):
    merged = Histogram.merged(recorded(part) for part in parts)
    whole = recorded([us for part in parts for us in part])
    assert (merged.buckets, merged.count, merged.max_us) == (whole.buckets, whole.count, whole.max_us)
    assert merged.sum_us == pytest.approx(whole.sum_us)


def test_percentiles_of_two_workers_are_those_of_their_merged_samples_not_an_average():
    merged = Histogram.merged([recorded([10e3] * 1000), recorded([2e6] * 10)])
    found = [merged.percentile_us(q) for q in (0.95, 0.99, 0.995)]
    assert found == pytest.approx([10e3, 10e3, 2e6], rel=0.01)


def test_latency_from_the_scheduled_start_shows_the_requests_that_a_stall_held_up():
    # One request a millisecond, 0.1 ms of service, the first stalls for 10 ms, one worker.
    free, service, scheduled = 0.0, Recording(), Recording()
    for number in range(100):
        intended = float(number)
        begin, took = max(intended, free), 10.0 if number == 0 else 0.1
        free = begin + took
        service.record((free - begin) * 1e3)
        scheduled.record((free - intended) * 1e3)
    found = [scheduled.taken().percentile_us(q) for q in (0.9, 0.95, 0.99)]
    assert found == pytest.approx([1.0e3, 5.5e3, 9.1e3], rel=0.01)
    assert [service.taken().percentile_us(q) for q in (0.9, 0.95, 0.99)] == pytest.approx([100] * 3, rel=0.01)


def test_a_duration_recorded_several_times_counts_so_often():
    recording = Recording()
    recording.record(5.0, 3)
    assert (recording.taken().count, recording.taken().sum_us) == (3, 15.0)


def test_durations_beyond_the_range_are_counted_and_the_largest_kept():
    taken = recorded([1e12, 0.0])
    assert (taken.count, taken.max_us, taken.percentile_us(1.0) >= 100e6) == (2, 1e12, True)


def test_an_empty_histogram_has_no_percentile():
    assert math.isnan(Histogram().percentile_us(0.5))
    assert Histogram().at_or_below([math.inf]) == [0]


def test_counts_at_or_below_bounds_grow_to_all():
    taken = recorded([10.0, 100.0, 1000.0, 1000.0])
    assert taken.at_or_below([1.0, 10.0, 500.0, 1000.0, math.inf]) == [0, 1, 2, 4, 4]


@settings(deadline=None)
@given(samples=st.lists(st.floats(1.0, 1e6), min_size=40, max_size=100))
def test_an_interval_holds_its_percentile(samples):
    taken = recorded(samples)
    low, high = taken.interval_us(0.5)
    assert low <= taken.percentile_us(0.5) <= high


def test_too_few_samples_have_no_upper_bound_for_a_high_percentile():
    assert math.isnan(recorded([1.0] * 50).interval_us(0.999)[1])


def test_the_window_forgets_what_the_total_keeps():
    recordings = WindowedRecordings(["a", "b"])
    for second in range(30):
        recordings.at(second + 0.5)[1].record(1000.0 + second)
    window = recordings.window(29.9)["b"]
    assert (window.count, window.min_us, window.max_us) == (WINDOW_S, 1020.0, 1029.0)
    assert (recordings.total()["b"].count, recordings.total()["a"].count) == (30, 0)
    assert recordings.window(29.9 + WINDOW_S)["b"].count == 0


def test_a_pause_longer_than_the_window_loses_nothing_of_the_total():
    recordings = WindowedRecordings(["a"])
    recordings.at(0.0)[0].record(1.0)
    recordings.at(1000.0)[0].record(2.0)
    assert (recordings.total()["a"].count, recordings.window(1000.0)["a"].count) == (2, 1)
