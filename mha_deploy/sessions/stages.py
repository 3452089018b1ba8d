"""What a run takes on a device, its copies apart from its computing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from mha_deploy.signature import Feeds

# Called where a run goes over to UPLOAD, COMPUTE, DOWNLOAD, and when the last is queued.
Hook: TypeAlias = Callable[[str], None]
UPLOAD, COMPUTE, DOWNLOAD, END = "upload", "compute", "download", "end"


@dataclass(frozen=True, slots=True)
class Stages:
    """Milliseconds of one run."""

    upload_ms: float
    compute_ms: float
    download_ms: float

    def __add__(self, other: Stages) -> Stages:
        return Stages(
            self.upload_ms + other.upload_ms,
            self.compute_ms + other.compute_ms,
            self.download_ms + other.download_ms,
        )


@runtime_checkable
class StagedSession(Protocol):
    """A session on a device of its own, to which inputs are copied and answers come back.

    One that hands its runs on to others is staged where they all are.
    """

    def run_in_stages(self, feeds: Feeds, *, cold: bool) -> Stages:
        """What one run takes; with `cold` the device's cache is emptied before it computes."""


def unwatched(_stage: str) -> None:
    """The hook of a run that nobody times."""
