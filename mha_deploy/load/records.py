"""What became of every request of a run, and when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Self

import numpy as np

from mha_deploy.signature import Array


class Outcome(IntEnum):
    """Every planned request ends in exactly one of these."""

    ANSWERED = 0
    REFUSED = 1  # 503 or 429, or a full queue
    EXPIRED = 2  # 504, or a deadline that passed
    ERROR = 3  # another status, or an answer that cannot be read
    DISCONNECTED = 4  # no connection, or one that ended before the answer
    NOT_SENT = 5  # as many were on their way as may be
    UNANSWERED = 6  # still on its way when the run gave up waiting


@dataclass(frozen=True, slots=True)
class Records:
    """One element a request, in the plan's order; times in seconds from the run's start.

    `intended_s`: when it was to be sent. `sent_s`: when it was, NaN where it was not. `ended_s`: when
    its answer was there in full, or its failure known. `outcomes` are `Outcome` numbers.
    """

    lengths: Array
    intended_s: Array
    sent_s: Array
    ended_s: Array
    outcomes: Array

    @classmethod
    def empty(cls, lengths: Array) -> Self:
        """Of requests that all are still to be sent."""
        count = len(lengths)
        intended_s, sent_s, ended_s = np.full((3, count), np.nan)
        return cls(lengths, intended_s, sent_s, ended_s, np.full(count, Outcome.UNANSWERED, np.int64))

    @classmethod
    def merged(cls, parts: Sequence[Records]) -> Self:
        """All requests in one: percentiles are taken of the merged, never averaged."""
        names = [field.name for field in fields(cls)]
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    @property
    def answered(self) -> Array:
        return np.equal(self.outcomes, Outcome.ANSWERED)

    def latency_ms(self) -> list[float]:
        """Of answered requests, from the intended send: what a user waits, whoever is to blame."""
        taken = (self.ended_s - self.intended_s)[self.answered] * 1e3
        return [float(each) for each in taken]

    def service_ms(self) -> list[float]:
        """Of answered requests, from the real send: blind to what the generator held back."""
        taken = (self.ended_s - self.sent_s)[self.answered] * 1e3
        return [float(each) for each in taken]

    def lag_ms(self) -> list[float]:
        """From the intended to the real send, of all that were sent."""
        lag = (self.sent_s - self.intended_s)[~np.isnan(self.sent_s)] * 1e3
        return [float(each) for each in lag]

    def counts(self) -> dict[str, int]:
        return {outcome.name.lower(): int((self.outcomes == outcome).sum()) for outcome in Outcome}
