"""Two artifacts as one, by length."""

from __future__ import annotations

from mha_deploy.manifest import Artifact


def routed_artifact(short: Artifact, long: Artifact, up_to_length: int) -> Artifact:
    """`short` for query lengths up to `up_to_length`, `long` beyond; its precision is the coarser one's.

    The budget of an integer precision goes with it.
    """
    coarser = max(short, long, key=lambda each: (each.precision.is_integer, each.precision.eps))
    budgets = {
        key: each.details[key]
        for each in (short, long)
        for key in ("max_relative_error", "batch_dependent")
        if key in each.details
    }
    routes = {"up_to_length": up_to_length, "short": short.to_json(), "long": long.to_json()}
    return Artifact(
        name=f"{short.name}-to-{up_to_length}-then-{long.name}",
        runtime="routed",
        precision=coarser.precision,
        signature=short.signature,
        files=tuple(dict.fromkeys((*short.files, *long.files))),
        details={**budgets, "routes": routes},
    )
