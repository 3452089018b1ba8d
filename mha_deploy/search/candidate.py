"""What a search may try, as a small declaration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from mha_deploy.bundle import CANONICAL, Bundle
from mha_deploy.manifest import Artifact
from mha_deploy.precision import Precision
from mha_deploy.sessions import Placement, Session

Status = Callable[[str], None]
Lacks = Callable[[Bundle, Placement], str]
Make = Callable[[Bundle, Status], Artifact]
Open = Callable[[Bundle, Artifact, Placement], Session]


def canonical(bundle: Bundle, _status: Status) -> Artifact:
    return bundle.artifact(CANONICAL)


def nothing(_bundle: Bundle, _placement: Placement) -> str:
    return ""


def open_artifact(bundle: Bundle, artifact: Artifact, placement: Placement) -> Session:
    """The session of an artifact that may not be in the manifest yet."""
    return bundle.with_artifact(artifact).open_padded_session(artifact.name, placement)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run the block.

    `make` gives its artifact, which it may have to build first; nothing joins the manifest before it is
    chosen. `lacks` says why it cannot run here, or "": it is cheap, and asked before `make`. A
    `baseline` is what a user would otherwise keep: it is measured, and never chosen.
    """

    name: str
    precision: Precision
    make: Make
    lacks: Lacks = nothing
    open: Open = open_artifact
    baseline: bool = False


def variant_of(source: Artifact, name: str, **changes: Any) -> Artifact:
    """`source` under another name, with other fields; its details are not carried over."""
    return replace(source, name=name, **{"details": {"made_from": source.name}, **changes})
