"""Every artifact of a bundle on every case and property."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from mha_deploy.bundle import Bundle
from mha_deploy.cases import Case, padded_case, real_cases
from mha_deploy.errors import BundleError, FrozenAxisError, GraphError, InputError, MissingError
from mha_deploy.inference import with_keep_mask
from mha_deploy.precision import Precision
from mha_deploy.ragged import Request, is_packed, unpack
from mha_deploy.sessions import DEFAULT_PLACEMENT, Placement, Session
from mha_deploy.signature import Feeds, Sizes
from mha_deploy.spec import AttentionSpec
from mha_deploy.verification.artifact_map import artifact_map
from mha_deploy.verification.beyond_range import judged_beyond_range
from mha_deploy.verification.heatmap import HeatMap
from mha_deploy.verification.judge import Judge
from mha_deploy.verification.properties import Property
from mha_deploy.verification.report import FAILED, CaseResult, PropertyResult, VerifyReport
from mha_deploy.verification.suite import Suite
from mha_deploy.verification.yardstick import References

Result = CaseResult | PropertyResult
Observe = Callable[[CaseResult, Callable[[], HeatMap]], None]
Planned = Callable[[Sequence[str]], None]
NO_INPUTS: Feeds = MappingProxyType({})


def verify(
    bundle: Bundle,
    artifacts: Sequence[str] = (),
    *,
    cases: Sequence[Case] = (),
    names: Sequence[str] = (),
    inputs: Feeds = NO_INPUTS,
    seed: int = 0,
    max_relative_error: float = 0.0,
    fail_fast: bool = False,
    placement: Placement = DEFAULT_PLACEMENT,
    progress: Callable[[str], None] = lambda _: None,
    observe: Observe = lambda _result, _map: None,
    planned: Planned = lambda _names: None,
) -> VerifyReport:
    """Hold artifacts (all, or those named) against the reference.

    `names` picks cases and properties of the standard suite; `cases` are run in its place.
    `inputs` are real ones, packed or padded as `infer` takes them; the bundle's own where none are
    given. `max_relative_error` is the budget of integer precisions, a share; 0 takes the one that an
    artifact was accepted with. `fail_fast` stops at the first failure. `planned` sees the names of the
    cases before any is run, `observe` each case as it is judged, with a function that makes its heat
    map. What this machine cannot run is listed in the report, unless it was named or nothing runs; an
    artifact that does not load has failed, one whose file is missing or damaged included.

    Raises:
        BundleError: the weights or the inputs of the bundle are not the ones recorded.
        FeedError: `inputs` do not meet the block's signature.
        InputError: an unknown name, or an integer precision without a budget or without real inputs.
        MissingError: this machine lacks a runtime or a provider.
    """
    chosen = [bundle.artifact(name) for name in artifacts] or list(bundle.artifacts)
    judge = Judge(bundle.reference())
    suite = suite_of(bundle, judge.references, inputs=inputs, seed=seed, names=names)
    for artifact in chosen if not names else ():
        refuse_unjudged(f"artifact {artifact.name!r}", artifact.precision, cases or suite.real)
    planned([case.name for case in cases] or suite.case_names)
    found: list[Result] = []
    providers, not_run, stopped_at = dict[str, str](), dict[str, str](), ""
    for artifact in chosen:
        try:
            session = bundle.open_padded_session(artifact.name, replace(placement, poison=True))
        except MissingError as error:
            if artifacts or (artifact is chosen[-1] and not providers):
                raise
            not_run[artifact.name] = str(error)
            continue
        except (BundleError, GraphError, FrozenAxisError) as error:
            providers[artifact.name] = "not loaded"
            found.append(failed_case("load", artifact.name, artifact.precision, {}, str(error)))
        else:
            providers[artifact.name] = session.provider
            budget = max_relative_error or float(artifact.details.get("max_relative_error", 0.0))
            with session:
                bench = Bench(
                    judge.with_budget(budget),
                    session,
                    artifact.name,
                    batch_dependent=bool(artifact.details.get("batch_dependent", False)),
                    keeps_fp32=bool(artifact.details.get("keep_fp32")) and not artifact.precision.is_integer,
                    progress=progress,
                    observe=observe,
                    draw=partial(artifact_map, bundle, placement),
                )
                for result in bench.results(cases or suite.cases(session.precision), suite.properties):
                    found.append(result)
                    if fail_fast and result.outcome == FAILED:
                        break
        if fail_fast and found and found[-1].outcome == FAILED:
            stopped_at = f"{found[-1].name} of {artifact.name}"
            break
    return VerifyReport(
        bundle.spec.name,
        tuple(result for result in found if isinstance(result, CaseResult)),
        providers,
        not_run,
        tuple(result for result in found if isinstance(result, PropertyResult)),
        seed,
        stopped_at,
    )


def refuse_unjudged(what: str, precision: Precision, cases: Sequence[Case]) -> None:
    """Raise InputError where `what` is judged on real inputs and none of the cases is."""
    if precision.is_integer and not any(case.real for case in cases):
        raise InputError(
            f"{what} is {precision.value}, which is judged on real inputs, and there are none: give "
            "--inputs FILE, here or at export"
        )


def suite_of(
    bundle: Bundle,
    references: References,
    *,
    inputs: Feeds = NO_INPUTS,
    seed: int = 0,
    names: Sequence[str] = (),
) -> Suite:
    """What `verify` holds the bundle's artifacts to, given the same arguments.

    Raises:
        FeedError, InputError: as in `verify`.
    """
    return Suite(
        bundle.spec,
        references,
        real=given_cases(bundle.spec, inputs, bundle.real_inputs()),
        seed=seed,
        names=names,
    )


def given_cases(spec: AttentionSpec, inputs: Feeds, own: Sequence[Request]) -> list[Case]:
    """Cases of real inputs: those given or, where there are none, the bundle's own.

    Raises:
        FeedError: they do not meet the block's signature.
    """
    if not inputs:
        return real_cases(spec, own)
    if is_packed(inputs):
        return real_cases(spec, unpack(spec, inputs))
    return [padded_case(spec, with_keep_mask(spec, inputs, "keep"))]


@dataclass(frozen=True, slots=True)
class Bench:
    """One artifact's session in front of the judge. `draw` makes the heat map of a case's result.

    `keeps_fp32`: some nodes were asked for in fp32, so that it may hold where its precision does not.
    """

    judge: Judge
    session: Session
    artifact: str
    progress: Callable[[str], None]
    observe: Observe
    draw: Callable[[CaseResult, Case], HeatMap]
    batch_dependent: bool = False
    keeps_fp32: bool = False

    def results(self, cases: Sequence[Case], properties: Sequence[Property]) -> Iterator[Result]:
        """One after the other; what the artifact cannot run at all has failed, and the others still
        have their say."""
        total = len(cases) + len(properties)
        for number, case in enumerate(cases, 1):
            self.progress(f"{self.artifact} {number}/{total}: {case.name}")
            yield self.case(case)
        for number, held in enumerate(properties, len(cases) + 1):
            self.progress(f"{self.artifact} {number}/{total}: {held.name}")
            try:
                yield self.judge.hold(self.session, self.artifact, held, batch_dependent=self.batch_dependent)
            except (GraphError, FrozenAxisError) as error:
                precision = self.session.precision
                yield PropertyResult(held.name, self.artifact, precision, FAILED, note=str(error))

    def case(self, case: Case) -> CaseResult:
        """The case judged, or failed where it cannot be run."""
        try:
            judged = judged_beyond_range if self.keeps_fp32 else Judge.__call__
            result = judged(self.judge, self.session, self.artifact, case)
        except (GraphError, FrozenAxisError) as error:
            return failed_case(case.name, self.artifact, self.session.precision, case.sizes, str(error))
        self.observe(result, partial(self.draw, result, case))
        return result


def failed_case(name: str, artifact: str, precision: Precision, sizes: Sizes, why: str) -> CaseResult:
    """A case that never came to numbers; `why` says why."""
    nothing = float("nan")
    return CaseResult(
        name=name,
        artifact=artifact,
        precision=precision,
        sizes=sizes,
        outcome=FAILED,
        max_abs_error=nothing,
        relative_error=nothing,
        yardstick=nothing,
        allowed=nothing,
        worst=(0, 0, 0),
        note=why,
    )
