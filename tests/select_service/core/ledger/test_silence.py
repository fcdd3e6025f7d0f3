"""What ranks are measured to compute where some say nothing: hung engines, callers that are lost,
frontends that never say when a prompt is computed."""

from __future__ import annotations

from itertools import count, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from select_service.core.ledger.drain_meter import PRIOR_TOKENS_PER_S, SILENCE_S, DrainMeter
from select_service.core.ledger.ledger import Ledger
from select_service.core.ledger.reservation import LedgerReservation
from tests.effort import examples

RANKS = 8
TRUE = 10_000.0
"""Tokens a second that a rank computes."""


class Traffic:
    """A request a second, of 1,000 tokens, to one rank after another."""

    def __init__(self, ranks: int = RANKS) -> None:
        self.ledger = Ledger()
        self.ledger.ensure(ranks)
        self.gates = DrainMeter(self.ledger.loads.work)  # looks at its own times
        self.now = 100.0
        self._names = count()

    def book(self, slot: int, tokens: int = 1000) -> LedgerReservation:
        return self.ledger.book(f"r{next(self._names)}", slot, b"", tokens, self.now)

    def compute(self, slot: int, tokens: int = 1000) -> None:
        """Of those who say what they compute."""
        one = self.book(slot, tokens)
        self.now += tokens / TRUE
        self.ledger.prefill_complete(one, self.now)
        self.ledger.free(one)

    def go_on(self, seconds: int, slots: tuple[int, ...] = tuple(range(1, RANKS))) -> None:
        for second in range(seconds):
            self.compute(slots[second % len(slots)])
            self.now += 0.9
            self.gates.follow()
            self.ledger.check()

    @property
    def measured(self) -> tuple[float, float]:
        return self.ledger.loads.recent.pace, self.gates.tokens_per_s


def near(tokens_per_s: float) -> Any:
    return pytest.approx((tokens_per_s, tokens_per_s), rel=0.05)


@pytest.mark.parametrize("before_s", [0, 200])
def test_a_rank_that_hangs_makes_the_others_no_slower(before_s: int) -> None:
    traffic = Traffic()
    traffic.go_on(before_s)
    traffic.book(0, 4000)
    traffic.go_on(int(SILENCE_S) + 3)
    assert traffic.measured == near(TRUE)
    traffic.go_on(300)
    assert traffic.measured == near(TRUE)


def test_what_waits_behind_one_that_hangs_says_no_more_than_it() -> None:
    traffic = Traffic()
    for _ in range(60):
        traffic.book(0)
        traffic.go_on(1)
    assert traffic.measured == near(TRUE)


def test_who_is_alone_and_hangs_says_nothing_at_all() -> None:
    traffic = Traffic(1)
    traffic.book(0, 4000)
    for _ in range(600):
        traffic.now += 1.0
        traffic.book(0, 10)
    assert traffic.measured == (PRIOR_TOKENS_PER_S, PRIOR_TOKENS_PER_S)


def test_it_spoils_the_pace_at_no_time() -> None:
    """Where requests are refused for a pace, nobody might be let in who would show a better one."""
    traffic = Traffic()
    traffic.go_on(30)
    traffic.book(0, 4000)
    for _ in range(60):
        traffic.go_on(1)
        assert traffic.gates.tokens_per_s == pytest.approx(TRUE, rel=0.2)


def test_whose_caller_is_lost_computes_for_others() -> None:
    """One prompt stays, the rank goes on with those that come later."""
    traffic = Traffic()
    traffic.book(0, 4000)
    traffic.go_on(120, tuple(range(RANKS)))
    assert not traffic.ledger.loads.silent(traffic.now), "it speaks every eight seconds"
    assert traffic.measured == near(TRUE)


