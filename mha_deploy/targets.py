"""Where a path to write to leads: to a file, old or new, or to a stream, which has no place to be given."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from pathlib import Path

from mha_deploy.errors import BundleError

_MOST_LINKS = 40  # as many as Linux follows


def check_target(path: Path) -> None:
    """Say before any work that nothing can be written to `path`.

    Raises:
        BundleError: it names no file, one in a folder that is not there, a descriptor that is not open,
            a socket or a block device.
    """
    if not path.name:
        raise BundleError(f"cannot write {path}: it names no file")
    for folder in (path.parent, end_of_links(path).parent):
        if not folder.is_dir() and _descriptor(path) < 0:
            raise BundleError(f"cannot write {path}: there is no folder {folder}")
    mode = _mode(path)
    if mode == 0 and _descriptor(path) >= 0:
        raise BundleError(f"cannot write {path}: descriptor {_descriptor(path)} is not open")
    for kind, is_kind in {"socket": stat.S_ISSOCK, "block device": stat.S_ISBLK}.items():
        if is_kind(mode) and not is_stream(path):
            raise BundleError(f"cannot write {path}: it is a {kind}; expected a file, a pipe or a terminal")


def is_stream(path: Path) -> bool:
    """Whether bytes are to go into what stands at `path`: a character device, a pipe, or a file that this
    process holds open, such as /dev/stdout, whose holders would not see another in its place."""
    mode = _mode(path)
    return _descriptor(path) >= 0 or stat.S_ISCHR(mode) or stat.S_ISFIFO(mode)


def pour(whole: Path, stream: Path) -> None:
    """Copy the bytes of a file into what stands at `stream`.

    Raises:
        OSError: it takes none, or no more.
    """
    descriptor = _descriptor(stream)
    # An open file is written on from where it is; opened anew it would be written over from its start.
    into = os.dup(descriptor) if descriptor >= 0 else os.open(stream, os.O_WRONLY | os.O_NOCTTY)
    with whole.open("rb") as source, os.fdopen(into, "wb") as sink:
        shutil.copyfileobj(source, sink)


def end_of_links(path: Path) -> Path:
    """The file that `path` names once links are followed; it need not be there."""
    return Path(os.path.realpath(path))  # unlike Path.resolve it does not raise on links in a circle


def _mode(path: Path) -> int:
    """Kind and permissions of what stands there; 0 where nothing does.

    Raises:
        BundleError: that cannot be seen.
    """
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise BundleError(f"cannot write {path}: {error.strerror}") from error


def _descriptor(path: Path) -> int:
    """The descriptor of this process that `path` names, as /dev/stdout and /dev/fd/63 do; -1 for none."""
    ours = os.path.realpath("/proc/self/fd")
    with contextlib.suppress(OSError):
        for _ in range(_MOST_LINKS):
            if path.name.isdecimal() and os.path.realpath(path.parent) == ours:
                return int(path.name)
            path = path.parent / path.readlink()  # raises where it is no link
    return -1
