"""The search: every candidate through the gate, those that pass in turns at every size, and the choice."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from mha_deploy import machine
from mha_deploy.benchmark import Turn, random_feeds, session_turn, watch
from mha_deploy.benchmark.ceilings import COMPUTE
from mha_deploy.benchmark.ceilings_cpu import cpu_matmul
from mha_deploy.benchmark.ceilings_gpu import gpu_yardsticks
from mha_deploy.benchmark.turns import Grid, cells_of, optimum
from mha_deploy.bundle import CANONICAL, Bundle, on_one_export
from mha_deploy.cases import QUICK, Case, describe, standard_cases
from mha_deploy.errors import BundleError, CheckError, InputError, MhaDeployError, MissingError
from mha_deploy.manifest import Artifact, Choice
from mha_deploy.precision import Precision
from mha_deploy.ragged import Request
from mha_deploy.search.candidate import Candidate
from mha_deploy.search.candidates import all_candidates
from mha_deploy.search.choice import Size, choose
from mha_deploy.search.gate import Verdict, gate
from mha_deploy.search.measuring import CLEARLY_SLOWER, FINALISTS, HEAT_ROUNDS, race
from mha_deploy.search.record import Record, identity
from mha_deploy.search.recorded import Found
from mha_deploy.search.report import (
    BASELINE,
    FAILED,
    NOT_ALLOWED,
    NOT_HERE,
    PASSED,
    Measured,
    SearchReport,
    Tried,
)
from mha_deploy.search.routing import routed_artifact
from mha_deploy.search.sizes import default_sizes
from mha_deploy.sessions import DEFAULT_PLACEMENT, Placement, Session, length_of
from mha_deploy.signature import Sizes
from mha_deploy.verification import Judge

SECONDS = 3.0


@on_one_export
def optimize(
    bundle: Bundle,
    *,
    allow: Sequence[Precision] = (),
    grid: Grid | None = None,
    seconds: float = SECONDS,
    placement: Placement = DEFAULT_PLACEMENT,
    candidates: Sequence[Candidate] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> SearchReport:
    """Find the fastest way to run the block here among those that pass, and choose it for this machine.

    `allow` names precisions beside fp32: nobody gets coarser answers unasked. `seconds` are measured
    at each size, over all candidates together; `grid` gives sizes by dim name (others at the dim's
    opt), and without it few sizes from short to long are taken. `candidates` are tried in place of all
    there are. What was found before under the same conditions is taken from the bundle's record.

    Raises:
        InputError: `seconds` is not above 0.
        FeedError: the grid names an unknown dim or a size out of range.
        BundleError: the bundle's folder cannot be written, or its real inputs hold NaN or inf, or it was
            exported again meanwhile.
        MissingError: no candidate runs here.
        CheckError: none that runs passes.
    """
    if not 0 < seconds < math.inf:
        raise InputError(f"seconds = {seconds}; expected a number above 0")
    cells = cells_of(bundle.spec, grid, optimum(bundle.spec)) if grid else default_sizes(bundle.spec)
    allowed = (Precision.FP32, *(Precision(each) for each in allow if each != Precision.FP32))
    record = Record.load(bundle.folder, bundle.held)
    record.save({})  # learns before anything is measured whether it can
    search = _Search(bundle, placement, seconds, progress, record, bundle.finite_inputs())
    with search.sessions:
        for candidate in candidates or all_candidates():
            search.try_out(candidate, allowed)
        names = [each.name for each in search.tried if each.outcome == PASSED]
        if not names:
            raise _none(search.tried)
        measured = [search.time(sizes) for sizes in cells]
    route = choose([_size(each) for each in measured], names)
    single = search.contenders[route.short].artifact
    artifact = (
        single
        if route.single
        else routed_artifact(single, search.contenders[route.long].artifact, route.up_to_length)
    )
    files = tuple(record.sha256 for record in artifact.files)
    threads = placement.threads or machine.usable_cpus()
    bundle.choose(
        artifact,
        Choice(machine.fingerprint(), placement.device, threads, artifact.name, files),
    )
    return SearchReport(
        subject=bundle.spec.name,
        allowed=allowed,
        tried=tuple(search.tried),
        measured=tuple(measured),
        route=route,
        artifact=artifact.name,
        reused=search.reused,
        machine=machine.describe(),
        protocol=search.protocol,
    )


@dataclass(frozen=True, slots=True)
class _Contender:
    candidate: Candidate
    artifact: Artifact


@dataclass(slots=True)
class _Search:
    """What one search has found so far. Sessions are opened where something is to be run, and once."""

    bundle: Bundle
    placement: Placement
    seconds: float
    progress: Callable[[str], None]
    record: Record
    requests: Sequence[Request]
    sessions: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    tried: list[Tried] = field(default_factory=list)
    contenders: dict[str, _Contender] = field(default_factory=dict)
    reused: int = 0
    _opened: dict[str, Session] = field(default_factory=dict)
    _judges: list[Judge] = field(default_factory=list)
    _cases: list[Case] = field(default_factory=list)

    @property
    def protocol(self) -> dict[str, object]:
        return {
            "seconds_a_size": self.seconds,
            "heat_rounds": HEAT_ROUNDS,
            "dropped_beyond": CLEARLY_SLOWER,
            "finalists": FINALISTS,
        }

    @property
    def _conditions(self) -> dict[str, object]:
        manifest = self.bundle.manifest
        return {
            "version": machine.version("mha-deploy"),
            "weights": manifest.weights.sha256,
            "inputs": [record.sha256 for record in manifest.inputs],
            "device": self.placement.device,
            "threads": self.placement.threads or machine.usable_cpus(),
            "machine": machine.fingerprint(),
        }

    def try_out(self, candidate: Candidate, allowed: Sequence[Precision]) -> None:
        """Make `candidate` and let it through the gate, or note why not."""
        if candidate.precision not in allowed:
            why = f"allow it with --allow {candidate.precision.value}"
            self._note(candidate, NOT_ALLOWED, why)
            return
        try:
            lacking = candidate.lacks(self.bundle, self.placement)
            if lacking:
                raise MissingError(lacking)
            self.progress(f"making {candidate.name}")
            artifact = candidate.make(self.bundle, self.progress)
            self.contenders[candidate.name] = _Contender(candidate, artifact)
            verdict = self._verdict(candidate.name)
        except MissingError as error:
            self.contenders.pop(candidate.name, None)
            self._note(candidate, NOT_HERE, str(error))
            return
        except MhaDeployError as error:
            self.bundle.current()  # an export that took the candidate's files says nothing of it either
            if isinstance(error, BundleError) and isinstance(error.__cause__, OSError):
                raise  # a disk that refuses says nothing of the candidate
            verdict = Verdict(False, math.inf, "", 0, str(error))
        if not verdict.passed:
            self.contenders.pop(candidate.name, None)
            why = f"{verdict.case}: {verdict.note}" if verdict.case else verdict.note
            self._note(candidate, FAILED, why, verdict)
            return
        self._note(candidate, BASELINE if candidate.baseline else PASSED, "", verdict)

    def time(self, sizes: Sizes) -> Measured:
        """All contenders at `sizes`, from the record where it has them."""
        contenders = [identity(each.artifact) for each in self.contenders.values()]
        stands_on = self._conditions | self.protocol | {"sizes": dict(sizes), "contenders": contenders}
        found = self.record.timings(stands_on, self.contenders)
        if found:
            self.reused += 1
        else:
            found = self._race(sizes)
            self.record.keep_timings(stands_on, found)
        signature = self.bundle.signature
        length = length_of(signature, sizes)
        tokens = length * sizes[self.bundle.spec.dims[0].name]
        flops = self.bundle.spec.flops(sizes)
        return Measured(sizes, length, tokens, flops, found.ceiling_gflops, found.timings, found.notices)

    def _race(self, sizes: Sizes) -> Found:
        opened = {name: self._session(name) for name in self.contenders}
        turns = [
            session_turn(name, session, [random_feeds(session.signature, sizes)])
            for name, session in opened.items()
        ]
        keep = [CANONICAL] if CANONICAL in opened else []
        end = watch()
        with self._ceiling(next(iter(opened.values())).precision) as (ceiling, flops):
            timings, beside = race(
                turns,
                self.seconds,
                keep=keep,
                beside=[ceiling],
                progress=lambda text: self.progress(f"{describe(sizes)}: {text}"),
            )
        matmul = beside[ceiling.name]
        notices = end(matmul.medians_ms).notices()
        return Found(timings, flops / min(matmul.merged_ms) / 1e6, tuple(notices))

    @contextlib.contextmanager
    def _ceiling(self, precision: Precision) -> Iterator[tuple[Turn, int]]:
        """A plain MatMul where the candidates run, and its floating-point operations."""
        if self.placement.device == "cpu":
            with cpu_matmul(self.placement) as found:
                yield found
            return
        yardsticks = gpu_yardsticks(precision)
        yield next(turn for turn in yardsticks.turns if turn.name == COMPUTE), yardsticks.flops

    def _verdict(self, name: str) -> Verdict:
        """From the record, or by the gate."""
        artifact = self.contenders[name].artifact
        stands_on = self._conditions | identity(artifact)
        verdict = self.record.verdict(stands_on)
        if verdict is None:
            if not self._judges:
                self._judges.append(Judge(self.bundle.reference()))
                self._cases += standard_cases(self.bundle.spec, self.requests, names=QUICK)
            budget = float(artifact.details.get("max_relative_error", 0.0))
            judge = self._judges[0].with_budget(budget)
            verdict = gate(judge, self._session(name), name, self._cases, self.progress)
            self.record.keep_verdict(stands_on, verdict)
        return verdict

    def _session(self, name: str) -> Session:
        if name not in self._opened:
            contender = self.contenders[name]
            session = contender.candidate.open(self.bundle, contender.artifact, self.placement)
            self._opened[name] = self.sessions.enter_context(session)
        return self._opened[name]

    def _note(self, candidate: Candidate, outcome: str, why: str, verdict: Verdict | None = None) -> None:
        self.tried.append(Tried(candidate.name, candidate.precision, outcome, why, verdict))


def _size(measured: Measured) -> Size:
    timings = measured.timings
    rounds_ms = {name: timing.rounds_p50_ms for name, timing in timings.items() if timing.final}
    return Size(measured.length, {name: timing.ratio for name, timing in timings.items()}, rounds_ms)


def _none(tried: Sequence[Tried]) -> MhaDeployError:
    failed = [each for each in tried if each.outcome == FAILED]
    if failed:
        return CheckError(
            "no candidate computes what PyTorch computes: "
            + "; ".join(f"{each.name} at {each.why}" for each in failed)
        )
    return MissingError(
        "no candidate runs here: " + "; ".join(f"{each.name}: {each.why}" for each in tried if each.why)
    )
