"""Two artifacts as one, by length."""

from __future__ import annotations

from typing import Any

from mha_deploy.manifest import Artifact


def routed_artifact(short: Artifact, long: Artifact, up_to_length: int) -> Artifact:
    """`short` for query lengths up to `up_to_length`, `long` beyond; its precision is the coarser one's.

    The larger budget of those that have one goes with it, and whether either depends on the batch.
    """
    coarser = max(short, long, key=lambda each: (each.precision.is_integer, each.precision.eps))
    found: dict[str, Any] = {
        key: max(each.details[key] for each in (short, long) if key in each.details)
        for key in ("max_relative_error", "batch_dependent")
        if key in {**short.details, **long.details}
    }
    routes = {"up_to_length": up_to_length, "short": short.to_json(), "long": long.to_json()}
    return Artifact(
        name=f"{short.name}-to-{up_to_length}-then-{long.name}",
        runtime="routed",
        precision=coarser.precision,
        signature=short.signature,
        files=tuple(dict.fromkeys((*short.files, *long.files))),
        details={**found, "routes": routes},
    )
