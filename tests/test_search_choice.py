"""Who is timed, who is dropped, who is chosen, and what is remembered: on a clock that tests move."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measured import FakeMachine

from mha_deploy.search.choice import ALIKE, MARGIN, SOMEWHERE, Route, Size, choose
from mha_deploy.search.measuring import CLEARLY_SLOWER, FINALISTS, finalists, race


def raced(machine, times_ms, **fields):
    turns = [machine.turn(name, ms) for name, ms in times_ms.items()]
    timings, _ = race(turns, 0.2, clock=machine.clock, **fields)
    return timings


def test_the_final_is_among_those_near_the_winner_of_the_heat():
    timings = raced(FakeMachine(), {"a": 1.0, "b": 1.2, "c": 1.4, "d": 3.0})
    assert {name for name, timing in timings.items() if timing.final} == {"a", "b"}
    assert {name: round(timing.ratio, 6) for name, timing in timings.items()} == {
        "a": 1.0,
        "b": 1.2,
        "c": 1.4,
        "d": 3.0,
    }


def test_a_slow_one_that_is_kept_is_in_the_final_and_what_runs_beside_is_no_contender():
    machine = FakeMachine()
    beside = machine.turn("ceiling", 0.1)
    turns = [machine.turn("a", 1.0), machine.turn("slow", 5.0)]
    timings, taken = race(turns, 0.2, keep=["slow"], beside=[beside], clock=machine.clock)
    assert timings["slow"].final
    assert set(timings) == {"a", "slow"}
    assert taken["ceiling"].median_ms == pytest.approx(0.1)


def test_a_disturbance_in_the_heat_drops_nobody():
    # Everything takes ten times as long for a while, except for an instant now and then.
    machine = FakeMachine(lambda now: 10.0 if now < 0.4 and int(now * 1e4) % 7 else 1.0)
    timings = raced(machine, {"a": 1.0, "b": 1.1, "c": 1.05})
    assert all(timing.final for timing in timings.values())
    assert min(timings, key=lambda name: timings[name].ratio) == "a"


def test_the_fastest_has_ratio_one_and_nobody_less_however_the_machine_drifts():
    machine = FakeMachine(lambda now: 1.0 + now / 20)
    timings = raced(machine, {"a": 1.2, "b": 1.0, "c": 1.1})
    assert timings["b"].ratio == 1.0
    assert timings["a"].ratio == pytest.approx(1.2, rel=0.02)
    assert timings["c"].ratio == pytest.approx(1.1, rel=0.02)


def test_the_final_has_room_for_so_many_and_the_fastest_are_in_it():
    times = {str(i): 1 + i / 100 for i in range(FINALISTS + 3)}
    assert finalists(dict(reversed(times.items())), []) == list(reversed(list(times)[:FINALISTS]))
    assert finalists({"a": 1.0, "b": CLEARLY_SLOWER * 1.01}, []) == ["a"]


def test_one_that_wins_everywhere_is_chosen_alone():
    sizes = [Size(16, {"a": 1.5, "b": 1.0}), Size(512, {"a": 1.2, "b": 1.0})]
    assert choose(sizes, ["a", "b"]) == Route("b", "b")


def test_short_and_long_have_a_winner_each_where_no_single_one_wins():
    sizes = [
        Size(16, {"a": 1.0, "b": 1.6}),
        Size(128, {"a": 1.0, "b": 1.3}),
        Size(512, {"a": 2.0, "b": 1.0}),
    ]
    route = choose(sizes, ["a", "b"])
    assert route == Route("a", "b", 128)
    assert [route.at(length) for length in (1, 128, 129, 512)] == ["a", "a", "b", "b"]


def test_of_two_that_are_equally_fast_the_simpler_wins():
    even = [Size(16, {"simple": 1 + ALIKE / 2, "other": 1.0})]
    assert choose(even, ["simple", "other"]) == Route("simple", "simple")
    ahead = [Size(16, {"simple": 1 + 2 * ALIKE, "other": 1.0})]
    assert choose(ahead, ["simple", "other"]) == Route("other", "other")


def test_a_second_engine_has_to_be_worth_it():
    sizes = [Size(16, {"a": 1.0, "b": 1.02}), Size(512, {"a": 1.02, "b": 1.0})]
    assert choose(sizes, ["a", "b"]).single


def test_a_second_engine_is_worth_it_where_one_for_all_is_far_behind_at_some_size():
    long = [Size(length, {"a": 1.0, "b": 1.1}) for length in (64, 128, 256, 512, 1024)]
    ahead, alike = 1 + 2 * SOMEWHERE, 1 + SOMEWHERE / 2
    assert choose([Size(16, {"a": ahead, "b": 1.0}), *long], ["a", "b"]) == Route("b", "a", 16)
    assert choose([Size(16, {"a": alike, "b": 1.0}), *long], ["a", "b"]) == Route("a", "a")


SLOWER = [1.03, 1.01, 1.04, 1.02, 1.05, 1.02, 1.04, 1.03]


@pytest.mark.parametrize(
    ("ratio", "slower", "chosen"),
    [
        (1.03, SLOWER, Route("a", "b", 128)),
        (1.03, [0.99, *SLOWER[1:]], Route("a", "a")),  # one round of eight says otherwise
        (1.03, SLOWER[:7], Route("a", "a")),  # too few for an interval
        (1.015, SLOWER, Route("a", "a")),  # sure, and little
    ],
)
def test_a_second_engine_that_is_faster_in_every_round_need_not_be_far_ahead(ratio, slower, chosen):
    short = [Size(length, {"a": 1.0, "b": 1.05}) for length in (16, 64, 128)]
    rounds_ms = {"a": [20 * each for each in slower], "b": [20.0] * len(slower)}
    assert choose([*short, Size(1024, {"a": ratio, "b": 1.0}, rounds_ms)], ["a", "b"]) == chosen


def test_a_second_engine_that_gains_at_one_size_and_loses_at_another_is_not_chosen():
    one, batch = Size(16, {"a": 1.06, "b": 1.0}), Size(16, {"a": 1.0, "b": 1.055})
    long = Size(512, {"a": 1.0, "b": 1.3})
    assert choose([one, batch, long], ["a", "b"]) == Route("a", "a")
    assert choose([one, long], ["a", "b"]) == Route("b", "a", 16)


def test_who_was_not_in_the_final_is_judged_by_its_ratio_alone():
    short = [Size(length, {"a": 1.0, "b": 1.05}) for length in (16, 64, 128)]
    for ratio, single in ((1.04, True), (1.06, False)):
        long = Size(1024, {"a": ratio, "b": 1.0}, {"b": [20.0] * 8})
        assert choose([*short, long], ["a", "b"]).single is single


def test_how_far_one_for_all_is_behind_counts_also_where_a_third_is_ahead_elsewhere():
    short = Size(16, {"a": 1.06, "b": 1.06, "c": 1.0})
    long = [Size(length, {"a": 1.0, "b": 1.05, "c": 1.2}) for length in (64, 128, 256, 512)]
    longest = Size(1024, {"a": 1.08, "b": 1.0, "c": 1.2})
    assert choose([short, *long, longest], ["a", "b", "c"]) == Route("a", "b", 512)


def test_the_border_lies_where_it_costs_least_however_little_that_is():
    sizes = [
        Size(16, {"a": 1.0, "b": 1.1}),
        Size(128, {"a": 1.0, "b": 1.004}),
        Size(512, {"a": 1.2, "b": 1.0}),
    ]
    assert choose(sizes, ["a", "b"]) == Route("a", "b", 128)


RATIOS = st.lists(
    st.tuples(st.integers(1, 4), *[st.floats(1.0, 4.0) for _ in range(3)]), min_size=1, max_size=5
)


@given(RATIOS)
def test_no_single_candidate_is_faster_than_the_choice_by_more_than_both_margins(drawn):
    names = ["a", "b", "c"]
    sizes = [Size(length, dict(zip(names, ratios, strict=True))) for length, *ratios in drawn]
    route = choose(sizes, names)
    chosen = math.prod(size.ratios[route.at(size.length)] for size in sizes) ** (1 / len(sizes))
    for name in names:
        alone = math.prod(size.ratios[name] for size in sizes) ** (1 / len(sizes))
        assert chosen <= alone * (1 + MARGIN) * (1 + ALIKE) * 1.0001
