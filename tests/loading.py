"""Targets, plans and servers that the tests of load have in common."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from contextlib import contextmanager

from conftest import small_spec

from mha_deploy.errors import InputError
from mha_deploy.load import (
    Arrivals,
    LoadOptions,
    open_plan,
    parse_lengths,
    run_load,
    server_target,
)
from mha_deploy.load.drive import drive
from mha_deploy.load.inputs import Inputs
from mha_deploy.load.target import Target

LENGTHS = parse_lengths("uniform:1:64")


QUICK = LoadOptions(warm_up=4, sample=8, drain_s=10.0)


def poisson(count, rate=400.0):
    return open_plan(Arrivals("poisson", rate), LENGTHS, count)


def run(port, plan, options=QUICK, checker=None, **how):
    target = server_target(f"http://127.0.0.1:{port}", 64, **how)
    return run_load(target, plan, options, *([checker] if checker else []))


def others(report):
    return {name: count for name, count in report.outcomes.items() if count}


class Scripted(Target):
    """Answers with what `script(index)` says, as soon as the loop is free; None leaves it unanswered."""

    name = "scripted"

    def __init__(self, script):
        self.script, self.sent = script, []
        self.inputs = Inputs.for_signature(small_spec().signature, 64)

    async def open(self, _lengths):
        self.loop = asyncio.get_running_loop()

    def send(self, index, _length, done):
        self.sent.append(index)
        outcome = self.script(index)
        if outcome is not None:
            self.loop.call_soon(lambda: done(index, outcome, time.monotonic(), b"", outcome.name))

    def decode(self, _answer):
        raise InputError("no tensor")

    async def close(self):
        pass


def driven(script, plan, **options):
    async def go():
        target = Scripted(script)
        await target.open(plan.lengths)
        return target, await drive(target, plan, **options)

    return asyncio.run(go())


@contextmanager
def listening(answer):
    """A server that reads what comes and sends `answer`, then closes."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.05)
    ended = threading.Event()

    def serve():
        while not ended.is_set():
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            threading.Thread(target=reply, args=(connection,), daemon=True).start()

    def reply(connection):
        with connection:
            if connection.recv(1 << 20):
                connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        ended.set()
        thread.join()
        listener.close()
