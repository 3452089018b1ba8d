"""A load run in figures: from which moment latency counts, what adds up, what does not count."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from mha_deploy.errors import InputError
from mha_deploy.latency import nearest_rank
from mha_deploy.load import LoadReport, Outcome, Records, Spread, find_rate
from mha_deploy.load.check import NOT_CHECKED, CheckReport


def records(intended, sent, ended, outcomes=None, lengths=None):
    count = len(intended)
    return Records(
        np.full(count, 8) if lengths is None else np.array(lengths),
        np.array(intended, float),
        np.array(sent, float),
        np.array(ended, float),
        np.array([Outcome.ANSWERED] * count if outcomes is None else outcomes),
    )


def report(found, *, generator_cpu=0.1, wall_s=1.0, reasons=None, check=NOT_CHECKED):
    return LoadReport.of(
        found,
        target="t",
        plan="p",
        wall_s=wall_s,
        generator_cpu=generator_cpu,
        check=check,
        reasons=reasons or {},
        machine={},
    )


def steady(latency_ms, count=1000, lag_ms=0.0):
    """Requests 1 ms apart that all take so long."""
    intended = np.arange(count) / 1e3
    sent = intended + np.full(count, lag_ms) / 1e3
    return records(intended, sent, intended + np.full(count, latency_ms) / 1e3)


def stalled_worker():
    """A request a ms, 0.1 ms of service, the first stalls for 10 ms; one worker, so that others wait."""
    intended = np.arange(100) / 1e3
    sent, ended, free = np.zeros(100), np.zeros(100), 0.0
    for i, due in enumerate(intended):
        sent[i] = max(due, free)
        ended[i] = free = sent[i] + (10e-3 if i == 0 else 0.1e-3)
    return records(intended, sent, ended)


def test_latency_counts_from_the_intended_send_and_not_from_the_real_one():
    found = stalled_worker()
    latency, service = found.latency_ms(), found.service_ms()
    assert latency[:3] == pytest.approx([10.0, 9.1, 8.2])
    percentiles = [nearest_rank(latency, q) for q in (0.9, 0.95, 0.99)]
    assert percentiles == pytest.approx([1.0, 5.5, 9.1])
    assert [nearest_rank(service, q) for q in (0.9, 0.95, 0.99)] == pytest.approx([0.1, 0.1, 0.1])
    assert found.lag_ms()[:3] == pytest.approx([0.0, 9.0, 8.1])


def test_a_generator_that_stalled_makes_its_run_invalid():
    found = report(stalled_worker())
    assert not found.valid
    assert found.faults[0].startswith("the generator sent late: p99 of its lag is 8.100 ms, at most 1.000 ms")


def test_percentiles_are_of_merged_samples_and_never_averaged():
    a = records(np.zeros(1000), np.zeros(1000), np.full(1000, 0.010))
    b = records(np.zeros(10), np.zeros(10), np.full(10, 2.0))
    merged = Records.merged([a, b]).latency_ms()
    found = [nearest_rank(merged, q) for q in (0.95, 0.99, 0.995)]
    assert found == pytest.approx([10.0, 10.0, 2000.0])
    averaged = (nearest_rank(a.latency_ms(), 0.95) + nearest_rank(b.latency_ms(), 0.95)) / 2
    assert averaged == pytest.approx(1005.0)


def test_no_percentile_is_given_from_too_few_samples():
    found = Spread.of([1.0] * 458)
    assert math.isnan(found.percentiles_ms["p99"])
    assert found.percentiles_ms["p95"] == 1.0
    assert Spread.of([1.0] * 459).percentiles_ms["p99"] == 1.0
    assert Spread.of([]).samples == 0


def test_outcomes_add_up_to_the_requests_planned_and_only_answers_have_latency():
    outcomes = list(Outcome)
    count = len(outcomes)
    sent = [0.0] * count
    sent[Outcome.NOT_SENT] = math.nan
    found = report(records([0.0] * count, sent, [1.0] * count, outcomes, range(1, count + 1)))
    assert found.planned == count
    assert list(found.outcomes.values()) == [1] * count
    assert (found.latency.samples, found.service.samples) == (1, 1)
    assert found.lag.samples == count - 1
    assert found.tokens == 1


@pytest.mark.parametrize(
    ("latency_ms", "lag_ms", "valid"),
    [(5.0, 0.9, True), (5.0, 1.1, False), (50.0, 4.9, True), (50.0, 5.1, False)],
)
def test_lag_may_be_a_millisecond_or_a_tenth_of_the_median(latency_ms, lag_ms, valid):
    assert report(steady(latency_ms, lag_ms=lag_ms)).valid is valid


def test_a_generator_at_the_end_of_its_core_makes_the_run_invalid():
    assert report(steady(5.0), generator_cpu=0.9).valid
    found = report(steady(5.0), generator_cpu=0.95)
    assert found.faults == ("the generator used 95% of a core: it was at its end, not only the target",)
    assert not found.passed


def ended(**counts):
    """Requests that ended so, by the outcomes' names; those without an answer, whenever."""
    outcomes = [Outcome[name.upper()] for name, count in counts.items() for _ in range(count)]
    at = np.zeros(len(outcomes))
    return records(at, at, at + 5e-3, outcomes)


