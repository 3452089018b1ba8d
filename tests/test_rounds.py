"""The protocol: who runs when, and which runs count."""

from __future__ import annotations

import itertools

import pytest
from measured import FakeMachine, samples

from mha_deploy.benchmark import Schedule, Turn, measure
from mha_deploy.errors import BenchError


def in_order(turns=("a", "b"), **schedule):
    """The names in the order in which they ran, after one run of warm-up each."""
    machine, ran = FakeMachine(), []

    def run(name):
        ran.append(name)
        machine.run(1)

    measure(
        [Turn(name, lambda name=name: run(name)) for name in turns],
        Schedule(**{"seconds": 0.01, "rounds": 4, "warm_up_runs": 0, **schedule}),
        clock=machine.clock,
    )
    return "".join(ran[len(turns) :])


def test_every_round_runs_its_turns_in_one_order_and_then_in_reverse():
    # A turn is two unrecorded runs and a recorded one.
    ran = in_order(("a", "b", "c"), seconds=1e-6)
    rounds = [ran[i : i + 18 : 3] for i in range(0, len(ran), 18)]
    assert len(rounds) == 4
    for each in rounds:
        assert each == each[::-1]
        assert set(each) == {"a", "b", "c"}


def test_the_order_of_a_round_is_drawn_by_chance_and_the_seed_repeats_it():
    firsts = in_order(seconds=1e-6, rounds=64, seed=1)[::12]
    assert 16 < firsts.count("a") < 48
    assert firsts == in_order(seconds=1e-6, rounds=64, seed=1)[::12]
    assert firsts != in_order(seconds=1e-6, rounds=64, seed=2)[::12]


def test_before_every_turn_there_is_a_pause():
    machine = FakeMachine()
    turns = [machine.turn("a", 1), machine.turn("b", 1)]
    measure(turns, Schedule(seconds=0.01, rounds=3, pause_s=0.06), clock=machine.clock)
    assert machine.slept == [0.06] * 12


def test_a_turn_has_its_time_in_every_round_and_a_sample_in_each_half_at_the_least():
    machine = FakeMachine()
    turns = [machine.turn("fast", 1), machine.turn("slow", 500), machine.turn("less", 1, share=0.25)]
    taken = measure(turns, Schedule(seconds=0.8, rounds=4), clock=machine.clock)
    assert [len(each) for each in taken["fast"].rounds_ms] == pytest.approx([200] * 4, abs=2)
    assert [len(each) for each in taken["less"].rounds_ms] == pytest.approx([50] * 4, abs=2)
    assert [len(each) for each in taken["slow"].rounds_ms] == [2] * 4
    assert taken["slow"].median_ms == pytest.approx(500)


def test_the_first_run_of_a_shape_stands_apart_and_no_percentile_has_it():
    """A runtime that builds for 30 s when it meets a shape and then runs in 5 ms."""
    machine, built = FakeMachine(), set()
    shapes = itertools.cycle(["1 x 8", "1 x 16"])
    upcoming = [next(shapes)]

    def run():
        shape = upcoming[0]
        machine.run(5 if shape in built else 30_000)
        built.add(shape)
        upcoming[0] = next(shapes)

    turn = Turn("engine", run, shape=lambda: upcoming[0], cycle=2)
    schedule = Schedule(seconds=5, rounds=2, warm_up_runs=1)
    taken = measure([turn], schedule, clock=machine.clock)["engine"]
    assert (taken.latency.p50_ms, taken.latency.p99_ms) == pytest.approx((5, 5))
    assert taken.first_runs_ms == pytest.approx({"1 x 8": 30_000, "1 x 16": 30_000})
    assert taken.warm_up_runs == 2  # one of each shape, though the schedule asks for fewer
    assert taken.late_first_runs_ms == {}
    assert max(taken.merged_ms) == pytest.approx(5)


def test_a_shape_that_comes_up_in_the_middle_is_told_and_does_not_count():
    machine, runs = FakeMachine(), itertools.count()
    shape = ["first"]

    def run():
        machine.run(30_000 if shape[0] == "second" and not seen else 5)
        if shape[0] == "second":
            seen.append(1)
        if next(runs) == 50:
            shape[0] = "second"

    seen = []
    taken = measure(
        [Turn("engine", run, shape=lambda: shape[0])], Schedule(seconds=5, rounds=2), clock=machine.clock
    )["engine"]
    assert taken.late_first_runs_ms == pytest.approx({"second": 30_000})
    assert taken.first_runs_ms == pytest.approx({"first": 5})
    assert max(taken.merged_ms) == pytest.approx(5)


def test_what_renews_itself_does_so_before_every_round_and_outside_of_its_time():
    machine, renewed = FakeMachine(), []

    def renew():
        renewed.append(machine.now)
        machine.run(10_000)

    taken = measure(
        [machine.turn("a", 1, renew=renew)], Schedule(seconds=0.1, rounds=3), clock=machine.clock
    )["a"]
    assert len(renewed) == 3
    assert max(taken.merged_ms) == pytest.approx(1)


def test_percentiles_of_rounds_are_those_of_the_merged_samples():
    """Cases of two workers: 1000 x 10 ms and 10 x 2000 ms; their p95 do not average to 1005."""
    taken = samples("two workers", [10.0] * 1000, [2000.0] * 10)
    assert (taken.latency.p50_ms, taken.latency.p99_ms) == (10, 10)
    assert len(taken.merged_ms) == 1010


def test_two_turns_of_one_name_are_refused():
    machine = FakeMachine()
    with pytest.raises(BenchError, match="turns are named a, a; expected a name of its own for each"):
        measure([machine.turn("a", 1), machine.turn("a", 1)], Schedule(), clock=machine.clock)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seconds": 0.0}, "seconds = 0.0; expected a finite number"),
        ({"rounds": 0}, "rounds = 0; expected 1"),
    ],
)
def test_a_schedule_without_time_or_rounds_is_refused(fields, message):
    with pytest.raises(BenchError, match=message):
        Schedule(**fields)


def test_shapes_without_an_end_are_refused():
    machine, shapes = FakeMachine(), itertools.count()
    turn = machine.turn("engine", 1, shape=lambda: next(shapes))
    with pytest.raises(
        BenchError, match="engine met more than 100 shapes after its warm-up; expected `cycle`"
    ):
        measure([turn], Schedule(seconds=1, rounds=1), clock=machine.clock)
