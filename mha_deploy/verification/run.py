"""Every artifact of a bundle on every case."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from mha_deploy.bundle import Bundle
from mha_deploy.cases import Case, masked_real_cases, standard_cases
from mha_deploy.errors import FrozenAxisError, GraphError, InputError, MissingError
from mha_deploy.manifest import Artifact
from mha_deploy.precision import Precision
from mha_deploy.sessions import DEFAULT_PLACEMENT, Placement, Session
from mha_deploy.signature import Sizes
from mha_deploy.verification.beyond_range import judged_beyond_range
from mha_deploy.verification.judge import Judge, decides
from mha_deploy.verification.report import FAILED, CaseResult, VerifyReport

LOAD = "load"  # the case that an artifact fails which does not load


def verify(
    bundle: Bundle,
    artifacts: Sequence[str] = (),
    *,
    cases: Sequence[Case] = (),
    fail_fast: bool = False,
    placement: Placement = DEFAULT_PLACEMENT,
    progress: Callable[[str], None] = lambda _: None,
) -> VerifyReport:
    """Hold artifacts (all, or those named) against the reference on `cases` (the standard ones).

    `fail_fast` stops at the first failure. What this machine cannot run is listed in the report, unless
    it was named or nothing runs; an artifact that does not load has failed.

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
        except GraphError as error:
            providers[artifact.name] = "does not load"
            results.append(_failed(LOAD, artifact.name, artifact.precision, {}, str(error)))
            if fail_fast:
                break
            continue
        held = judge.within(artifact.details.get("max_relative_error", 0.0))
        with session:
            providers[artifact.name] = session.provider
            for case in (*cases, *(integer_cases if artifact.precision.is_integer else ())):
                progress(f"{artifact.name}: {case.name}")
                results.append(_judged_or_failed(held, session, artifact, case))
                if fail_fast and results[-1].outcome == FAILED:
                    break
        if fail_fast and results[-1].outcome == FAILED:
            break
    return VerifyReport(bundle.spec.name, tuple(results), providers, not_run)


def _refuse_unjudged(artifacts: Sequence[Artifact], cases: Sequence[Case]) -> None:
    for artifact in artifacts:
        if not any(decides(artifact.precision, case) for case in cases):
            raise InputError(
                f"artifact {artifact.name!r} is {artifact.precision.value}, which is judged on real inputs, "
                "and there are none: export the bundle with --inputs FILE"
            )


def _judged_or_failed(judge: Judge, session: Session, artifact: Artifact, case: Case) -> CaseResult:
    """A case that the artifact cannot run at all has failed; the others still have their say."""
    try:
        if artifact.details.get("keep_fp32") and not artifact.precision.is_integer:
            return judged_beyond_range(judge, session, artifact.name, case)
        return judge(session, artifact.name, case)
    except (GraphError, FrozenAxisError) as error:
        return _failed(case.name, artifact.name, session.precision, case.sizes, str(error))


def _failed(name: str, artifact: str, precision: Precision, sizes: Sizes, why: str) -> CaseResult:
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
