"""What a ledger knows of queues between reports: a naive twin, and what may be thought done."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from select_service.core.ledger.drain_meter import DrainMeter
from select_service.core.ledger.ledger import Ledger
from select_service.core.ledger.loads import unpacked, worked_off
from select_service.core.ledger.reservation import LedgerReservation
from select_service.core.ledger.slot_loads import STEP_TOKENS
from tests.effort import examples

SLOTS = 3
STEPS = (100, None, 0)  # tokens each rank says it computes in one


class NaiveQueue:
    """One rank: prompts in the order they came, and what was said last."""

    def __init__(self, step: int | None) -> None:
        self.step = STEP_TOKENS if step is None else step
        self.waiting: list[tuple[str, int]] = []  # with nothing to compute, too
        self.queue_updated_at, self.ahead = 0.0, 0

    @property
    def left(self) -> int:
        return sum(tokens for _, tokens in self.waiting)

    def come(self, name: str, tokens: int, now: float) -> None:
        if not self.left:
            self.queue_updated_at, self.ahead = now, tokens
        self.waiting.append((name, tokens))

    def compute(self, name: str, now: float) -> None:
        self._drop(name)
        head = next((tokens for _, tokens in self.waiting if tokens), 0)
        steps = max(1, math.ceil(head / self.step)) if self.step else 0
        self.queue_updated_at, self.ahead = now, min(self.left, steps * self.step)

    def give_up(self, name: str) -> None:
        self.fade(name, 0)
        self._drop(name)

    def fade(self, name: str, tokens: int) -> None:
        was = dict(self.waiting)[name]
        if was and name == next(one for one, its in self.waiting if its):  # its turn is over
            self.ahead = max(0, self.ahead - was)
        self.waiting = [(one, tokens if one == name else its) for one, its in self.waiting]
        self.ahead = min(self.ahead, self.left)

    def _drop(self, name: str) -> None:
        self.waiting = [one for one in self.waiting if one[0] != name]


STEP = st.tuples(
    st.sampled_from(["come", "come", "compute", "compute", "free", "fade", "drop", "report"]),
    st.integers(0, SLOTS - 1),
    st.integers(0, 20),
    st.sampled_from([0, 1, 40, 100, 101, 5000, 20_000]),
    st.floats(0.0, 3.0),
)


@settings(max_examples=examples(200))
@given(st.lists(STEP, max_size=40))
def test_as_a_naive_book_of_queues_has_it(  # noqa: C901 - a step of each kind
    steps: list[tuple[str, int, int, int, float]],
) -> None:
    ledger = Ledger()
    ledger.ensure(SLOTS)
    ledger.follow_queues(True)
    for slot, step in enumerate(STEPS):
        ledger.loads.limit_step(slot, step)
    twins = [NaiveQueue(step) for step in STEPS]
    live: list[list[LedgerReservation]] = [[] for _ in STEPS]
    now = 10.0
    for number, (what, slot, which, tokens, passed) in enumerate(steps):
        now += passed
        twin, there = twins[slot], live[slot]
        if what == "come":
            twin.come(f"r{number}", tokens, now)
            there.append(ledger.book(f"r{number}", slot, b"", tokens, now, isl_tokens=tokens))
        elif what == "report":  # nobody learns anything by it
            ledger.loads.pack()
        elif what == "drop":
            ledger.drop_slot(slot)
            twin.waiting, twin.ahead = [], 0
            there.clear()
            ledger.sweep(1)
        elif there:
            one = there[which % len(there)]
            if what == "free":
                there.remove(one)
                if not one.prefill_done:
                    twin.give_up(one.reservation_id)
                ledger.free(one)
            elif one.prefill_done:
                ledger.prefill_complete(one, now)  # once more: nothing new
            elif what == "compute":
                twin.compute(one.reservation_id, now)
                ledger.prefill_complete(one, now)
            elif tokens <= one.prefill_tokens:
                twin.fade(one.reservation_id, tokens)
                ledger.fade_prefill(one, tokens)
        ledger.check()
        assert ledger.loads.prefill_left == [one.left for one in twins]
        assert ledger.loads.queue_updated_at.tolist() == [one.queue_updated_at for one in twins]
        assert ledger.loads.ahead.tolist() == [float(one.ahead) for one in twins]
        packed = unpacked(ledger.loads.pack())
        assert packed.queue_updated_at is not None
        assert packed.ahead is not None
        assert packed.queue_updated_at.tolist() == ledger.loads.queue_updated_at.tolist()
        assert packed.ahead.tolist() == ledger.loads.ahead.tolist()
        assert packed.pace == ledger.loads.recent.pace


@given(
    updated_at=st.floats(0.0, 1e6),
    ahead=st.floats(0.0, 1e9),
    pace=st.floats(0.0, 1e6),
    times=st.lists(st.floats(0.0, 2e6), min_size=2).map(sorted),
)
def test_a_queue_only_gets_shorter_with_time_and_never_by_more_than_may_be_done(
    updated_at: float, ahead: float, pace: float, times: list[float]
) -> None:
    since, most = np.array([updated_at]), np.array([ahead])
    worked = [float(worked_off(since, most, pace, now)[0]) for now in times]
    assert all(0.0 <= one <= ahead for one in worked)
    assert all(one <= later for one, later in pairwise(worked))
    assert all(done == 0.0 for done, now in zip(worked, times, strict=True) if now <= updated_at)


def test_a_rank_that_hangs_is_thought_to_have_done_one_prompt_and_no_more() -> None:
    """However long it says nothing: what waits behind that stays, and it never looks idle."""
    ledger = Ledger()
    ledger.ensure(1)
    ledger.follow_queues(True)
    first = ledger.book("first", 0, b"", 300, 0.0)
    for number in range(5):
        ledger.book(f"r{number}", 0, b"", 20_000, 0.1)
    worked = worked_off(
        ledger.loads.queue_updated_at, ledger.loads.ahead, ledger.loads.recent.pace, 1e9
    )
    assert worked.tolist() == [300.0], "nobody knows that any other has begun"
    ledger.prefill_complete(first, 0.5)
    worked = worked_off(
        ledger.loads.queue_updated_at, ledger.loads.ahead, ledger.loads.recent.pace, 1e9
    )
    assert worked.tolist() == [3.0 * STEP_TOKENS], "the steps that a prompt of 20,000 takes"


def test_who_comes_to_a_slot_has_a_step_of_its_own_and_nothing_done() -> None:
    ledger = Ledger()
    ledger.ensure(1)
    ledger.book("one", 0, b"", 5000, 1.0)
    assert ledger.loads.ahead.tolist() == [5000.0]
    ledger.loads.limit_step(0, 2000)
    assert ledger.loads.ahead.tolist() == [2000.0]
    ledger.drop_slot(0)
    assert ledger.loads.ahead.tolist() == [0.0]
    ledger.loads.limit_step(0, None)
    assert ledger.loads.step.tolist() == [float(STEP_TOKENS)]


def test_a_worker_that_registers_again_as_it_was_changes_nothing() -> None:
    ledger = Ledger()
    ledger.ensure(1)
    ledger.loads.limit_step(0, 2000)
    ledger.loads.limit_running_requests(0, 4, 7)
    ledger.book("one", 0, b"", 100_000, 1.0)
    packed = ledger.loads.pack()
    ledger.loads.limit_step(0, 2000)
    ledger.loads.limit_running_requests(0, 4, 7)
    assert ledger.loads.ahead.tolist() == [100_000.0]
    assert ledger.loads.pack() is packed


def test_nothing_is_told_of_queues_that_nobody_prices() -> None:
    ledger = Ledger()
    ledger.ensure(2)
    ledger.book("one", 0, b"", 5000, 1.0)
    short = ledger.loads.pack()
    assert unpacked(short).queue_updated_at is None
    ledger.follow_queues(True)
    ledger.check()
    assert len(ledger.loads.pack()) > len(short), "from one moment to the next"
    two = ledger.book("two", 0, b"", 30_000, 1.0)
    ledger.prefill_complete(two, 2.0)
    assert ledger.loads.ahead.tolist() == [5000.0, 0.0], "whose turn it is nobody knows: one step"
    ledger.follow_queues(False)
    ledger.check()
    assert unpacked(ledger.loads.pack()).queue_updated_at is None


def test_the_pace_is_what_was_measured_and_by_nobody_elses_looks() -> None:
    """Two ranks that compute 3,000 tokens a second each, looked at by others or not."""
    ledgers = [Ledger(prior_tokens_per_s=8000.0) for _ in range(2)]
    for ledger in ledgers:
        ledger.ensure(2)
        draw = random.Random(7)
        for number in range(400):
            start, lengths = 2.0 * number, sorted(draw.sample(range(300, 3000), 2))
            booked = [
                ledger.book(f"{number}-{slot}", slot, b"", tokens, start)
                for slot, tokens in enumerate(lengths)
            ]
            for one in booked:
                ledger.prefill_complete(one, start + one.prefill_tokens / 3000.0)
                ledger.free(one)
                if ledger is ledgers[1]:
                    DrainMeter(ledger.loads.work).follow()
                    ledger.loads.pack()
    assert ledgers[0].loads.recent.pace == ledgers[1].loads.recent.pace
    assert ledgers[0].loads.recent.pace == pytest.approx(3000.0, rel=0.02)


@pytest.mark.parametrize("followed", [True, False])
def test_what_was_thought_done_of_a_prompt_goes_with_it(followed: bool) -> None:
    """Frontends that never say when a prompt is computed only free it: nobody may count its tokens
    as gone from the queue of those behind it, for as long as the rank is busy."""
    ledger = Ledger()
    ledger.ensure(1)
    ledger.follow_queues(followed)
    first = ledger.book("first", 0, b"", 100_000, 0.0)
    for number in range(5):
        ledger.book(f"r{number}", 0, b"", 20_000, 0.1)
    ledger.free(first)
    worked = worked_off(
        ledger.loads.queue_updated_at, ledger.loads.ahead, ledger.loads.recent.pace, 1e9
    )
    assert worked.tolist() == [0.0], "whoever is next, nobody has said that it has begun"
    ledger.check()


def test_a_prompt_that_fades_is_not_worked_off_once_more() -> None:
    """Of what its booker said how long it takes, time has taken its part already."""
    ledger = Ledger()
    ledger.ensure(1)
    ledger.follow_queues(True)
    first = ledger.book("first", 0, b"", 10_000, 0.0)
    ledger.book("second", 0, b"", 20_000, 0.1)
    ledger.fade_prefill(first, 5000)
    assert ledger.loads.prefill.tolist() == [25_000.0]
    assert worked_off(
        ledger.loads.queue_updated_at, ledger.loads.ahead, ledger.loads.recent.pace, 1.0
    ).tolist() == [0.0]
    ledger.fade_prefill(first, 0)
    assert worked_off(
        ledger.loads.queue_updated_at, ledger.loads.ahead, ledger.loads.recent.pace, 1e9
    ).tolist() == [0.0]
    ledger.check()
    third = ledger.book("third", 0, b"", 0, 3.0)
    ledger.prefill_complete(third, 3.0)
    assert ledger.loads.ahead.tolist() == [20_000.0], "the second is next, of what is left"
