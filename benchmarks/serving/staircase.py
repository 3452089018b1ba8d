"""The rate at which half of the trials hold a target: up after one that held, down after one that did not.

Such a walk stays about that rate, and every trial of it is one near that rate (Dixon and Mood, "A method for
obtaining and analyzing sensitivity data", 1948). A bisection is quicker, and ends wherever it was sent by the
one trial that a busy neighbour spoilt.
"""

from __future__ import annotations

COARSE = 1.4  # until trials have gone both ways
FINE = 1.1


class Staircase:
    """`rate` is the one to try next. `settled` is set once trials have gone both ways, `lost` where the rate
    fell below `least`: there nothing holds."""

    def __init__(self, rate: float, least: float) -> None:
        self.rate, self._least = rate, least
        self._held: bool | None = None
        self.settled = False

    @property
    def lost(self) -> bool:
        return self.rate < self._least

    def went(self, held: bool) -> None:
        """A trial at `rate` held, or did not."""
        self.settled |= self._held is not None and held != self._held
        self._held = held
        step = FINE if self.settled else COARSE
        self.rate = self.rate * step if held else self.rate / step
