"""The server's life: listen, serve, and on SIGTERM refuse, drain and end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

from mha_deploy.bundle import Bundle
from mha_deploy.errors import InputError, MissingError
from mha_deploy.runner import DEFAULT_OPTIONS, BatchRunner, RunnerOptions
from mha_deploy.serving.limits import DEFAULT_LIMITS, Limits
from mha_deploy.serving.model import Model
from mha_deploy.serving.security import LOOPBACK, NO_TLS, Tls, check_address, is_loopback
from mha_deploy.sessions import DEFAULT_PLACEMENT, Placement

# What is left of answers when the grace is over has this long to reach its clients.
_FLUSH_S = 1.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# A worker that comes back from a run waits until the event loop lets go of the interpreter, which under load
# it does when asked to, after this long. Python's own 5 ms are longer than most runs: at 600 requests/s on
# two cores p99 was 70 ms with them and 17 ms with 0.2 (medians of 5 turns).
_SWITCH_S = 0.0002


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Where to listen, and for whom.

    `port` 0 lets the system choose; `grpc_port` 0 means no gRPC. An address that other machines reach
    needs a token or `insecure`. On SIGTERM or SIGINT accepted requests have `grace_s` to finish.

    Raises:
        InputError: an address that others reach, with neither a token nor `insecure`; a grace that is no
            number of at least 0 (inf: as long as it takes).
    """

    host: str = LOOPBACK
    port: int = 8000
    grpc_port: int = 0
    token: str = field(default="", repr=False)
    insecure: bool = False
    tls: Tls = NO_TLS
    grace_s: float = 30.0
    limits: Limits = DEFAULT_LIMITS

    def __post_init__(self) -> None:
        check_address(self.host, self.token, insecure=self.insecure)
        if not self.grace_s >= 0:
            raise InputError(f"a grace of {self.grace_s} s; expected 0 or more")


@dataclass(frozen=True, slots=True)
class ServeReport:
    """What a server did: `received` is the sum of `outcomes` once it has ended."""

    received: int
    outcomes: dict[str, int]
    uptime_s: float

    def to_json(self) -> dict[str, Any]:
        return {"received": self.received, "outcomes": self.outcomes, "uptime_s": round(self.uptime_s, 3)}


