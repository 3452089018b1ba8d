"""A build in a process of its own, which a crash inside TensorRT ends instead of this one.

TensorRT for RTX 1.7 dies of SIGSEGV on some valid graphs, such as an fp16 `Attention` with one
tensor as query, key and value.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TypeAlias

from mha_deploy.tensorrt.backend import load_backend
from mha_deploy.tensorrt.build import BuiltPlan
from mha_deploy.tensorrt.log import INFO, Log, recording
from mha_deploy.tensorrt.messages import BuildError, CompilerCrash
from mha_deploy.tensorrt.options import BuildOptions
from mha_deploy.tensorrt.progress import SILENT, Progress

# -P: the folder that the parent stands in is no source of modules unless it is one for the parent.
_COMMAND = ("-P", "-X", "faulthandler", "-m", "mha_deploy.tensorrt.worker")
_GRACE_SECONDS = 5.0  # from Ctrl-C, which the next step of a build meets, to the end by force

_Message: TypeAlias = tuple[str, Any]
_Messages: TypeAlias = "queue.SimpleQueue[_Message]"


def build_isolated(onnx_path: Path, options: BuildOptions, *, progress: Progress = SILENT) -> BuiltPlan:
    """`build.build_plan` in a child process, with the same plan, errors, progress and log.

    The child is gone when this returns or raises, also by Ctrl-C or by an error of `progress`. What
    it writes to stderr goes into the log, and this process's stderr is left alone.

    Raises:
        CompilerCrash: also when TensorRT takes the child down by a signal.
        BuildError: also when the child ends without an answer, or fails by what is no MhaDeployError.
        MhaDeployError: what else `build_plan` raises.
    """
    backend = load_backend(options.backend)
    request = pickle.dumps((Path(onnx_path), options))
    messages: _Messages = queue.SimpleQueue()
    with recording() as log:
        with _child(messages, log) as process:
            _ask(process, request)
            kind, said = _answer(messages, log, progress)
        if kind == "built":
            return BuiltPlan(backend=backend, log=tuple(map(str, log.lines)), **said)
        raise _error(kind, said, process.returncode)


def _error(kind: str, said: Any, status: int) -> BaseException:
    if kind == "failed" and isinstance(said, BaseException):
        return said
    if kind == "interrupted" or status == -signal.SIGINT:
        return KeyboardInterrupt()
    if kind == "broken":
        return BuildError(f"the build failed: {said}. The log has more; please report it.")
    if status < 0:
        return CompilerCrash(
            f"TensorRT crashed (signal {-status}, {_signal_name(-status)}) on this graph; the decomposed "
            "form of the attention (mha-deploy optimize --portable) may pass."
            + (" Signal 9 may also be the system out of memory." if status == -9 else "")
        )
    return BuildError(
        f"the process that builds ended with status {status} and without an answer; the log has what it said."
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unnamed"


def _answer(messages: _Messages, log: Log, progress: Progress) -> _Message:
    """The message that ends a build; the others go where they belong."""
    methods: dict[str, Callable[..., None]] = {
        "phase_start": progress.phase_start,
        "step": progress.step,
        "phase_end": progress.phase_end,
    }
    while True:
        kind, said = messages.get()
        if kind == "line":
            log.add(*said)
        elif kind == "progress":
            method, arguments = said
            methods[method](*arguments)
        else:
            return kind, said


def _ask(process: subprocess.Popen[bytes], request: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # its end is seen where its answer is read
        process.stdin.write(request)
        process.stdin.flush()


@contextlib.contextmanager
def _child(messages: _Messages, log: Log) -> Iterator[subprocess.Popen[bytes]]:
    """A worker whose messages arrive in `messages`, the last one of kind "ended".

    It is gone when the block ends, of itself or by force, and its last lines are in `log`.
    """
    with tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(
            [sys.executable, *_COMMAND],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env={**os.environ, "PYTHONPATH": _module_path()},
        )
        reader = threading.Thread(target=_read, args=(process.stdout, messages), daemon=True)
        try:
            reader.start()
            yield process
        except BaseException:
            if process.poll() is None and os.name == "posix":
                process.send_signal(signal.SIGINT)
            raise
        finally:
            try:
                _reap(process)
            finally:
                _close(process, reader)
                _add_rest(messages, stderr, log)


def _module_path() -> str:
    """Where this process finds modules, so that the child runs the same code."""
    return os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)


def _read(stream: IO[bytes], messages: _Messages) -> None:
    """Until the child's end, which may come in the middle of a message."""
    with contextlib.suppress(Exception):
        while True:
            messages.put(pickle.load(stream))  # from the child alone: nobody else has the pipe
    messages.put(("ended", None))


def _reap(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of a child that has answered or was asked to end."""
    try:
        process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:  # a second Ctrl-C does not wait
        if process.poll() is None:
            process.kill()
        process.wait()


def _close(process: subprocess.Popen[bytes], reader: threading.Thread) -> None:
    if reader.ident is not None:
        reader.join()
    for stream in (process.stdin, process.stdout):
        with contextlib.suppress(BrokenPipeError):
            if stream is not None:
                stream.close()


def _add_rest(messages: _Messages, stderr: IO[bytes], log: Log) -> None:
    """The lines that nobody fetched, and what the child wrote to stderr."""
    while not messages.empty():
        kind, said = messages.get()
        if kind == "line":
            log.add(*said)
    stderr.seek(0)
    for text in stderr.read().decode(errors="replace").splitlines():
        log.add(INFO, f"stderr: {text}")