@pytest.mark.parametrize(
    ("counts", "reasons", "failure"),
    [
        ({"answered": 3}, {}, ""),
        ({"answered": 1, "refused": 5, "expired": 4}, {(Outcome.REFUSED, "status 503"): 5}, ""),
        (
            {"error": 20},
            {(Outcome.ERROR, "status 400: 'a'"): 12, (Outcome.ERROR, "status 400: 'b'"): 8},
            "none of 20 requests was answered, so that there is no latency: 20 error; "
            "most often: status 400: 'a' (12 x)",
        ),
        (
            {"refused": 5, "expired": 1},
            {(Outcome.REFUSED, "status 503: 'full'"): 5, (Outcome.EXPIRED, "status 504"): 1},
            "none of 6 requests was answered, so that there is no latency: 5 refused, 1 expired; "
            "most often: status 503: 'full' (5 x)",
        ),
        (
            {"answered": 80, "refused": 9, "error": 1, "disconnected": 2},
            {
                (Outcome.REFUSED, "status 503"): 9,
                (Outcome.ERROR, "status 500"): 1,
                (Outcome.DISCONNECTED, "no connection: gone"): 2,
            },
            "3 of 92 requests got no answer: 1 error, 2 disconnected; most often: no connection: gone (2 x)",
        ),
        (
            {"answered": 5, "not_sent": 3, "unanswered": 2},
            {(Outcome.NOT_SENT, "1 requests were on their way already"): 1},
            "5 of 10 requests got no answer: 3 not sent, 2 unanswered; "
            "most often: on its way still when the wait for answers ended (2 x)",
        ),
    ],
)
def test_a_run_fails_by_what_was_lost_and_not_by_what_was_refused_in_time(counts, reasons, failure):
    found = report(ended(**counts), reasons=reasons)
    assert found.failures == ((failure,) if failure else ())
    assert (found.valid, found.passed) == (True, not failure)
    assert found.verdict == (f"FAILED: {failure}" if failure else "VALID")
    assert list(found.notes.values()) == list(reasons.values())


def test_the_verdict_has_a_line_for_the_generator_and_one_for_the_target():
    wrong = CheckReport("r", 8, 3, "request 4: off by 1", math.nan, math.nan)
    found = report(steady(5.0), generator_cpu=0.95, check=wrong)
    assert found.verdict.splitlines() == [
        "INVALID: the generator used 95% of a core: it was at its end, not only the target",
        "FAILED: 3 of 8 sampled answers are wrong; first: request 4: off by 1",
    ]
    data = found.to_json()
    assert (data["valid"], data["passed"], data["verdict"]) == (False, False, found.verdict)
    assert data["failures"] == ["3 of 8 sampled answers are wrong; first: request 4: off by 1"]


def test_the_json_report_holds_every_sample_and_no_nan():
    found = report(stalled_worker())
    data = json.loads(json.dumps(found.to_json(samples=True), allow_nan=False))
    assert data["samples"]["intended_s"][:2] == [0.0, 0.001]
    assert data["samples"]["outcomes"] == [0] * 100
    assert data["latency"]["p99_ms"] is None
    assert data["outcomes"]["answered"] == data["planned"] == 100
    assert "samples" not in found.to_json()


