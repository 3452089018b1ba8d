"""What the benchmark drives: this project's server, and the peers, each in an environment of its own."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mha_deploy.bundle import CANONICAL
from mha_deploy.errors import InputError
from mha_deploy.load import HttpTarget, LoadOptions, closed_plan, parse_lengths, run_load, server_target
from mha_deploy.load.encoding import Encoding, Pieces, Reply
from mha_deploy.load.inputs import Inputs
from mha_deploy.load.target import Target
from mha_deploy.machine import usable_cpus
from mha_deploy.signature import Array, Feeds, Signature

HERE = Path(__file__).parent
PEERS = HERE / "peers"
ENVIRONMENTS = HERE.parent / ".envs"
OURS = "mha-deploy"
FLOOR = "floor"
NAMES = ("triton", "litserve", "mlserver", "ray")
PEER_VARIANTS = ("plain", "batched")
OUR_ARGUMENTS = {
    "default": (),
    "as exported": ("--artifact", CANONICAL),
    "packed": ("--artifact", "packed", "--mode", "fast"),
    "bf16": (),
}
LONGEST = 160
START_S = 120.0


class RawEncoding(Encoding):
    """The tensor's bytes and nothing else (Ray Serve)."""

    def __init__(self, path: str, width: int) -> None:
        self.path, self.headers, self._width = path, {"Content-Type": "application/octet-stream"}, width

    def body(self, feeds: Feeds) -> tuple[Pieces, dict[str, str]]:
        return [feeds["x"].tobytes()], {}

    def answer(self, reply: Reply) -> Array:
        return self.rows(reply.body)

    def rows(self, data: bytes) -> Array:
        """[length, d_model] from float32 bytes."""
        if not data or len(data) % (4 * self._width):
            raise InputError(f"{len(data)} bytes; expected float32 rows of {self._width}")
        return np.frombuffer(data, np.float32).reshape(-1, self._width)


class Base64Encoding(RawEncoding):
    """The tensor's bytes as base64 within JSON: `before` and `after` it, and where the answer has its own."""

    def __init__(self, path: str, width: int, before: str, after: str, place: tuple[str | int, ...]) -> None:
        super().__init__(path, width)
        self.headers = {"Content-Type": "application/json"}
        self._before, self._after, self._place = before.encode(), after.encode(), place

    def body(self, feeds: Feeds) -> tuple[Pieces, dict[str, str]]:
        return [self._before, base64.b64encode(feeds["x"].tobytes()), self._after], {}

    def answer(self, reply: Reply) -> Array:
        try:
            value = json.loads(reply.body)
            for key in self._place:
                value = value[key]
            return self.rows(base64.b64decode(value))
        except (ValueError, LookupError, TypeError) as error:
            raise InputError(f"an answer that cannot be read: {error}") from error


def encoding_of(name: str, width: int) -> Encoding:
    """The best that each peer without binary tensors offers."""
    if name == "litserve":
        return Base64Encoding("/predict", width, '{"x":"', '"}', ("y",))
    if name == "mlserver":
        head = '{"inputs":[{"name":"x","shape":[1],"datatype":"BYTES","data":["'
        return Base64Encoding("/v2/models/block/infer", width, head, '"]}]}', ("outputs", 0, "data", 0))
    return RawEncoding("/", width)


@dataclass(frozen=True, slots=True)
class System:
    """A server and one way to run it: `variant` is one of `PEER_VARIANTS`, of ours one of `OUR_ARGUMENTS`,
    of the floor (see floor.py) "default".

    By default ours runs what `optimize` chose in fp32. As exported, it runs the graph that the peers run.
    Packed, the same weights in its packed layout, with requests of any lengths in a batch. In bf16, what
    `optimize` chose among bf16 engines: it is given that bundle (`subject.in_bf16`).
    """

    name: str
    variant: str

    def __str__(self) -> str:
        return self.name if self.variant == "default" else f"{self.name} ({self.variant})"


def declared(name: str) -> dict[str, Any]:
    """What a peer is and how it is run: its peer.toml, and what it requires."""
    files = PEERS / name
    said = tomllib.loads((files / "peer.toml").read_text(encoding="utf-8"))
    return {**said, "requirements": (files / "requirements.txt").read_text(encoding="utf-8").split()}


