"""The serving benchmark's trials: a walk about the rate that a system holds, and systems in turns."""

from __future__ import annotations

import math
import random
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mha_deploy.bundle import Bundle
from mha_deploy.load import ReferenceChecker, parse_lengths


@pytest.fixture
def walk(serving_suite):
    """The rates that a staircase tries once it is settled, where `holds` says whether a trial does."""

    def walked(holds, start, count):
        stairs, rates = serving_suite("staircase").Staircase(start, 1.0), []
        while len(rates) < count and not stairs.lost:
            if stairs.settled:
                rates.append(stairs.rate)
            stairs.went(holds(stairs.rate))
        return rates

    return walked


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # it holds nothing
@given(limit=st.floats(50, 2000), start=st.floats(20, 4000))
def test_the_walk_comes_to_a_sharp_limit_and_stays_within_a_step_of_it(walk, limit, start):
    rates = walk(lambda rate: rate <= limit, start, 20)
    assert all(limit / 1.11 <= rate <= limit * 1.11 for rate in rates[4:])


@pytest.mark.parametrize("seed", range(5))
def test_the_mean_of_the_walk_is_where_half_of_the_trials_hold(walk, seed):
    chance = random.Random(seed)

    def holds(rate):  # 3 of 4 at 0.9 times that rate, 1 of 4 at 1.1 times
        return chance.random() < 1 / (1 + (rate / 500) ** 10)

    rates = walk(holds, 100, 200)
    assert math.exp(math.fsum(map(math.log, rates)) / len(rates)) == pytest.approx(500, rel=0.05)


def test_where_nothing_holds_the_walk_is_lost(walk):
    assert walk(lambda _: False, 100, 1) == []


@pytest.fixture
def play(serving_suite, small_bundle):
    """A round of the floor and of one that serves `other`, with a target of `p99_ms`."""
    turns, systems = serving_suite("turns"), serving_suite("systems")
    floor, second = systems.System("floor", "default"), systems.System("floor", "other")

    def played(p99_ms, other=small_bundle):
        conditions = turns.Conditions(parse_lengths("uniform:1:8"), 0.1, 2, p99_ms)
        checker = ReferenceChecker(small_bundle)
        served = {floor: turns.Served(small_bundle, checker), second: turns.Served(other, checker)}
        return turns.play([floor, second], served.__getitem__, conditions, {}, 1)

    return played


def test_a_round_holds_the_geometric_mean_of_the_rates_that_tell(play):
    for found in play(5.0).values():
        told = [trial["rate_per_s"] for trial in found["trials"] if trial["tells"]]
        mean = math.exp(math.fsum(map(math.log, told)) / len(told)) if told else 0.0
        assert found["rate_per_s"] == pytest.approx(mean)
        assert len(told) <= 2
        assert all(trial["report"]["check"]["passed"] for trial in found["trials"])


def test_one_that_is_late_with_a_single_client_holds_nothing(play):
    for found in play(0.001).values():
        assert found["rate_per_s"] == 0
        assert found["trials"] == []
        assert found["alone"]["outcomes"]["answered"] == 460


def test_one_that_does_not_start_holds_nothing_and_keeps_nobody_from_a_turn(play, small_bundle, tmp_path):
    folder = tmp_path / "broken"
    shutil.copytree(small_bundle.folder, folder)
    (folder / "model.onnx").write_bytes(b"no graph")
    found = play(5.0, Bundle(folder, small_bundle.manifest))
    assert found["floor (other)"]["why_none"].startswith("floor (other) ended with 1 before it answered")
    assert "alone" in found["floor"]
    assert found["floor"]["trials"]
