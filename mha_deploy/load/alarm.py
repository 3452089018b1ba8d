"""An event loop's timer in microseconds, where its own counts in milliseconds."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import time
from collections.abc import Callable

_CLOCK_MONOTONIC = 1
_ABSOLUTE = 1
_NONBLOCK_CLOEXEC = 0o4000 | 0o2000000


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class Alarm:
    """Calls `ring` in the loop once, soon after the moment it is set to (`time.monotonic`).

    By Linux's timerfd (see timerfd_create(2)), which the loop watches as any file; elsewhere by the
    loop's own timer, whose lateness the send lag then shows.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._loop, self._ring = loop, ring
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._handle: asyncio.TimerHandle | None = None
        try:
            self._file = self._libc.timerfd_create(_CLOCK_MONOTONIC, _NONBLOCK_CLOEXEC)
        except AttributeError:
            self._file = -1
        if self._file >= 0:
            loop.add_reader(self._file, self._rang)

    def set(self, at_s: float) -> None:
        if self._file < 0:
            self._handle = self._loop.call_later(max(0.0, at_s - time.monotonic()), self._ring)
            return
        seconds, nanoseconds = divmod(max(1, int(at_s * 1e9)), 10**9)
        when = _Itimerspec(_Timespec(0, 0), _Timespec(seconds, nanoseconds))
        self._libc.timerfd_settime(self._file, _ABSOLUTE, ctypes.byref(when), None)

    def _rang(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._file, 8)
        self._ring()

    def close(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        if self._file >= 0:
            self._loop.remove_reader(self._file)
            os.close(self._file)
            self._file = -1
