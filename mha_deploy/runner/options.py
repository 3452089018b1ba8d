"""How a runner queues and runs, as its owner asks for it."""

from __future__ import annotations

from dataclasses import dataclass

from mha_deploy.errors import SpecError
from mha_deploy.machine import most_threads

MODES = ("exact", "fast")


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """Bounds and rules of a `BatchRunner`.

    `workers` sessions of `threads` threads each run at once; 0 is what calibration measured to be the
    best here (see `BatchRunner.over`), or one worker and every core where nothing was measured. Together
    they have at most `machine.most_threads` threads.

    The queue holds at most so many requests, tokens and bytes of inputs; a request being run is not
    in it. A request that has waited `max_wait_s` goes ahead of more urgent ones in every other batch,
    so that no priority and no deadline of others holds it back for ever.

    Mode "exact" puts only requests of equal lengths together: an answer is bit for bit the one that the
    request gets alone. "fast" also lets requests of other lengths join where the cost model predicts
    that to be quicker: end to end in a packed artifact, else padded; answers then agree within 8 eps of
    the artifact's precision (1e-6 in fp32) of the largest |y|. Where calibration saw batch mates change
    an answer by more, requests run alone.

    An artifact that declares its answers to depend on batch mates (int8 with one scale for a whole batch)
    is refused by `BatchRunner.over`. `allow_batch_dependent` admits it, and lets requests share batches
    however much that changes their answers.

    Priorities are 1 (the highest) to `priority_levels`; a request with priority 0 has
    `default_priority`.

    Raises:
        SpecError: naming the option, its value and what was expected.
    """

    workers: int = 0
    threads: int = 0
    max_queue_requests: int = 1024
    max_queue_tokens: int = 1 << 18
    max_queue_bytes: int = 1 << 30
    max_wait_s: float = 1.0
    mode: str = "exact"
    priority_levels: int = 3
    default_priority: int = 2
    allow_batch_dependent: bool = False

    def __post_init__(self) -> None:
        most = most_threads()
        for name in ("workers", "threads"):
            if not 0 <= getattr(self, name) <= most:
                raise SpecError(
                    f"{name} = {getattr(self, name)}; expected 0 (measured) to {most} on this machine"
                )
        if self.workers * self.threads > most:
            raise SpecError(
                f"{self.workers} workers of {self.threads} threads each; expected at most {most} threads "
                "together on this machine"
            )
        for name in ("max_queue_requests", "max_queue_tokens", "max_queue_bytes", "priority_levels"):
            if getattr(self, name) < 1:
                raise SpecError(f"{name} = {getattr(self, name)}; expected at least 1")
        if not self.max_wait_s >= 0:
            raise SpecError(f"max_wait_s = {self.max_wait_s}; expected 0 or more seconds")
        if self.mode not in MODES:
            raise SpecError(f"mode {self.mode!r}; expected one of {', '.join(MODES)}")
        if not 1 <= self.default_priority <= self.priority_levels:
            raise SpecError(
                f"default_priority = {self.default_priority}; expected 1 to {self.priority_levels}, "
                "the priority levels there are"
            )


DEFAULT_OPTIONS = RunnerOptions()
