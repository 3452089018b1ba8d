"""The smallest set of things with which something holds, in few trials."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

MOST_TRIALS = 64


@dataclass(frozen=True, slots=True)
class Smallest:
    """`proved`: no smaller set does, provided that more never hurts; else none that leaves one out."""

    members: tuple[str, ...]
    proved: bool
    trials: int


@dataclass(slots=True)
class _Trials:
    holds: Callable[[Sequence[str]], bool]
    known: dict[tuple[str, ...], bool] = field(default_factory=dict)

    def __call__(self, members: Sequence[str]) -> bool:
        key = tuple(members)
        if key not in self.known:
            self.known[key] = self.holds(key)
        return self.known[key]


def smallest_set(
    candidates: Sequence[str], holds: Callable[[Sequence[str]], bool], most_trials: int = MOST_TRIALS
) -> Smallest | None:
    """The smallest of `candidates`' subsets that `holds`; None where not even all of them do.

    Members without which the rest fails are in every such set, and often they are it. Else delta
    debugging (Zeller and Hildebrandt, 2002, ddmin) adds to them what is needed, and then every smaller
    set is tried, until `most_trials` are used up.
    """
    trials = _Trials(holds)
    everything = tuple(candidates)
    if not trials(everything):
        return None
    needed = tuple(c for c in everything if not trials([other for other in everything if other != c]))
    rest = [c for c in everything if c not in needed]

    def ordered(chosen: Sequence[str]) -> list[str]:
        return [c for c in everything if c in needed or c in chosen]

    if trials(needed):
        return Smallest(needed, proved=True, trials=len(trials.known))
    found = _minimal(rest, lambda chosen: trials(ordered(chosen)))
    for size in range(1, len(found)):
        for chosen in itertools.combinations(rest, size):
            if len(trials.known) >= most_trials:
                return Smallest(tuple(ordered(found)), proved=False, trials=len(trials.known))
            if trials(ordered(chosen)):
                return Smallest(tuple(ordered(chosen)), proved=True, trials=len(trials.known))
    return Smallest(tuple(ordered(found)), proved=True, trials=len(trials.known))


def _minimal(members: list[str], holds: Callable[[Sequence[str]], bool]) -> list[str]:
    """ddmin: a subset that holds, and that none of its members can leave."""
    parts = 2
    while len(members) >= 2:
        size = -(-len(members) // parts)
        chunks = [members[start : start + size] for start in range(0, len(members), size)]
        smaller = next((chunk for chunk in chunks if holds(chunk)), None)
        if smaller is not None:
            members, parts = smaller, 2
            continue
        others = ([m for m in members if m not in chunk] for chunk in chunks)
        smaller = next((left for left in others if len(chunks) > 2 and holds(left)), None)
        if smaller is not None:
            members, parts = smaller, max(parts - 1, 2)
        elif parts >= len(members):
            break
        else:
            parts = min(2 * parts, len(members))
    return members
