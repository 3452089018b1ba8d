"""The parent's end of the pipe to a peer's process (see `worker.py` for what is said)."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

WORKER = Path(__file__).parent / "worker.py"
# A first run may compile; no turn comes near this.
PATIENCE_S = 900.0
FAREWELL_S = 10.0


class PeerError(Exception):
    """A peer refused, failed, ended or did not answer; the message is one line."""


class Connection:
    """A started peer; `with` ends it. After it has ended, or was too late, every call raises PeerError."""

    def __init__(self, name: str, python: Path, module: Path, log: Path) -> None:
        self.name, self._log = name, log
        log.parent.mkdir(parents=True, exist_ok=True)
        # A path for this project's own modules is not for other environments.
        surroundings = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                [str(python), str(WORKER), str(module)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=surroundings,
            )
        self._received = b""

    def ask(self, message: Mapping[str, Any], *, patience_s: float = PATIENCE_S) -> dict[str, Any]:
        """One line there, one line back.

        Raises:
            PeerError: the peer answered with an error, has ended, or took more than `patience_s`.
        """
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps(message).encode() + b"\n")
            stdin.flush()
        except (OSError, ValueError) as error:
            raise self._ended() from error
        reply: dict[str, Any] = json.loads(self._line(patience_s))
        if "error" in reply:
            raise PeerError(reply["error"])
        return reply

    def _line(self, patience_s: float) -> bytes:
        stdout = self._process.stdout
        assert stdout is not None
        end = time.monotonic() + patience_s
        while b"\n" not in self._received:
            ready, _, _ = select.select([stdout], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                self._process.kill()
                self._process.wait()
                raise PeerError(f"no answer within {patience_s:g} s, so it was ended")
            arrived = os.read(stdout.fileno(), 1 << 16)
            if not arrived:
                raise self._ended()
            self._received += arrived
        line, self._received = self._received.split(b"\n", 1)
        return line

    def _ended(self) -> PeerError:
        status = self._process.wait(FAREWELL_S)
        if b"\n" in self._received:  # why it could not even start
            reply = json.loads(self._received.split(b"\n", 1)[0])
            return PeerError(reply.get("error", f"the process ended with status {status}"))
        return PeerError(f"the process ended with status {status}; see {self._log}")

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # it had ended with a line unread
                pipe.close()
        try:
            self._process.wait(FAREWELL_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
