"""Progress of a build, and how a build is stopped."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Protocol

from mha_deploy.tensorrt.log import Handle


class Progress(Protocol):
    """Told how far a build is. Phases nest; `parent` is "" for the outermost.

    A phase may come more than once, and may end before its last step was reported. An
    exception raised by any of the methods cancels the build and is raised again by it.
    """

    def phase_start(self, phase: str, parent: str, steps: int) -> None: ...

    def step(self, phase: str, done: int) -> None: ...

    def phase_end(self, phase: str) -> None: ...


class Silent:
    """Progress that nobody watches."""

    def phase_start(self, phase: str, parent: str, steps: int) -> None:
        """Nothing."""

    def step(self, phase: str, done: int) -> None:
        """Nothing."""

    def phase_end(self, phase: str) -> None:
        """Nothing."""


SILENT = Silent()


class Stop:
    """Whether, and why, the build under way is to end."""

    def __init__(self) -> None:
        self.wanted = False
        self.raised: list[BaseException] = []

    def now(self, error: BaseException) -> None:
        self.wanted = True
        self.raised.append(error)


def make_monitor(module: Handle, progress: Progress, stop: Stop) -> Handle:
    """An `IProgressMonitor` of `module` over `progress`; it ends the build once `stop` is wanted."""

    class Monitor(module.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            self._tell(lambda: progress.phase_start(phase, parent or "", steps))

        def phase_finish(self, phase: str) -> None:
            self._tell(lambda: progress.phase_end(phase))

        def step_complete(self, phase: str, step: int) -> bool:
            self._tell(lambda: progress.step(phase, step + 1))
            return not stop.wanted

        def _tell(self, report: Callable[[], None]) -> None:
            if stop.wanted:
                return
            # An exception must not travel through the library's own frames.
            try:
                report()
            except BaseException as error:
                stop.now(error)

    return Monitor()


@contextlib.contextmanager
def interruptible(stop: Stop) -> Iterator[None]:
    """Make Ctrl-C a wish that the next step of the build meets, then a KeyboardInterrupt as ever.

    Raised at once, the exception would come up inside one of the library's callbacks. Outside the
    main thread, where Python delivers no signals, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed: list[int] = []

    def on_signal(number: int, _frame: FrameType | None) -> None:
        pressed.append(number)
        stop.wanted = True

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before if before is not None else signal.SIG_DFL)
        if pressed and callable(before):
            before(pressed[0], None)  # Python's own raises KeyboardInterrupt
    if pressed:
        raise KeyboardInterrupt