class Server:
    """A runner behind HTTP and, where asked, gRPC. Used on one event loop: `start`, then `stop`.

    The runner is the caller's until `stop`, which closes it.
    """

    def __init__(self, runner: BatchRunner, options: ServeOptions) -> None:
        self.options, self.model = options, Model(runner, options.limits)
        self.port = self.grpc_port = 0
        self._began = time.monotonic()
        self._closing: list[Callable[[float], Coroutine[Any, Any, None]]] = []
        self._listener: asyncio.Server | None = None
        self._sampler: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        scheme = "https" if self.options.tls else "http"
        host = self.options.host
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    async def start(self) -> None:
        """Listen; `port` and `grpc_port` then hold the real ones.

        Raises:
            InputError: an address that cannot be had, or TLS files that cannot be used.
            MissingError: aiohttp, or for gRPC tritonclient, is not installed.
        """
        try:
            await self._listen()
        except BaseException:
            await self._leave()  # an event loop does not end while somebody listens
            raise
        self._sampler = asyncio.get_running_loop().create_task(self._sample())

    async def _listen(self) -> None:
        options, loop = self.options, asyncio.get_running_loop()
        front = _load_http().HttpFront(self.model, options.token)
        context = options.tls.context() if options.tls else None
        try:
            self._listener = await loop.create_server(
                front.protocol,
                options.host,
                options.port,
                ssl=context,
                backlog=512,
                ssl_handshake_timeout=options.limits.header_s if context else None,
            )
        except (OSError, UnicodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "no name of a host is written so"
            raise InputError(f"cannot listen on {options.host}:{options.port}: {reason}") from error
        self.port = self._listener.sockets[0].getsockname()[1]
        self._closing.append(front.close)
        if options.grpc_port:
            from mha_deploy.serving.grpc import GrpcFront

            rpc = GrpcFront(self.model, front.budget, options.token)
            self._closing.append(rpc.close)
            self.grpc_port = await rpc.start(options.host, options.grpc_port, options.tls)

    async def _leave(self) -> None:
        """Listen no more, and end the connections once their answers are out."""
        if self._listener is not None:
            self._listener.close()
        for close in self._closing:
            await close(_FLUSH_S)

    async def stop(self, grace_s: float) -> ServeReport:
        """Two phases: refuse what is new and finish what was accepted, for up to `grace_s`; then fail the
        rest, each with an answer that says so."""
        self.model.draining = True
        deadline = time.monotonic() + grace_s
        while self.model.stats.in_progress and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
        left = max(0.0, deadline - time.monotonic())
        await asyncio.to_thread(self.model.runner.close, left)
        await self._leave()
        if self._sampler is not None:
            self._sampler.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sampler
        stats = self.model.stats
        counts = {outcome.value: count for outcome, count in sorted(stats.outcomes.items())}
        return ServeReport(stats.received, counts, time.monotonic() - self._began)

    async def _sample(self) -> None:
        """Close a second of the history as each one ends; none twice, though a timer rings early."""
        end = int(time.time()) + 1
        while True:
            await asyncio.sleep(end - time.time())
            self.model.stats.close_second(end, self.model.runner.load())
            end = max(end, int(time.time())) + 1


def serve(
    bundle: Bundle,
    artifact: str = "",
    *,
    placement: Placement = DEFAULT_PLACEMENT,
    runner_options: RunnerOptions = DEFAULT_OPTIONS,
    options: ServeOptions = ServeOptions(),
    announce: Callable[[Server], None] = lambda _: None,
    last: bool = False,
) -> ServeReport:
    """Serve an artifact of `bundle` until SIGTERM or SIGINT; what was done until then.

    `announce` is called once the server is ready. A second signal ends the grace at once, and none does
    more than that until this returns. With `last` nothing follows in this process, and what signals come
    until its end are ignored. Call it from the main thread.

    Raises:
        BundleError, MissingError: as `Bundle.open_session`; MissingError also without aiohttp.
        InputError: an address or TLS files that cannot be used.
    """
    _load_http()
    runner = BatchRunner.over(bundle, artifact, placement=placement, options=runner_options)
    with _handlers_restored(last=last), _switching_soon():
        try:
            server = Server(runner, options)
            with asyncio.Runner(loop_factory=fastest_loop()) as loop:
                return loop.run(_until_signal(server, announce))
        finally:
            runner.close(0.0)


@contextlib.contextmanager
def _switching_soon() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextlib.contextmanager
def _handlers_restored(*, last: bool) -> Iterator[None]:
    """What signals did before they do again, or nothing where the block ended well and was the `last`."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
        if last:
            before = dict.fromkeys(_SIGNALS, signal.SIG_IGN)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def _until_signal(server: Server, announce: Callable[[Server], None]) -> ServeReport:
    loop, asked, hurried = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

    def stop() -> None:
        (hurried if asked.is_set() else asked).set()

    def hear(_number: int, _frame: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and all is over
            loop.call_soon_threadsafe(stop)

    # Not the loop's own handlers: while it closes it puts the default action in their place, which kills.
    for number in _SIGNALS:
        signal.signal(number, hear)
    await server.start()
    # What was made until here lives as long as the server: no collection need look at it again.
    gc.collect()
    gc.freeze()
    announce(server)
    await asked.wait()
    stopping = loop.create_task(server.stop(server.options.grace_s))
    hurry = loop.create_task(hurried.wait())
    await asyncio.wait((stopping, hurry), return_when=asyncio.FIRST_COMPLETED)
    if not stopping.done():
        stopping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await stopping
        return await server.stop(0.0)
    hurry.cancel()
    return await stopping


def _load_http() -> Any:
    try:
        return importlib.import_module("mha_deploy.serving.http")
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "aiohttp":
            raise
        raise MissingError(
            "serving needs aiohttp; install it with: pip install 'mha-deploy[serve]'"
        ) from error


def fastest_loop() -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop's where it is installed, else asyncio's own."""
    try:
        return importlib.import_module("uvloop").new_event_loop  # type: ignore[no-any-return]
    except ImportError:
        return asyncio.new_event_loop


def warnings_of(options: ServeOptions) -> list[str]:
    """What whoever starts a server with these options should know."""
    if is_loopback(options.host):
        return []
    said = []
    if not options.token:
        said.append(f"{options.host} is served to whoever reaches it (--insecure)")
    elif not options.tls:
        said.append("the token and the tensors travel unencrypted; use --tls-cert and --tls-key")
    return said
