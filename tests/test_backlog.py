"""Which waiting request is next and who joins it, on a clock that the test holds."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runner_blocks import CROSS, FULL, SELF, UNMASKED, block, request

from mha_deploy.errors import SpecError
from mha_deploy.runner import CostModel, RunnerOptions
from mha_deploy.runner.backlog import Backlog
from mha_deploy.runner.layout import PaddedLayout
from mha_deploy.runner.planner import Planner
from mha_deploy.runner.ticket import AnswerFuture, Outcome, Ticket
from mha_deploy.signature import Dim


class Priced(CostModel):
    """What a batch costs, as a test says."""

    def __init__(self, spec, price):
        super().__init__(spec, {})
        self.price = price

    def predict_us(self, size, _fill=1.0):
        return self.price(*size)


def free_rows(rows, q, kv):
    """A batch costs by its length alone, as on a GPU that is far from full."""
    return 100.0 + max(q, kv)


def flat(rows, q, kv):
    """Every token costs the same, as on a CPU."""
    return 10.0 * rows * max(q, kv)


class Waiting:
    """A backlog with a clock, and tickets by the names a test gives them."""

    def __init__(self, spec=SELF, price=free_rows, alone=False, **options):
        options = RunnerOptions(**options)
        self.layout = PaddedLayout(spec, spec.signature)
        self.planner = Planner(spec, Priced(spec, price), options, self.layout, alone=alone)
        self.spec, self.backlog = spec, Backlog(options, self.planner)
        self.names = {}

    def add(self, name, length, arrived=0.0, deadline=math.inf, priority=2):
        one = request(self.spec, *(length if isinstance(length, tuple) else (length,)))
        shape = self.layout.shape(one)
        ticket = Ticket(one, AnswerFuture(), shape, one.tokens(self.spec), 64, priority, arrived, deadline)
        ticket.work_us = self.planner.share_us(shape)
        self.names[ticket] = name
        self.backlog.add(ticket)
        return ticket

    def take(self, now=0.0):
        batch = self.backlog.take(now, "backlog")
        return batch and "".join(self.names[ticket] for ticket in batch.tickets)

    def drain(self, now=0.0):
        return list(iter(lambda: self.take(now), None))


def test_requests_of_one_length_share_a_batch_and_look_past_others():
    waiting = Waiting()
    for name, length in (("a", 5), ("b", 9), ("c", 5), ("d", 9), ("e", 5)):
        waiting.add(name, length)
    assert waiting.drain() == ["ace", "bd"]


def test_a_batch_holds_no_more_rows_than_the_graph_takes():
    waiting = Waiting()
    for name in "abcdef":
        waiting.add(name, 5)
    assert waiting.drain() == ["abcd", "ef"]


def test_where_every_token_costs_the_same_nobody_waits_for_mates():
    waiting = Waiting(price=flat)
    for name in "abc":
        waiting.add(name, 5)
    assert waiting.drain() == ["a", "b", "c"]


def test_rows_are_added_while_they_make_the_wait_shorter_for_all():
    # Two rows at the price of one and a bit, four at that of four: pairs are what serves best.
    waiting = Waiting(price=lambda rows, *_: {1: 100, 2: 110}.get(rows, 400))
    for name in "abcd":
        waiting.add(name, 5)
    assert waiting.drain() == ["ab", "cd"]


def test_a_small_gain_is_worth_the_first_ones_wait_only_when_many_others_wait_too():
    def price(rows, *_):
        return {1: 100, 2: 190}.get(rows, 1000)

    for others, first in ((0, "a"), (20, "ab")):
        waiting = Waiting(price=price)
        waiting.add("a", 5)
        waiting.add("b", 5)
        for _ in range(others):
            waiting.add("z", 6)
        assert waiting.take() == first


def test_where_mates_would_change_an_answer_every_request_runs_alone():
    waiting = Waiting(alone=True)
    for name in "ab":
        waiting.add(name, 5)
    assert waiting.drain() == ["a", "b"]


def test_higher_priority_then_the_earlier_deadline_then_arrival_goes_first():
    waiting = Waiting(price=flat)
    waiting.add("d", 5)
    waiting.add("c", 6, deadline=9.0)
    waiting.add("b", 7, deadline=3.0)
    waiting.add("a", 8, priority=1)
    waiting.add("e", 5)
    assert waiting.drain() == ["a", "b", "c", "d", "e"]


def test_a_request_that_waited_too_long_is_next_whatever_its_priority_and_deadline():
    waiting = Waiting(price=flat, max_wait_s=1.0)
    waiting.add("z", 5, arrived=0.0, priority=3)
    for number, name in enumerate("abcd"):
        waiting.add(name, 6, arrived=0.5, deadline=5.0 + number, priority=1)
    assert [waiting.take(0.9), waiting.take(1.0), waiting.take(1.0)] == ["a", "z", "b"]


def test_overdue_requests_take_every_other_turn_so_that_urgent_ones_go_on():
    waiting = Waiting(price=flat, max_wait_s=1.0)
    for name, length in (("x", 5), ("y", 6), ("z", 7)):
        waiting.add(name, length, arrived=0.0, priority=3)
    for name, length in (("a", 8), ("b", 9), ("c", 10)):
        waiting.add(name, length, arrived=4.9, priority=1)
    assert "".join(waiting.drain(5.0)) == "xaybzc"


def test_requests_that_trickle_in_do_not_put_off_the_first_ones_turn():
    # Each arrival of a more urgent kind comes 90 ms after the last; the bound is 100 ms from arrival.
    waiting = Waiting(price=flat, max_wait_s=0.1)
    waiting.add("z", 5, arrived=0.0, priority=3)
    served, now = [], 0.0
    for name in "abcde":
        now += 0.09
        waiting.add(name, 6, arrived=now, priority=1)
        waiting.add(name.upper(), 6, arrived=now, priority=1)
        served.append((waiting.take(now), now))
    assert ("z", pytest.approx(0.18)) in served


def test_a_single_request_is_taken_the_moment_it_is_there():
    waiting = Waiting(max_wait_s=0.0)
    waiting.add("a", 5, arrived=7.0)
    assert waiting.take(7.0) == "a"


def test_a_batch_is_cut_where_it_would_make_a_member_late():
    waiting = Waiting(price=lambda rows, *_: 1e6 * (1 + rows / 10))
    waiting.add("a", 5, deadline=1.25)
    for name in "bcd":
        waiting.add(name, 5, deadline=9.0)
    assert waiting.take(0.0) == "ab"


def test_lengths_16_and_20_share_one_run_of_two_rows_where_padding_pays():
    waiting = Waiting(mode="fast")
    first, second = waiting.add("a", 16), waiting.add("b", 20)
    batch = waiting.backlog.take(0.0, "backlog")
    assert (batch.tickets, batch.shape) == ((first, second), (20, 20))


def test_where_padding_does_not_pay_lengths_run_apart_in_fast_mode_too():
    waiting = Waiting(mode="fast", price=flat)
    waiting.add("a", 16)
    waiting.add("b", 20)
    assert waiting.drain() == ["a", "b"]


def test_exact_mode_never_pads_however_cheap_it_is():
    waiting = Waiting()
    waiting.add("a", 16)
    waiting.add("b", 20)
    assert waiting.drain() == ["a", "b"]


def test_without_a_mask_nothing_is_padded_even_in_fast_mode():
    waiting = Waiting(UNMASKED, mode="fast")
    waiting.add("a", 16)
    waiting.add("b", 20)
    assert waiting.drain() == ["a", "b"]


@settings(deadline=None)
@given(
    spec=st.sampled_from([SELF, CROSS, FULL, UNMASKED]),
    lengths=st.lists(st.tuples(st.integers(1, 24), st.integers(1, 24)), min_size=1, max_size=20),
    dropped=st.sets(st.integers(0, 19)),
    mode=st.sampled_from(["exact", "fast"]),
    price=st.sampled_from([free_rows, flat]),
)
def test_every_request_is_in_exactly_one_batch_that_holds_it_and_the_books_end_at_zero(
    spec, lengths, dropped, mode, price
):
    waiting = Waiting(spec, price, mode=mode)
    tickets = [
        waiting.add(i, pair if spec.kind == "cross" else pair[0], deadline=100.0 - i % 3, priority=1 + i % 3)
        for i, pair in enumerate(lengths)
    ]
    gone = {each for i, each in enumerate(tickets) if i in dropped}
    for each in gone:
        waiting.backlog.remove(each)
    seen = []
    while batch := waiting.backlog.take(0.0, "backlog"):
        seen += batch.tickets
        assert len(batch.tickets) <= spec.dims[0].max
        shapes = {ticket.shape for ticket in batch.tickets}
        assert batch.shape == tuple(map(max, zip(*shapes, strict=True)))
        assert len(shapes) == 1 or (mode == "fast" and spec.mask != "none")
    assert sorted(map(id, seen)) == sorted(id(each) for each in tickets if each not in gone)
    backlog = waiting.backlog
    assert (backlog.requests, backlog.tokens, backlog.nbytes) == (0, 0, 0)
    assert backlog.work_us == pytest.approx(0, abs=1e-6)
    assert backlog._shapes == {}


def test_thousands_of_dropped_requests_leave_nothing_behind():
    waiting = Waiting()
    for number in range(3000):
        waiting.backlog.remove(waiting.add(number, 1 + number % 24))
    assert len(waiting.backlog._urgent._heap) < 100


@pytest.mark.parametrize(
    ("bounds", "outcome"),
    [
        ({"max_queue_requests": 1}, Outcome.REFUSED_QUEUE_REQUESTS),
        ({"max_queue_tokens": 9}, Outcome.REFUSED_QUEUE_TOKENS),
        ({"max_queue_bytes": 127}, Outcome.REFUSED_QUEUE_BYTES),
    ],
)
def test_each_bound_says_when_there_is_no_room(bounds, outcome):
    waiting = Waiting(**bounds)
    one = waiting.add("a", 5)
    assert waiting.backlog.full(one) is outcome
    waiting.take()
    assert waiting.backlog.full(one) is None


def test_work_ahead_counts_higher_priorities_and_deadlines_of_the_like():
    waiting = Waiting(price=flat)
    waiting.add("a", 5, priority=1)
    waiting.add("b", 5, deadline=0.010)
    waiting.add("c", 5, deadline=10.0)
    waiting.add("d", 5, priority=3, deadline=0.001)
    one = waiting.add("e", 5, deadline=0.015)
    waiting.backlog.remove(one)
    assert waiting.backlog.work_ahead_us(one) == pytest.approx(100.0)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"workers": -1}, "workers = -1; expected 0"),
        ({"max_queue_tokens": 0}, "max_queue_tokens = 0; expected at least 1"),
        ({"max_wait_s": math.nan}, "max_wait_s = nan; expected 0 or more seconds"),
        ({"mode": "quick"}, "mode 'quick'; expected one of exact, fast"),
        ({"default_priority": 4}, "default_priority = 4; expected 1 to 3"),
    ],
)
def test_an_option_out_of_range_is_refused_by_name(option, said):
    with pytest.raises(SpecError, match=said):
        RunnerOptions(**option)


def test_a_lone_request_reaches_the_session_uncopied_and_is_masked_right():
    one = request(SELF, 5)
    feeds = PaddedLayout(SELF, SELF.signature).feeds([one], (5, 5))
    assert np.shares_memory(feeds["x"], one.tensors["x"])
    assert feeds["mask"].tolist() == [[True] * 5]


@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize("rate_per_s", [300, 1500, 4000])
def test_padding_stays_below_two_per_cent_of_poisson_traffic_with_log_normal_lengths(mode, rate_per_s):
    """Two workers, mean length 27, at the costs of a block of d_model 384 on a CPU core."""
    spec = block(Dim("batch", 1, 8, 32), Dim("seq", 1, 64, 512))
    waiting = Waiting(spec, lambda rows, q, _: 90.0 + 15.0 * rows * q, mode=mode)
    random = np.random.default_rng(1)
    arrivals = np.cumsum(random.exponential(1 / rate_per_s, 3000))
    lengths = np.clip(random.lognormal(np.log(27) - 0.32, 0.8, 3000).astype(int), 2, 160)
    free, real, padded = [0.0, 0.0], 0, 0
    coming = list(zip(arrivals.tolist(), lengths.tolist(), strict=True))[::-1]
    while coming or waiting.backlog.requests:
        now = min(free)
        while coming and (coming[-1][0] <= now or not waiting.backlog.requests):
            arrived, length = coming.pop()
            now = max(now, arrived)
            waiting.add("", length, arrived)
        batch = waiting.backlog.take(now, "backlog")
        rows, length = len(batch.tickets), batch.shape[0]
        own = sum(ticket.tokens for ticket in batch.tickets)
        real, padded = real + own, padded + rows * length - own
        free[free.index(min(free))] = now + (90.0 + 15.0 * rows * length) / 1e6
    assert real == lengths.sum()
    assert padded < 0.02 * (real + padded)
    assert mode == "fast" or padded == 0


def test_a_batch_cut_short_for_a_deadline_runs_at_its_own_lengths():
    waiting = Waiting(mode="fast")
    waiting.add("urgent", 5, deadline=110e-6)
    waiting.add("long", 24)
    batch = waiting.backlog.take(0.0, "backlog")
    assert ([waiting.names[ticket] for ticket in batch.tickets], batch.shape) == (["urgent"], (5, 5))
