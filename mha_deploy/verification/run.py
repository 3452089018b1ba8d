"""Every artifact of a bundle on every case."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from mha_deploy.bundle import Bundle
from mha_deploy.cases import Case, masked_real_cases, standard_cases
from mha_deploy.errors import FrozenAxisError, GraphError, InputError, MissingError
from mha_deploy.manifest import Artifact
from mha_deploy.sessions import DEFAULT_PLACEMENT, Placement, Session
from mha_deploy.verification.judge import Judge, decides
from mha_deploy.verification.report import FAILED, CaseResult, VerifyReport


def verify(
    bundle: Bundle,
    artifacts: Sequence[str] = (),
    *,
    cases: Sequence[Case] = (),
    placement: Placement = DEFAULT_PLACEMENT,
    progress: Callable[[str], None] = lambda _: None,
) -> VerifyReport:
    """Hold artifacts (all, or those named) against the reference on `cases` (the standard ones).

    What this machine cannot run is listed in the report, unless it was named or nothing runs.

    Raises:
        BundleError: a file of the bundle is not the one recorded.
        InputError: an integer artifact, and no real inputs to judge it on.
        MissingError: this machine lacks a runtime or a provider.
    """
    chosen = [bundle.artifact(name) for name in artifacts] or list(bundle.artifacts)
    integer_cases = [] if cases else masked_real_cases(bundle.spec, bundle.real_inputs())
    cases = cases or standard_cases(bundle.spec, bundle.real_inputs())
    results, providers, not_run = [], dict[str, str](), dict[str, str]()
    _refuse_unjudged(chosen, cases)
    judge = Judge(bundle.reference())
    for artifact in chosen:
        try:
            session = bundle.open_session(artifact.name, replace(placement, poison=True))
        except MissingError as error:
            if artifacts or (artifact is chosen[-1] and not providers):
                raise
            not_run[artifact.name] = str(error)
            continue
        held = judge.within(artifact.details.get("max_relative_error", 0.0))
        with session:
            providers[artifact.name] = session.provider
            for case in (*cases, *(integer_cases if artifact.precision.is_integer else ())):
                progress(f"{artifact.name}: {case.name}")
                results.append(_judged_or_failed(held, session, artifact.name, case))
    return VerifyReport(bundle.spec.name, tuple(results), providers, not_run)


def _refuse_unjudged(artifacts: Sequence[Artifact], cases: Sequence[Case]) -> None:
    for artifact in artifacts:
        if not any(decides(artifact.precision, case) for case in cases):
            raise InputError(
                f"artifact {artifact.name!r} is {artifact.precision.value}, which is judged on real inputs, "
                "and there are none: export the bundle with --inputs FILE"
            )


def _judged_or_failed(judge: Judge, session: Session, artifact: str, case: Case) -> CaseResult:
    """A case that the artifact cannot run at all has failed; the others still have their say."""
    try:
        return judge(session, artifact, case)
    except (GraphError, FrozenAxisError) as error:
        nothing = float("nan")
        return CaseResult(
            name=case.name,
            artifact=artifact,
            precision=session.precision,
            sizes=case.sizes,
            outcome=FAILED,
            max_abs_error=nothing,
            relative_error=nothing,
            yardstick=nothing,
            allowed=nothing,
            worst=(0, 0, 0),
            note=str(error),
        )
