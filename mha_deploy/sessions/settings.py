"""Where a session runs, as its artifact asks for it: that goes before what a caller asks for."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from mha_deploy.manifest import Artifact
from mha_deploy.sessions.placement import Placement


@dataclass(frozen=True, slots=True)
class ArtifactSettings:
    """How an artifact wants to be run: `details["settings"]`. "" and 0 leave it to the placement."""

    device: str = ""
    threads: int = 0
    spinning: bool = True

    @classmethod
    def of(cls, artifact: Artifact) -> ArtifactSettings:
        return cls(**artifact.details.get("settings", {}))

    def placed(self, placement: Placement) -> Placement:
        device, threads = self.device or placement.device, self.threads or placement.threads
        return replace(placement, device=device, threads=threads)


def placements(artifact: Artifact, placement: Placement) -> tuple[Placement, ...]:
    """What a session opened at `placement` runs at, the artifact's own settings considered.

    One, or one for each route of a routed artifact, whose settings may differ.
    """
    own = ArtifactSettings.of(artifact).placed(placement)
    return tuple(found for route in artifact.routes for found in placements(route, own)) or (own,)


def placed(artifact: Artifact, placement: Placement) -> Placement:
    """The one of `placements` with the most threads (0, every core, is the most).

    What is told of a session, and what ceilings are measured at: one of fewer threads is below them too.
    """
    return max(placements(artifact, placement), key=lambda each: each.threads or math.inf)
