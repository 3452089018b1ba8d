"""Where a session runs, and so what it is held against: a GPU's ceilings, or a CPU's and its threads'."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from mha_deploy import machine
from mha_deploy.benchmark.ceilings import Yardsticks
from mha_deploy.benchmark.ceilings_cpu import cpu_yardsticks
from mha_deploy.benchmark.ceilings_gpu import gpu_yardsticks
from mha_deploy.manifest import Artifact
from mha_deploy.sessions import Placement, RoutedSession, Session, placements
from mha_deploy.sessions.stages import StagedSession, Stages
from mha_deploy.signature import Feeds

STAGED_RUNS = 50


@contextlib.contextmanager
def yardsticks_of(session: Session, placement: Placement) -> Iterator[Yardsticks]:
    """Those of what `session` runs on; of a CPU, with the threads of `placement`."""
    if isinstance(session, StagedSession):
        yield gpu_yardsticks(session.precision)
        return
    with cpu_yardsticks(replace(placement, device="cpu")) as found:
        yield found


def stages_of(session: Session, feeds: Feeds) -> tuple[Stages, ...]:
    """Runs on a device with an emptied cache, copies apart from computing; none for a session on the host."""
    if not isinstance(session, StagedSession):
        return ()
    return tuple(session.run_in_stages(feeds, cold=True) for _ in range(STAGED_RUNS))


def fallback_notices(device: str, provider: str) -> list[str]:
    """Where another device was asked for than the one that ran."""
    fell_back = device == "cuda" and provider.startswith("CPU")
    return [f"asked for {device}, which is not to be had here: ran on {provider}"] if fell_back else []


def route_notices(session: Session, artifact: Artifact, placement: Placement) -> list[str]:
    """Where the routes of a session at `placement` differ, and no one set of ceilings fits them all."""
    if isinstance(session, StagedSession):
        return []
    if isinstance(session, RoutedSession) and any(isinstance(each, StagedSession) for each in session.routes):
        return [
            "one of its routes runs on a device, the other on the CPU: the ceilings are the CPU's, and say "
            "nothing of the device, whose times include copies"
        ]
    threads = [each.threads or machine.usable_cpus() for each in placements(artifact, placement)]
    if len(set(threads)) == 1:
        return []
    listed = " and ".join(map(str, threads))
    return [
        f"its routes, the one for short requests first, have {listed} threads: the ceilings are those of "
        f"{max(threads)}"
    ]
