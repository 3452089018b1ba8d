"""A machine whose clock moves only by what runs on it, and samples made on it."""

from __future__ import annotations

from mha_deploy.benchmark import Samples, Turn
from mha_deploy.benchmark.rounds import Clock


class FakeMachine:
    """`slows(now)` is by how much everything takes longer at a time; every run asks it once."""

    def __init__(self, slows=lambda _: 1.0):
        self.now, self._slows = 0.0, slows
        self.slept = []
        self.clock = Clock(lambda: self.now, self._sleep)

    def _sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds

    def run(self, ms):
        self.now += ms * self._slows(self.now) / 1e3

    def turn(self, name, ms, **fields):
        return Turn(name, lambda: self.run(ms), **fields)


def samples(name, *rounds, **fields):
    """Samples with one of these numbers in each round, or these lists of them."""
    return Samples(name, tuple(tuple(r) if isinstance(r, list) else (float(r),) for r in rounds), **fields)
