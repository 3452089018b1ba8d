"""What a load run will send: when, of which length, and what is refused before anything is sent."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mha_deploy.errors import InputError
from mha_deploy.load import Arrivals, closed_plan, open_plan, parse_lengths, trace_plan

TEN = parse_lengths("fixed:10")


def gaps(kind, **options):
    return np.diff(Arrivals(kind, 100.0, **options).times_s(20_000, np.random.default_rng(0)))


def test_constant_arrivals_are_evenly_spaced():
    assert Arrivals("constant", 4.0).times_s(4, np.random.default_rng(0)).tolist() == [0.0, 0.25, 0.5, 0.75]


@pytest.mark.parametrize(("kind", "spread"), [("poisson", 1.0), ("burst", 2.0)])
def test_random_arrivals_keep_the_rate_and_have_their_own_spread(kind, spread):
    found = gaps(kind)
    assert found.mean() == pytest.approx(0.01, rel=0.05)
    assert found.std() / found.mean() == pytest.approx(spread, rel=0.1)
    assert found.min() >= 0


def test_a_burst_of_shape_one_is_poisson():
    assert gaps("burst", burst_shape=1.0).tolist() == gaps("poisson").tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("uniform", 1.0), "arrivals 'uniform'; expected one of poisson, constant, burst"),
        (("poisson", 0.0), "rate 0.0; expected more than 0"),
        (("poisson", float("inf")), "rate inf; expected more than 0"),
        (("burst", 1.0, 1.5), "burst shape 1.5; expected more than 0 and at most 1"),
    ],
)
def test_impossible_arrivals_are_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        Arrivals(*arguments)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(2, 400), st.floats(0.05, 0.95), st.floats(0.2, 1.5), st.integers(0, 9))
def test_log_normal_lengths_have_the_mean_and_the_bounds_that_were_asked_for(low, span, at, sigma, seed):
    high = low + span
    mean = low + at * span
    lengths = parse_lengths(f"lognormal:{mean}:{low}:{high}:{sigma}")
    assert lengths.mean == pytest.approx(mean, rel=1e-6)
    drawn = lengths.draw(50, np.random.default_rng(seed))
    assert low <= drawn.min() <= drawn.max() <= high


def test_uniform_lengths_are_all_as_likely():
    lengths = parse_lengths("uniform:3:6")
    assert lengths.values == (3, 4, 5, 6)
    assert lengths.weights == (0.25,) * 4


def test_lengths_from_a_file_keep_their_shares(tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_text("5\n9\n5\n5\n")
    lengths = parse_lengths(f"file:{path}")
    assert (lengths.values, lengths.weights) == ((5, 9), (0.75, 0.25))


@pytest.mark.parametrize(
    "text",
    [
        "27",
        "fixed:0",
        "fixed:2.5",
        "fixed:x",
        "uniform:5:2",
        "lognormal:27:2",
        "lognormal:1:2:160",
        "lognormal:27:2:160:0",
        "lognormal:27:2:160:1e200",
        "lognormal:27:2:160:1e-200",
        "lognormal:27:2:160:nan",
        "lognormal:27:2:inf",
        "lognormal:nan:2:160",
        "fixed:inf",
        "fixed:nan",
        "fixed:1e300",
        "uniform:1:1e9",
        "zipf:3",
    ],
)
def test_lengths_of_another_form_are_refused(text):
    with pytest.raises(InputError, match="expected fixed:N, uniform:LOW:HIGH, lognormal:MEAN:LOW:HIGH"):
        parse_lengths(text)


def test_a_lengths_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InputError, match="cannot read the lengths"):
        parse_lengths(f"file:{tmp_path}/none")


@pytest.mark.parametrize("line", ["inf", "nan", "1e300"])
def test_a_length_in_a_file_that_is_no_length_is_refused(tmp_path, line):
    path = tmp_path / "lengths.txt"
    path.write_text(f"5\n{line}\n")
    with pytest.raises(InputError, match="lengths being whole and from 1 to 1048576"):
        parse_lengths(f"file:{path}")


def test_the_same_seed_gives_the_same_plan_and_another_seed_another():
    lengths = parse_lengths("uniform:1:500")
    plans = [open_plan(Arrivals("poisson", 10.0), lengths, 20, seed) for seed in (1, 1, 2)]
    assert plans[0].at_s.tolist() == plans[1].at_s.tolist()
    assert plans[0].lengths.tolist() == plans[1].lengths.tolist()
    assert plans[0].at_s.tolist() != plans[2].at_s.tolist()
    assert plans[0].lengths.tolist() != plans[2].lengths.tolist()


def test_open_and_closed_loop_of_one_seed_send_the_same_lengths():
    lengths = parse_lengths("uniform:1:500")
    opened = open_plan(Arrivals("poisson", 10.0), lengths, 20, 3)
    assert closed_plan(2, lengths, 20, 3).lengths.tolist() == opened.lengths.tolist()


def test_a_plan_without_requests_is_refused():
    with pytest.raises(InputError, match="0 requests; expected at least 1"):
        open_plan(Arrivals("poisson", 10.0), TEN, 0)
    with pytest.raises(InputError, match="0 requests at a time; expected at least 1"):
        closed_plan(0, TEN, 5)


def test_a_plan_of_too_many_requests_or_of_more_than_a_year_is_refused():
    with pytest.raises(InputError, match="requests; expected at least 1 and at most 100000000"):
        open_plan(Arrivals("poisson", 10.0), TEN, 10**30)
    for arrivals in (Arrivals("constant", 1e-320), Arrivals("burst", 1e-200, 1e-200)):
        with pytest.raises(InputError, match=r"the last request is due after .* s; at most a year may be"):
            open_plan(arrivals, TEN, 2)


def test_a_trace_is_replayed_in_the_order_of_its_times(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"at_s": 0.5, "length": 7}\n\n{"at_s": 0, "length": 3}\n')
    plan = trace_plan(path)
    assert plan.at_s.tolist() == [0.0, 0.5]
    assert plan.lengths.tolist() == [3, 7]


@pytest.mark.parametrize(
    "line",
    [
        "0.5 7",
        "[0.5, 7]",
        '{"at_s": 0.5}',
        '{"at_s": -1, "length": 7}',
        '{"at_s": NaN, "length": 7}',
        '{"at_s": true, "length": 7}',
        '{"at_s": 1, "length": 7.5}',
        '{"at_s": 1, "length": 0}',
        '{"at_s": "1", "length": 7}',
        '{"at_s": 1, "length": 99999999999999999999}',
        '{"at_s": 1e300, "length": 7}',
        f'{{"at_s": 1{"0" * 400}, "length": 7}}',
        "[" * 100_000,
    ],
)
def test_a_trace_line_that_is_not_one_is_named(tmp_path, line):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"at_s": 0, "length": 3}\n' + line + "\n")
    with pytest.raises(InputError, match=r"trace.jsonl, line 2: .*; expected \{\"at_s\": 0.25"):
        trace_plan(path)


def test_an_empty_or_missing_trace_is_refused(tmp_path):
    path = tmp_path / "trace.jsonl"
    with pytest.raises(InputError, match="cannot read the trace"):
        trace_plan(path)
    path.write_text("\n")
    with pytest.raises(InputError, match="is empty"):
        trace_plan(path)