def prepare(name: str) -> str:
    """Install a peer's environment where it is missing, and anew where its requirements or pins changed.

    The reason where that fails, else "".
    """
    folder, files = ENVIRONMENTS / name, PEERS / name
    wanted, pinned = files / "requirements.txt", files / "constraints.txt"
    stamp, digest = folder / ".installed", _digest(wanted, pinned)
    if stamp.exists() and stamp.read_text(encoding="utf-8") == digest:
        return ""
    python = folder / "bin" / "python"
    for command in (
        # Cleared: pip leaves what the old requirements brought and the new ones do not name.
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        [str(python), "-m", "pip", "install", "--quiet", "-r", str(wanted), "-c", str(pinned)],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"not installed: {(done.stderr.strip() or 'pip failed').splitlines()[-1]}"
    stamp.write_text(digest, encoding="utf-8")
    return ""


def _digest(*files: Path) -> str:
    return "".join(f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n" for file in files)


def free_port() -> int:
    """A port that is free, and so are the two after it."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = int(first.getsockname()[1])
        try:
            for following in (port + 1, port + 2):
                socket.create_server(("127.0.0.1", following)).close()
            return port
        except OSError:
            continue


def command_of(system: System, bundle: Path, port: int) -> list[str]:
    """What starts it; a peer is given the whole machine, a worker for each core, as ours takes it."""
    if system.name == OURS:
        how = OUR_ARGUMENTS[system.variant]
        return [sys.executable, "-m", "mha_deploy", "serve", str(bundle), "--port", str(port), *how]
    model = str((bundle / "model.onnx").resolve())
    where = ["--model", model, "--port", str(port)]
    workers = ["--workers", str(usable_cpus())]
    if system.name == FLOOR:
        return [sys.executable, str(HERE / "floor.py"), *where, *workers]
    python = ENVIRONMENTS / system.name / "bin" / "python"
    serve = PEERS / system.name / "serve.py"
    return [str(python), str(serve), *where, "--variant", system.variant, *workers]


@dataclass(frozen=True, slots=True)
class Started:
    """A system that answers, as a target, and the session that all of its processes are in (on Linux)."""

    target: Target
    session: int

    def cpu_s(self) -> float:
        """CPU time that its processes have taken, all threads, in the kernel too; NaN without /proc."""
        # Its own and its ended children's.
        found = [sum(map(int, fields[11:15])) for _, fields in self._processes()]
        return sum(found) / os.sysconf("SC_CLK_TCK") if found else math.nan

    def pause(self) -> None:
        """Stop its processes where they are: some are busy while nobody asks, at the expense of others."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let them go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for pid, _ in self._processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _processes(self) -> Iterator[tuple[int, list[str]]]:
        """Process numbers, and what /proc/*/stat says of each, from its state on."""
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # it has ended
                fields = path.read_text(encoding="utf-8").rpartition(")")[2].split()
                if int(fields[3]) == self.session:
                    yield int(path.parent.name), fields


@contextlib.contextmanager
def started(system: System, bundle: Path, signature: Signature, log: Path) -> Iterator[Started]:
    """The system, up and answering; ended when the block ends.

    Raises:
        InputError: it did not answer within START_S, or ended before; its log says why.
    """
    port = free_port()
    extra = PEERS if system.name != OURS else HERE.parents[1]
    environment = {**os.environ, "PYTHONPATH": str(extra), "RAY_USAGE_STATS_ENABLED": "0"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command_of(system, bundle, port),
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    try:
        it = Started(_answering(system, port, signature, process, log), process.pid)
        try:
            yield it
        finally:
            it.resume()  # or it would not hear that it is to end
    finally:
        _end(process)


def _answering(
    system: System, port: int, signature: Signature, process: subprocess.Popen[bytes], log: Path
) -> Target:
    deadline = time.monotonic() + START_S
    plan, options = closed_plan(1, parse_lengths("fixed:8"), 1), LoadOptions(warm_up=0, sample=1, drain_s=20)
    while time.monotonic() < deadline and process.poll() is None:
        try:
            target = _target(system, port, signature)
            report = run_load(target, plan, options)
            if report.outcomes["answered"] and report.check.passed:
                return target
        except InputError:
            pass
        time.sleep(0.25)
    lines = log.read_text(errors="replace").strip().splitlines()
    code = process.poll()
    what = f"did not answer within {START_S:g} s" if code is None else f"ended with {code} before it answered"
    raise InputError(f"{system} {what}; last line of its log: {lines[-1:]}")


def _target(system: System, port: int, signature: Signature) -> Target:
    url = f"http://127.0.0.1:{port}"
    if system.name == OURS:
        return server_target(url, LONGEST)
    if system.name in ("triton", FLOOR):
        return server_target(url, LONGEST, model="block")
    inputs = Inputs.for_signature(signature, LONGEST)
    width = int(signature.inputs[0].shape[-1])
    return HttpTarget(str(system), "127.0.0.1", port, encoding_of(system.name, width), inputs)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the whole session that the server is in; Ray's daemons are in it too."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(15)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
