"""Every artifact of a bundle on every case."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from mha_deploy.bundle import Bundle
from mha_deploy.cases import Case, standard_cases
from mha_deploy.errors import FrozenAxisError, GraphError, MissingError
from mha_deploy.precision import Precision
from mha_deploy.sessions import DEFAULT_PLACEMENT, Placement, Session
from mha_deploy.signature import Sizes
from mha_deploy.verification.artifact_map import artifact_map
from mha_deploy.verification.heatmap import HeatMap
from mha_deploy.verification.judge import Judge
from mha_deploy.verification.report import FAILED, CaseResult, VerifyReport

Observe = Callable[[CaseResult, Callable[[], HeatMap]], None]


def verify(
    bundle: Bundle,
    artifacts: Sequence[str] = (),
    *,
    cases: Sequence[Case] = (),
    placement: Placement = DEFAULT_PLACEMENT,
    progress: Callable[[str], None] = lambda _: None,
    observe: Observe = lambda _result, _map: None,
) -> VerifyReport:
    """Hold artifacts (all, or those named) against the reference on `cases` (the standard ones).

    `observe` sees each result as it comes, with a function that makes its heat map.
    What this machine cannot run is listed in the report, unless it was named or nothing runs.

    Raises:
        BundleError: a file of the bundle is not the one recorded.
        MissingError: this machine lacks a runtime or a provider.
    """
    chosen = [bundle.artifact(name) for name in artifacts] or list(bundle.artifacts)
    cases = cases or standard_cases(bundle.spec, bundle.real_inputs())
    results, providers, not_run = [], dict[str, str](), dict[str, str]()
    judge = Judge(bundle.reference())
    for artifact in chosen:
        try:
            session = bundle.open_session(artifact.name, replace(placement, poison=True))
        except MissingError as error:
            if artifacts or (artifact is chosen[-1] and not providers):
                raise
            not_run[artifact.name] = str(error)
            continue
        with session:
            providers[artifact.name] = session.provider
            for case in cases:
                progress(f"{artifact.name}: {case.name}")
                results.append(judged_or_failed(judge, session, artifact.name, case))
                observe(results[-1], partial(artifact_map, bundle, results[-1], case, placement))
    return VerifyReport(bundle.spec.name, tuple(results), providers, not_run)


def judged_or_failed(judge: Judge, session: Session, artifact: str, case: Case) -> CaseResult:
    """A case that the artifact cannot run at all has failed; the others still have their say."""
    try:
        return judge(session, artifact, case)
    except (GraphError, FrozenAxisError) as error:
        return failed_case(case.name, artifact, session.precision, case.sizes, str(error))


def failed_case(name: str, artifact: str, precision: Precision, sizes: Sizes, note: str) -> CaseResult:
    """A case that never came to numbers; `note` says why."""
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
        note=note,
    )
