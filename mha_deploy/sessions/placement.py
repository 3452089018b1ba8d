"""Where a session runs, as a caller asks for it."""

from __future__ import annotations

from dataclasses import dataclass

from mha_deploy.errors import SessionError
from mha_deploy.machine import most_threads

DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class Placement:
    """`threads` 0 means every core that the process may use.

    What was asked for is what runs: where the device is not to be had, opening a session raises,
    unless `fallback` names the device that will do ("cpu"); reports show which one ran.
    `cuda_graphs` replays a shape's launches as one, on a GPU. `poison` fills an engine's buffers with
    NaN before each run, so that what it leaves unwritten shows; verification asks for that. With `shares`
    threads that wait for work give their cores up at the end of a run: others have work for them.

    Raises:
        SessionError: an unknown device, threads below 0 or more than `machine.most_threads`.
    """

    device: str = "cpu"
    threads: int = 0
    fallback: str = ""
    cuda_graphs: bool = False
    poison: bool = False
    shares: bool = False

    def __post_init__(self) -> None:
        if self.device not in DEVICES or self.fallback not in ("", "cpu"):
            raise SessionError(
                f"device {self.device!r} with fallback {self.fallback!r}; expected a device of "
                f"{', '.join(DEVICES)} and, if any, fallback 'cpu'"
            )
        most = most_threads()
        if not 0 <= self.threads <= most:
            raise SessionError(
                f"threads = {self.threads}; expected 0 (every core allowed) to {most} on this machine"
            )


DEFAULT_PLACEMENT = Placement()
