"""What is noticed beside a measurement: neighbours, stolen time, throttling, drift."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from mha_deploy import machine
from mha_deploy.benchmark import Conditions, watch
from mha_deploy.benchmark.conditions import drift_of
from mha_deploy.machine import CpuTimes

QUIET = Conditions(10.0, 0.01, 0.0, "performance", (3000.0, 3000.0), 0, 0, 0.0)
UNREADABLE = Conditions(10.0, math.nan, math.nan, "", (math.nan, math.nan), 0, 0, 0.0)


@pytest.mark.parametrize("conditions", [QUIET, UNREADABLE])
def test_a_quiet_machine_and_one_that_tells_nothing_give_no_notice(conditions):
    assert conditions.notices() == []


@pytest.mark.parametrize(
    ("changes", "notice"),
    [
        ({"neighbours_share": 0.43}, "busy neighbours: other processes took 43% of the cores' time"),
        ({"steal_share": 0.03}, "stolen time: the hypervisor gave 3% of the cores' time to others"),
        ({"drift": 0.12}, "drift: the machine ended 12% slower than it began"),
        ({"drift": -0.12}, "drift: the machine ended 12% faster than it began"),
        ({"frequency_mhz": (3000.0, 2400.0)}, "frequency: 3000 MHz before, 2400 MHz after"),
        ({"thermal_throttles": 3}, "heat: the cores were throttled 3 times"),
        ({"quota_throttles": 7}, "quota: the cgroup stopped this process 7 times"),
        ({"governor": "powersave"}, "governor: powersave, which changes the frequency with the load"),
    ],
)
def test_what_disturbs_is_told(changes, notice):
    assert replace(QUIET, **changes).notices() == [notice]


def test_what_is_not_readable_is_null_in_json():
    data = json.loads(json.dumps(UNREADABLE.to_json()))
    assert (data["steal_share"], data["frequency_mhz"]) == (None, [None, None])


def test_shares_are_of_the_time_between_start_and_end_without_our_own(monkeypatch):
    times = iter([CpuTimes(100, 10, 1000), CpuTimes(108, 11, 1020)])
    own = iter([5.0, 8.0])
    monkeypatch.setattr(machine, "cpu_times", lambda: next(times))
    monkeypatch.setattr("time.process_time", lambda: next(own))
    found = watch()([1.0] * 8)
    assert (found.neighbours_share, found.steal_share) == pytest.approx((5 / 20, 1 / 20))


def test_what_is_counted_since_boot_is_counted_from_the_start(monkeypatch):
    counts = {"thermal_throttles": iter([40, 43]), "quota_throttles": iter([7, 7])}
    for name, found in counts.items():
        monkeypatch.setattr(machine, name, lambda found=found: next(found))
    found = watch()([1.0] * 8)
    assert (found.thermal_throttles, found.quota_throttles) == (3, 0)


def test_this_machine_is_watched_whatever_it_tells():
    found = watch()([1.0, 2.0])
    assert found.seconds >= 0
    assert not found.neighbours_share < 0
    json.dumps(found.to_json())


def test_a_trend_over_rounds_is_drift_from_the_first_to_the_last():
    assert drift_of([10, 11, 12, 13, 14, 15, 16, 17]) == pytest.approx(7 / 13)
    assert drift_of([17, 16, 15, 14, 13, 12, 11, 10]) == pytest.approx(-7 / 13)


def test_one_slow_round_is_no_drift():
    assert drift_of([10, 10.1, 9.9, 10, 30, 10.1, 9.9, 10]) == 0
    assert drift_of([10] * 8) == 0
    assert drift_of([1, 2, 3]) == 0
    assert drift_of([]) == 0


def test_chance_alone_shows_as_drift_in_one_of_a_hundred():
    random = np.random.default_rng(0)
    found = sum(drift_of(list(random.lognormal(0, 0.3, 10))) != 0 for _ in range(500))
    assert found <= 10
