"""One named set of inputs."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from mha_deploy.signature import Array, Feeds, Sizes


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One set of inputs.

    `feeds` go to the artifact, `clean` to the reference; they differ where the point is that what
    stands in padding has no effect. `compared` [batch, query] marks the rows that count: padded
    query rows do not. `others` are further inputs of the kind, judged with the first as one: where a
    case has few elements, ten runs over one input say little of what PyTorch scatters. `real` says
    that the values are a user's and not random.

    Where a batch repeats few samples, `copies` says of each row of `feeds` which sample it is, and
    `clean` holds every sample once: the artifact runs the whole batch, the reference each sample.
    """

    name: str
    sizes: Sizes
    feeds: dict[str, Array]
    compared: Array
    clean: dict[str, Array] = field(default_factory=dict)
    others: tuple[dict[str, Array], ...] = ()
    copies: tuple[int, ...] = ()
    real: bool = False

    @property
    def reference_feeds(self) -> dict[str, Array]:
        return self.clean or self.feeds

    @property
    def draws(self) -> tuple[tuple[Feeds, Feeds], ...]:
        """Every input of the case, as the artifact gets it and as the reference does."""
        return ((self.feeds, self.reference_feeds), *((feeds, feeds) for feeds in self.others))

    @property
    def reference_compared(self) -> Array:
        """`compared` by the rows of the reference's answer."""
        if not self.copies:
            return self.compared
        return self.compared[np.unique(self.copies, return_index=True)[1]]

    def spread(self, answer: Array) -> Array:
        """The reference's answer with a row for every row of `feeds`."""
        return answer[list(self.copies)] if self.copies else answer


def describe(sizes: Sizes) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())
