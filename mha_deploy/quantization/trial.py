"""One candidate: smoothed as calibration says, written, run and judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mha_deploy.bundle import Bundle
from mha_deploy.cases import QUICK, Case, masked_real_cases, real_cases, standard_cases
from mha_deploy.errors import FrozenAxisError, GraphError
from mha_deploy.onnx_files import check_graph, save
from mha_deploy.precision import Precision
from mha_deploy.quantization.calibration import Ranges
from mha_deploy.quantization.candidate import INT8, Candidate
from mha_deploy.quantization.evidence import Evidence, drift, errors_on
from mha_deploy.quantization.plan import Plan, Source
from mha_deploy.quantization.products import Product
from mha_deploy.quantization.report import KEPT, TOO_FAR_OFF, UNSOUND, Tried
from mha_deploy.quantization.rewrite import rewritten
from mha_deploy.sessions import Placement, Session
from mha_deploy.sessions.onnx_runtime import OnnxRuntimeSession
from mha_deploy.verification import FAILED, Judge

# Smoothing strengths tried, between 0 (weights take all) and 1 (activations do); SmoothQuant's own is 0.5.
ALPHAS = (0.4, 0.5, 0.6, 0.7, 0.8)


@dataclass(slots=True)
class Trials:
    """What all trials of one search share; `folder` is for graphs that are only tried."""

    bundle: Bundle
    source: Source
    evidence: Evidence
    ranges: Mapping[str, Ranges]
    fit_ranges: Mapping[str, Ranges]
    judge: Judge
    keep_fp32: Sequence[str]
    max_relative_error: float
    folder: Path
    placement: Placement
    _alphas: dict[str, dict[str, float]] = field(default_factory=dict)

    def try_out(self, candidate: Candidate, path: Path) -> Tried:
        """Write `candidate` to `path` and judge it."""
        taken = candidate.taken(self.source.products, self.keep_fp32)
        alphas = self._best_alphas(candidate) if candidate.smooth else {}
        used = {product.activation for product in taken}
        alphas = {name: alpha for name, alpha in alphas.items() if name in used}
        with self._session(Plan(candidate.scheme, taken, self.ranges, alphas), path) as session:
            errors = errors_on(session, self.evidence.held_out)
            wrong = ""
            if errors.relative <= self.max_relative_error:
                wrong = self._wrong(session, path)
            within = errors.relative <= self.max_relative_error
            return Tried(
                candidate=candidate,
                errors=errors,
                calibration_errors=errors_on(session, self.evidence.calibration),
                random_errors=errors_on(session, self.evidence.random),
                batch_drift=drift(session, self.evidence.alone_and_with_mate),
                bytes=sum(each.stat().st_size for each in path.parent.iterdir()),
                kept_fp32=tuple(p.node for p in self.source.products if p not in taken),
                alphas=alphas,
                verdict=UNSOUND if wrong else KEPT if within else TOO_FAR_OFF,
                note=wrong,
            )

    def _session(self, plan: Plan, path: Path) -> Session:
        path.parent.mkdir(exist_ok=True)
        save(rewritten(self.source, plan), path)
        return OnnxRuntimeSession(
            path,
            self.bundle.signature,
            name=INT8,
            precision=Precision.INT8,
            placement=self.placement,
        )

    def _wrong(self, session: Session, path: Path) -> str:
        """What `verify` would hold against it, or ""."""
        try:
            check_graph(path, self.bundle.signature)
            results = [self.judge(session, INT8, case) for case in self._cases()]
        except (GraphError, FrozenAxisError) as error:
            return str(error)
        failed = [result for result in results if result.outcome == FAILED]
        return "; ".join(f"{r.name}: {r.note or f'{r.relative_error:.2%} off'}" for r in failed)

    def _cases(self) -> list[Case]:
        """Enough of `verify`'s to tell that the graph is the block, and those that decide."""
        spec, requests = self.bundle.spec, self.evidence.requests
        real = real_cases(spec, requests)
        return [*standard_cases(spec, requests, names=QUICK), *masked_real_cases(spec, real[0]), *real[1:]]

    def _best_alphas(self, candidate: Candidate) -> dict[str, float]:
        """Alphas by activation with the least error on the requests to tune on, every product in int8.

        The context, which the output product reads, after all the others, which share one.
        """
        if candidate.scheme not in self._alphas:
            taken = Candidate(candidate.scheme).taken(self.source.products, self.keep_fp32)
            context = [product.activation for product in taken if product.role == "output"]
            others = [product.activation for product in taken if product.activation not in context]
            best: dict[str, float] = {}
            for group in (others, context):
                strengths = [{**best, **dict.fromkeys(group, alpha)} for alpha in ALPHAS if group]
                best = min([best, *strengths], key=lambda each: self._error(candidate.scheme, taken, each))
            self._alphas[candidate.scheme] = best
        return self._alphas[candidate.scheme]

    def _error(self, scheme: str, taken: Sequence[Product], alphas: Mapping[str, float]) -> float:
        path = self.folder / "alpha" / "model.onnx"
        with self._session(Plan(scheme, taken, self.fit_ranges, alphas), path) as session:
            return errors_on(session, self.evidence.tune).relative