@pytest.mark.parametrize("every_s", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("at_once", [3, 60])
def test_frontends_that_only_free_tell_nothing_of_the_pace(every_s: float, at_once: int) -> None:
    """Whether ranks have nothing booked now and then, or never."""
    traffic = Traffic()
    live: list[LedgerReservation] = []
    for number in range(1000):
        live.append(traffic.book(number % RANKS))
        traffic.now += every_s
        if len(live) > at_once:
            traffic.ledger.free(live.pop(0))
        traffic.gates.follow()
    traffic.ledger.check()
    assert traffic.measured == (PRIOR_TOKENS_PER_S, PRIOR_TOKENS_PER_S)


def test_of_those_who_say_it_and_those_who_do_not_the_first_are_believed() -> None:
    traffic = Traffic()
    for _ in range(300):
        silent = traffic.book(0)
        traffic.go_on(3, (0, 1))
        traffic.ledger.free(silent)
    assert traffic.measured == near(TRUE)


def test_a_rank_that_is_slow_and_says_so_is_measured() -> None:
    """A minute for each prompt; from the first word on it counts for all the time it took."""
    traffic = Traffic(2)
    traffic.book(1)  # hangs
    booked = [traffic.book(0, 6000)]
    for _ in range(20):
        for _ in range(60):
            traffic.now += 1.0
            booked.append(traffic.book(0, 6000))
        traffic.ledger.prefill_complete(booked.pop(0), traffic.now)
        traffic.gates.follow()
    traffic.now += 2.0
    traffic.book(0)
    assert traffic.measured == near(100.0)


def test_a_silence_in_which_somebody_gave_up_is_nobodys() -> None:
    """The engine hung on one and went on with the next when that was given up, or then came back:
    of what it says first nobody knows how long it took."""
    traffic = Traffic()
    hung = traffic.book(0, 4000)
    traffic.now += 0.1
    next_one = traffic.book(0, 1000)
    traffic.go_on(100)
    traffic.ledger.free(hung)
    said = traffic.ledger.loads.work.reported_seconds
    traffic.ledger.prefill_complete(next_one, traffic.now)
    assert traffic.ledger.loads.work.reported_seconds == said
    traffic.go_on(3)
    assert traffic.measured == near(TRUE)
    third, fourth = traffic.book(0), traffic.book(0)
    traffic.ledger.free(third)
    traffic.now += 0.1
    traffic.ledger.prefill_complete(fourth, traffic.now)
    assert traffic.ledger.loads.work.reported_seconds > said, "as long as it is not a long silence"


def test_an_engine_without_room_for_a_prompt_hangs_only_once_it_ends_nothing() -> None:
    """All its blocks are in use: the next prompt waits until somebody has their answer."""
    traffic = Traffic()
    decoding = [traffic.book(0) for _ in range(5)]
    for one in decoding:
        traffic.ledger.prefill_complete(one, traffic.now)
    traffic.book(0)
    for one in decoding:
        traffic.go_on(20)
        assert not traffic.ledger.loads.silent(traffic.now)
        traffic.ledger.free(one)
    traffic.go_on(20)
    assert not traffic.ledger.loads.silent(traffic.now)
    traffic.go_on(20)
    assert traffic.ledger.loads.silent(traffic.now) == 1


def test_a_long_prompt_may_take_its_time() -> None:
    """As long as an engine might take that is far slower than the others."""
    traffic = Traffic()
    traffic.book(0, 100_000)
    traffic.go_on(200)
    assert not traffic.ledger.loads.silent(traffic.now)
    traffic.go_on(200)
    assert traffic.ledger.loads.silent(traffic.now) == 1


def test_a_rank_that_goes_takes_its_silence_with_it() -> None:
    traffic = Traffic()
    traffic.book(0, 4000)
    traffic.go_on(40)
    assert traffic.ledger.loads.silent(traffic.now) == 1
    traffic.ledger.drop_slot(0)
    assert not traffic.ledger.loads.silent(traffic.now)
    traffic.go_on(40, tuple(range(RANKS)))
    assert traffic.measured == near(TRUE)
    assert not traffic.ledger.loads.silent(traffic.now)


def test_nobody_hangs_for_a_long_night_or_a_long_queue() -> None:
    traffic = Traffic()
    for _ in range(3):
        traffic.go_on(40)
        traffic.now += 40_000.0
        queue = [traffic.book(0, 20_000) for _ in range(60)]
        for one in queue:
            traffic.now += 2.0
            assert not traffic.ledger.loads.silent(traffic.now)
            traffic.ledger.prefill_complete(one, traffic.now)
        assert traffic.measured == near(TRUE)


def test_what_is_no_news_is_not_said_by_the_rank() -> None:
    ledger = Ledger()
    ledger.ensure(1)
    first = ledger.book("first", 0, b"", 1000, 10.0)
    ledger.prefill_complete(ledger.book("learnt", 0, b"", 1000, 12.0), 13.0, is_measured=False)
    assert ledger.loads.work.reported_seconds == 0.0
    ledger.prefill_complete(first, 15.0)
    assert ledger.loads.work.reported_seconds == 5.0
    ledger.check()


class NaiveRank:
    """What waits, in the order it came: name, tokens, when; and when it last spoke."""

    def __init__(self) -> None:
        self.waiting: dict[str, tuple[int, float]] = {}
        self.spoke = 0.0
        self.gave_up = False
        self.said: list[tuple[float, float]] = []
        self.untimed = 0

    def come(self, name: str, tokens: int, now: float) -> None:
        if not self.left:
            self.spoke, self.gave_up = now, False
        self.waiting[name] = tokens, now

    @property
    def left(self) -> int:
        return sum(tokens for tokens, _ in self.waiting.values())

    def compute(self, name: str, now: float) -> None:
        tokens, came = self.waiting.pop(name)
        if not tokens:
            return
        if self.gave_up and now - self.spoke > SILENCE_S:
            self.untimed += tokens
        else:
            self.said.append((max(came, self.spoke), now))
        self.spoke, self.gave_up = now, False

    def give_up(self, name: str) -> None:
        self.gave_up |= self.waiting.pop(name)[0] > 0


STEP = st.tuples(
    st.sampled_from(["come", "come", "compute", "compute", "free", "drop"]),
    st.integers(0, 2),
    st.integers(0, 20),
    st.sampled_from([0, 1, 5000]),
    st.sampled_from([0.0, 0.25, 2.0, 20.0]),
)


@settings(max_examples=examples(200))
@given(st.lists(STEP, max_size=40))
def test_time_is_said_once_and_only_by_who_computed(
    steps: list[tuple[str, int, int, int, float]],
) -> None:
    ledger = Ledger()
    ledger.ensure(3)
    naive = [NaiveRank() for _ in range(3)]
    live: list[list[LedgerReservation]] = [[] for _ in naive]
    now = 10.0
    for number, (what, slot, which, tokens, passed) in enumerate(steps):
        now += passed
        rank, there = naive[slot], live[slot]
        if what == "come":
            rank.come(f"r{number}", tokens, now)
            there.append(ledger.book(f"r{number}", slot, b"", tokens, now))
        elif what == "drop":
            ledger.drop_slot(slot)
            rank.waiting.clear()
            there.clear()
        elif there:
            one = there.pop(which % len(there))
            if what == "compute":
                rank.compute(one.reservation_id, now)
                ledger.prefill_complete(one, now)
            else:
                rank.give_up(one.reservation_id)
            ledger.free(one)
        ledger.check()
    said = [span for rank in naive for span in rank.said]
    assert ledger.loads.work.reported_seconds == pytest.approx(
        sum(end - start for start, end in said)
    )
    assert ledger.loads.work.untimed == sum(rank.untimed for rank in naive)
    for rank in naive:
        spans = sorted(rank.said)
        for (_, end), (start, _) in pairwise(spans):
            assert start >= end, "no second is counted twice for a rank"
