"""One named set of inputs."""

from __future__ import annotations

from dataclasses import dataclass, field

from mha_deploy.signature import Array, Sizes


@dataclass(frozen=True, slots=True)
class Case:
    """One set of inputs.

    `feeds` go to the artifact, `clean` to the reference; they differ where the point is that what
    stands in padding has no effect. `compared` [batch, query] marks the rows that count: padded
    query rows do not. `others` are further inputs of the kind, judged with the first as one: where a
    case has few elements, ten runs over one input say little of what PyTorch scatters. `real` says
    that the values are a user's and not random.
    """

    name: str
    sizes: Sizes
    feeds: dict[str, Array]
    compared: Array
    clean: dict[str, Array] = field(default_factory=dict)
    others: tuple[dict[str, Array], ...] = ()
    real: bool = False

    @property
    def reference_feeds(self) -> dict[str, Array]:
        return self.clean or self.feeds


def describe(sizes: Sizes) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())
