"""The process that `isolated.build_isolated` starts for one build; it talks to its parent in pickles.

The request, (path, options), comes on stdin, which the parent then leaves open: its end means that
the parent is gone. Messages go out on what was stdout, each a pair of a kind and what it says:

    "progress"     a method of Progress by name, and its arguments
    "line"         severity and text, as the library says it
    "built"        the fields of a BuiltPlan, less the module and the log
    "failed"       the error, one of mha-deploy's own
    "broken"       the text of any other error
    "interrupted"  nothing
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from mha_deploy.errors import MhaDeployError

if TYPE_CHECKING:
    from mha_deploy.tensorrt.log import Log
    from mha_deploy.tensorrt.options import BuildOptions

Send = Callable[[str, object], None]


def main() -> None:
    """Serve the one request on stdin."""
    send = _sender(_own_stdout())
    try:
        with open(0, "rb", closefd=False) as stdin:
            path, options = pickle.load(stdin)
        # A read of the descriptor: one of sys.stdin would hold its lock when the interpreter ends.
        threading.Thread(target=_end_with_parent, daemon=True).start()
        send("built", _build(path, options, send))
    except KeyboardInterrupt:
        send("interrupted", None)
    except MhaDeployError as error:
        _send_error(error, send)
    except Exception as error:
        traceback.print_exc()
        send("broken", f"{type(error).__name__}: {error}")


def _own_stdout() -> BinaryIO:
    """Stdout for messages alone; what anyone else prints there goes to stderr from now on."""
    stream = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return stream


def _sender(stream: BinaryIO) -> Send:
    lock = threading.Lock()  # the library logs from threads of its own

    def send(kind: str, said: object) -> None:
        message = pickle.dumps((kind, said))
        # A parent that listens no more is ending this process, and the library's frames, where this
        # is called, bear no exception.
        with lock, contextlib.suppress(BrokenPipeError):
            stream.write(message)
            stream.flush()

    return send


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


class _Told:
    """Progress that is passed on."""

    def __init__(self, send: Send) -> None:
        self._send = send

    def phase_start(self, phase: str, parent: str, steps: int) -> None:
        self._send("progress", ("phase_start", (phase, parent, steps)))

    def step(self, phase: str, done: int) -> None:
        self._send("progress", ("step", (phase, done)))

    def phase_end(self, phase: str) -> None:
        self._send("progress", ("phase_end", (phase,)))


def _build(path: Path, options: BuildOptions, send: Send) -> dict[str, Any]:
    from mha_deploy.tensorrt import build

    _send_lines_at_once(send)
    # Kept in this process, the library's last words would be lost with it; descriptor 2 is the
    # parent's file already.
    build.stderr_into = _as_it_is  # type: ignore[attr-defined]
    built = build.build_plan(path, options, progress=_Told(send))
    return {f.name: getattr(built, f.name) for f in fields(built) if f.name not in ("backend", "log")}


@contextlib.contextmanager
def _as_it_is(log: Log) -> Iterator[None]:  # noqa: ARG001 - in the place of stderr_into
    yield


def _send_lines_at_once(send: Send) -> None:
    """A crash leaves no time to send them later."""
    from mha_deploy.tensorrt.log import Log

    keep = Log.add

    def add(self: Log, severity: int, text: str) -> None:
        keep(self, severity, text)
        send("line", (severity, text))

    Log.add = add  # type: ignore[method-assign]


def _send_error(error: MhaDeployError, send: Send) -> None:
    try:
        whole = str(pickle.loads(pickle.dumps(error))) == str(error)
    except Exception:
        whole = False
    send(*(("failed", error) if whole else ("broken", f"{type(error).__name__}: {error}")))


if __name__ == "__main__":
    main()
    sys.exit()