def capacity(per_s, *, late_beyond=math.inf, lossy_beyond=math.inf):
    """Targets that hold 5 ms up to `per_s` and 50 ms beyond; the generator and the answers may fail too."""

    def run_at(rate):
        found = steady(5.0 if rate <= per_s else 50.0, lag_ms=20.0 if rate > late_beyond else 0.0)
        if rate > lossy_beyond:
            found.outcomes[7] = Outcome.REFUSED
        return report(found)

    return run_at


ALONE = report(steady(5.0), wall_s=10.0)  # 100 requests/s


@pytest.mark.parametrize("per_s", [7.0, 49.0, 50.0, 777.0])
def test_the_search_ends_within_its_tolerance_of_the_highest_rate(per_s):
    found = find_rate(capacity(per_s), ALONE, 20.0, tolerance=0.05)
    assert found.rate_per_s <= per_s < found.failed_per_s <= found.rate_per_s * 1.05
    assert found.passed
    assert not found.limited_by_generator


def test_a_rate_at_which_one_request_is_lost_does_not_hold():
    found = find_rate(capacity(math.inf, lossy_beyond=100.0), ALONE, 20.0)
    assert 100.0 / 1.05 <= found.rate_per_s <= 100.0
    assert {trial.why_not for trial in found.trials} == {"", "1 refused of 1000"}


def test_a_rate_that_the_generator_cannot_send_does_not_hold_and_is_told_apart():
    found = find_rate(capacity(math.inf, late_beyond=100.0), ALONE, 20.0)
    assert 100.0 / 1.05 <= found.rate_per_s <= 100.0
    assert found.limited_by_generator


def test_a_lag_that_is_small_beside_the_target_is_part_of_the_latency_and_no_more():
    late = report(steady(5.0, lag_ms=1.5))
    assert not late.valid
    assert find_rate(lambda _: late, ALONE, 20.0, tolerance=1e9).trials[0].held
    assert "sent late" in find_rate(lambda _: late, ALONE, 14.0, tolerance=1e9).trials[0].why_not


def test_a_search_in_which_nothing_holds_ends_and_says_so():
    found = find_rate(capacity(0.0), ALONE, 20.0)
    assert (found.rate_per_s, found.passed) == (0.0, False)
    assert [trial.rate_per_s for trial in found.trials] == [50.0, 25.0, 12.5, 6.25]
    assert all(trial.why_not == "p99 50.000 ms" for trial in found.trials)


def test_a_search_fails_by_what_is_lost_alone_and_by_wrong_answers_at_any_rate():
    dead = report(ended(error=460), reasons={(Outcome.ERROR, "status 400"): 460})
    found = find_rate(capacity(math.inf), dead, 20.0)
    (failure,) = found.failures
    assert failure.startswith("one at a time: none of 460 requests was answered")
    assert failure.endswith("most often: status 400 (460 x)")
    shaky = report(ended(answered=459, disconnected=1), wall_s=4.6)
    found = find_rate(capacity(777.0), shaky, 20.0)
    assert (found.rate_per_s > 0, found.passed, found.to_json()["passed"]) == (True, False, False)
    assert found.to_json()["failures"][0].startswith("one at a time: 1 of 460 requests got no answer")
    wrong = report(steady(5.0), check=CheckReport("r", 8, 1, "request 4: off by 1", math.nan, math.nan))
    found = find_rate(lambda _: wrong, ALONE, 20.0, tolerance=1e9)
    assert (
        found.failures[0] == "50.0 requests/s: 1 of 8 sampled answers are wrong; first: request 4: off by 1"
    )
    assert not found.passed


def test_no_rate_is_tried_where_a_request_alone_takes_too_long():
    found = find_rate(capacity(math.inf), ALONE, 4.9)
    assert (found.trials, found.rate_per_s, found.passed) == ((), 0.0, False)


def test_a_search_for_nothing_is_refused():
    with pytest.raises(InputError, match="p99 target 0 ms"):
        find_rate(capacity(1.0), ALONE, 0)
