"""Real requests: half to calibrate on, half to judge on, and how far a graph is off on them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mha_deploy.attention import MultiHeadAttention
from mha_deploy.cases import Case, real_case
from mha_deploy.errors import InputError
from mha_deploy.precision import Precision
from mha_deploy.ragged import Request
from mha_deploy.sessions import Session
from mha_deploy.sessions.reference import ReferenceSession
from mha_deploy.signature import Array
from mha_deploy.spec import AttentionSpec
from mha_deploy.verification.metrics import Errors, relative_error

# The mate in a batch that a request's answer must not depend on: the request itself, this much louder.
LOUDER = np.float32(10.0)
_MATES_TRIED = 4


@dataclass(frozen=True, slots=True)
class Sample:
    """A case and its answer in fp64."""

    case: Case
    truth: Array


@dataclass(frozen=True, slots=True)
class Evidence:
    """`calibration` and `held_out` share no request; `random` has the sizes and masks of `held_out`.

    `fit` and `tune` are the halves of `calibration`: settings are chosen by their error on `tune` with
    ranges of `fit`, since a range that has seen everything it is tried on never clips.
    """

    requests: tuple[Request, ...]
    calibration: tuple[Sample, ...]
    fit: tuple[Sample, ...]
    tune: tuple[Sample, ...]
    held_out: tuple[Sample, ...]
    random: tuple[Sample, ...]
    alone_and_with_mate: tuple[tuple[Case, Case], ...]


def split(requests: Sequence[Request]) -> tuple[list[Request], list[Request]]:
    """Every other request to calibrate on, the rest held out.

    Raises:
        InputError: fewer than two.
    """
    if len(requests) < 2:
        found = "one real request" if requests else "no real requests"
        raise InputError(
            f"{found}; int8 needs at least two, half of them to calibrate on and half to judge on, since "
            "random inputs hide its error: give --inputs FILE (packed requests), here or at export"
        )
    return list(requests[::2]), list(requests[1::2])


def gather(module: MultiHeadAttention, requests: Sequence[Request]) -> Evidence:
    """Cases and truths of these requests.

    Raises:
        InputError: too few requests to split, or one that the block does not take.
    """
    spec = module.spec
    calibration, held_out = split(requests)
    with ReferenceSession(module, Precision.FP64) as reference:

        def sampled(cases: Sequence[Case]) -> tuple[Sample, ...]:
            return tuple(Sample(case, reference.run(case.feeds)["y"]) for case in cases)

        held = batches(spec, "held-out", held_out)
        return Evidence(
            requests=tuple(requests),
            calibration=sampled(batches(spec, "calibration", calibration)),
            fit=sampled(batches(spec, "fit", calibration[::2])),
            tune=sampled(batches(spec, "tune", calibration[1::2] or calibration)),
            held_out=sampled(held),
            random=sampled([_random(case) for case in held]),
            alone_and_with_mate=tuple(_pairs(spec, held_out)),
        )


def batches(spec: AttentionSpec, name: str, requests: Sequence[Request]) -> list[Case]:
    """The requests in as few batches as the block takes; without a mask, only equal lengths together."""
    groups: dict[tuple[int, int], list[Request]] = defaultdict(list)
    for request in requests:
        groups[(request.q_len, request.kv_len) if spec.mask == "none" else (0, 0)].append(request)
    most = spec.dims[0].max
    chunks = [group[i : i + most] for group in groups.values() for i in range(0, len(group), most)]
    return [real_case(spec, name, chunk) for chunk in chunks]


def errors_on(session: Session, samples: Sequence[Sample]) -> Errors:
    """Over all compared rows of all samples together."""
    answers, truths = [], []
    for sample in samples:
        rows = sample.case.compared
        answers.append(session.run(sample.case.feeds)["y"].astype(np.float64)[rows])
        truths.append(sample.truth[rows])
    answer, truth = np.concatenate(answers)[None], np.concatenate(truths)[None]
    return Errors.of(answer, truth, np.ones(answer.shape[:2], bool))


def drift(session: Session, pairs: Sequence[tuple[Case, Case]]) -> float:
    """How far a request's answer moves when a louder one joins its batch, over the answer's norm.

    The worst of the pairs. Exactly 0 where the block takes one request at a time.
    """
    worst = 0.0
    for alone, joined in pairs:
        rows = alone.compared[0]
        before, after = (session.run(case.feeds)["y"][0][rows] for case in (alone, joined))
        worst = max(worst, relative_error(after.astype(np.float64), before.astype(np.float64)))
    return worst


def _pairs(spec: AttentionSpec, requests: Sequence[Request]) -> list[tuple[Case, Case]]:
    if spec.dims[0].max < 2:
        return []
    pairs = []
    for request in requests[:_MATES_TRIED]:
        mate = replace(request, tensors={n: array * LOUDER for n, array in request.tensors.items()})
        pairs.append((real_case(spec, "alone", [request]), real_case(spec, "with-mate", [request, mate])))
    return pairs


def _random(case: Case) -> Case:
    """Standard normal inputs under the same mask."""
    random = np.random.default_rng(0)
    feeds = {
        name: array if array.dtype == bool else random.standard_normal(array.shape).astype(array.dtype)
        for name, array in case.feeds.items()
    }
    return replace(case, name="random", feeds=feeds, real=False)
