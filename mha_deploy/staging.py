"""Writing a file or a folder so that a reader sees the old one or the new one, never a half."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import os
import shutil
import signal
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from mha_deploy.errors import BundleError
from mha_deploy.targets import check_target, end_of_links, is_stream, pour

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def put_in_place(staging: Path, target: Path) -> None:
    """Give `staging` the name `target`; a folder that has it is removed."""
    if not target.exists():
        staging.rename(target)
        return
    if not _exchange(staging, target):
        # Without an atomic exchange the old folder steps aside for the moment between two renames.
        aside = target.with_name(f".{target.name}.previous-{os.getpid()}")
        target.rename(aside)
        try:
            staging.rename(target)
        except BaseException:
            if not target.exists():
                aside.rename(target)
            raise
        finally:
            if target.exists():
                _discard(aside)


@contextlib.contextmanager
def staged_folder(target: Path, place: Callable[[Path, Path], None] = put_in_place) -> Iterator[Path]:
    """A new folder beside `target`; when the block ends well it takes `target`'s place at once.

    When the block raises, is interrupted or is asked to stop (SIGTERM), the new folder is removed
    and what stood at `target` stands there still. What a killed run left is removed by the next.
    `place(new folder, target)` may give it another name instead, or leave it to be removed.

    Raises:
        BundleError: the folder cannot be written.
    """
    target = Path(os.path.abspath(target))  # noqa: PTH100 (resolve() would follow a link at the end)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target)
        staging = target.with_name(f".{target.name}.partial-{os.getpid()}")
        staging.mkdir()
    except OSError as error:
        raise BundleError(f"cannot write to {target.parent}: {error.strerror}") from error
    with stop_as_exception():
        try:
            yield staging
            place(staging, target)
        except OSError as error:
            raise BundleError(f"cannot write {target}: {error.strerror or error}") from error
        finally:
            _discard(staging)


@contextlib.contextmanager
def staged_file(target: Path) -> Iterator[Path]:
    """A path to write to, whose file takes `target`'s place when the block ends well.

    It lies beside `target`, or beside the file that a link leads to, which is then the one replaced, and
    gets the permissions of the old one. What a killed run left is removed by the next. Where `target` is
    a device, a pipe or an open file of this process, the bytes go into that when the block ends well.

    Raises:
        BundleError: the file cannot be written, or its folder is not there (and is not made).
    """
    check_target(target)
    staged = _staged_for_stream if is_stream(target) else _staged_beside
    try:
        with staged(target) as staging:
            yield staging
    except OSError as error:
        raise BundleError(f"cannot write {target}: {error.strerror or error}") from error


@contextlib.contextmanager
def _staged_beside(target: Path) -> Iterator[Path]:
    # Writers look at the suffix that they were given, which a linked file need not have.
    file, suffix = end_of_links(target), target.suffix
    staging = file.with_name(f".{file.name}.partial-{os.getpid()}{suffix}")
    with contextlib.suppress(OSError):
        _remove_halves(file, suffix)
    try:
        yield staging
        if file.exists():
            staging.chmod(stat.S_IMODE(file.stat().st_mode))
        staging.replace(file)
    finally:
        with contextlib.suppress(OSError):
            staging.unlink()


@contextlib.contextmanager
def _staged_for_stream(target: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mha-deploy-") as folder:
        staging = Path(folder) / f"whole{target.suffix}"
        yield staging
        pour(staging, target)


def make_folder(folder: Path) -> None:
    """Raises BundleError where it is not there and cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BundleError(f"cannot write to {folder}: {error.strerror}") from error


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold `folder` for a read and a write that belong together; other processes and threads wait.

    Raises:
        BundleError: it is not there, or cannot be opened.
    """
    try:
        import fcntl
    except ImportError:  # no such lock outside POSIX: there two writers at once may lose one's change
        yield
        return
    while True:
        try:
            handle = os.open(folder, os.O_RDONLY)
        except OSError as error:
            raise BundleError(f"cannot open {folder}: {error.strerror}") from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            if not _is_still(handle, folder):  # another folder took its place while this one was waited for
                continue
            yield
            return
        finally:
            os.close(handle)


def _is_still(handle: int, folder: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), folder.stat())
    except FileNotFoundError:
        return False


def as_umask_says(path: Path) -> None:
    """Give a file the usual mode; safetensors writes for the owner alone."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step (Linux `renameat2`); False where the system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL):
        return False
    raise OSError(code, os.strerror(code), str(other))


def _remove_abandoned(target: Path) -> None:
    """A killed run's half, or the old folder that it had set aside: back in place where that is empty."""
    name = glob.escape(target.name)
    for leftover in (*target.parent.glob(f".{name}.partial-*"), *target.parent.glob(f".{name}.previous-*")):
        owner = leftover.name.rsplit("-", 1)[1]
        if not owner.isdigit() or (int(owner) != os.getpid() and _alive(int(owner))):
            continue
        if leftover.name.startswith(f".{target.name}.previous-") and not target.exists():
            leftover.rename(target)
        else:
            _discard(leftover)


def _remove_halves(target: Path, suffix: str) -> None:
    """Files that killed runs had begun, to be `target`."""
    for half in target.parent.glob(f"{glob.escape(f'.{target.name}.partial-')}*{glob.escape(suffix)}"):
        owner = half.name.removeprefix(f".{target.name}.partial-").removesuffix(suffix)
        if owner.isdigit() and not _alive(int(owner)) and half.is_file():
            half.unlink(missing_ok=True)


def _discard(path: Path) -> None:
    """Remove a folder, or the link or file that stood where a folder was to go."""
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Put off Ctrl-C until the block ends: importing a large package does not survive one half-way."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


@contextlib.contextmanager
def stop_as_exception() -> Iterator[None]:
    """SIGTERM raises SystemExit in the main thread, so that clean-up runs.

    What the block itself makes of the signal and leaves so stays.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is stop:
            signal.signal(signal.SIGTERM, before)
