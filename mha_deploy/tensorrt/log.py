"""TensorRT's logger, and the lines that it prints past its logger.

The library keeps the first logger it is given for the life of the process, so there is one per
module here and it hands each message to whoever records at the time.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TextIO, TypeAlias

# An object of the bindings, which carry no type information.
Handle: TypeAlias = Any

ERROR, WARNING, INFO = 1, 2, 3  # ILogger.Severity: INTERNAL_ERROR is 0, VERBOSE is 4
_NAMES = ("INTERNAL_ERROR", "ERROR", "WARNING", "INFO", "VERBOSE")
# Without a CUDA driver every API error is followed by this one; it tells nothing of the build.
_NOISE = "checkMacros.cpp::catchCudaError"
# Said when other code of this process gave the library its logger first; ours is heard all the same.
_OTHER_LOGGER = "The logger passed into"
# Said of each int64 input; sessions bind every input in the dtype of its signature.
_INT64_INPUT = "has Int64 binding"


class Line(NamedTuple):
    """One message of the library. `severity` counts from 0 (internal error) to 4 (verbose)."""

    severity: int
    text: str

    def __str__(self) -> str:
        return f"[{_NAMES[self.severity]}] {self.text}"


@dataclass(slots=True, eq=False)
class Log:
    """What the library said, in order."""

    lines: list[Line] = field(default_factory=list)

    def add(self, severity: int, text: str) -> None:
        self.lines.append(Line(severity, text))

    @property
    def errors(self) -> tuple[str, ...]:
        """Errors less those that only say that there is no CUDA driver to ask."""
        return tuple(text for level, text in self.lines if level <= ERROR and _NOISE not in text[:80])

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings less those that no user can act on."""
        known = (_OTHER_LOGGER, _INT64_INPUT)
        return tuple(
            text
            for level, text in self.lines
            if level == WARNING and not any(phrase in text for phrase in known)
        )

    def __str__(self) -> str:
        return "\n".join(map(str, self.lines))


_sinks: list[Log] = []
_own = threading.local()


@contextlib.contextmanager
def recording() -> Iterator[Log]:
    """Collect what the library says to this thread until the block ends.

    Blocks nest: when an inner one ends, its lines are added to the outer one. A message from
    a thread of the library's own goes to the newest recording.
    """
    log = Log()
    outer = getattr(_own, "log", None)
    _own.log = log
    _sinks.append(log)
    try:
        yield log
    finally:
        _sinks.remove(log)
        _own.log = outer
        if outer is not None:
            outer.lines.extend(log.lines)


def make_logger(module: Handle) -> Handle:
    """An `ILogger` of `module` that feeds the current recording; keep it for the whole process."""

    class Recorder(module.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()

        def log(self, severity: Handle, text: str) -> None:
            log = getattr(_own, "log", None) or (_sinks[-1] if _sinks else None)
            if log is not None:
                log.add(int(severity), text)

    return Recorder()


_stderr = threading.Lock()


@contextlib.contextmanager
def stderr_into(log: Log) -> Iterator[None]:
    """Send what the process writes to file descriptor 2 into `log`.

    The compiler inside TensorRT prints its exceptions there, past the logger. The descriptor
    belongs to the whole process, so one block runs at a time and a line that another thread writes
    to it meanwhile ends in the log too. `sys.stderr` keeps working: where it stands for descriptor
    2 it is replaced for the duration, so that a progress bar still reaches the screen.
    """
    with _stderr, tempfile.TemporaryFile() as caught:
        screen, before = os.dup(2), sys.stderr
        swapped = _is_descriptor_2(before)
        if swapped:
            before.flush()
            sys.stderr = open(screen, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False)  # noqa: SIM115 - closed with its descriptor
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(screen, 2)
            if swapped:
                sys.stderr.flush()
                sys.stderr = before
            os.close(screen)
            caught.seek(0)
            for text in caught.read().decode(errors="replace").splitlines():
                log.add(INFO, f"stderr: {text}")


def _is_descriptor_2(stream: TextIO) -> bool:
    try:
        return bool(stream.fileno() == 2)
    except (AttributeError, OSError, io.UnsupportedOperation, ValueError):
        return False
