"""The ledger: odd inputs, and a naive twin as opponent."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    precondition,
    rule,
)
from typing_extensions import override

from indexer.core.packing import unpack_u64
from select_service.core.ledger.audit import audit
from select_service.core.ledger.ledger import Ledger
from select_service.core.ledger.reservation import LedgerReservation
from tests.effort import examples
from tests.indexer.core.indices import pack
from tests.models.ledger import NaiveLedger, NaiveReservation

SLOTS = 2


@pytest.fixture
def ledger() -> Ledger:
    ledger = Ledger()
    ledger.ensure(SLOTS)
    return ledger


def book(
    ledger: Ledger, name: str, *hashes: int, slot: int = 0, prefill: int = 0
) -> LedgerReservation:
    reservation = ledger.book(name, slot, pack(*hashes), prefill, 0.0)
    ledger.check()
    return reservation


def shared(ledger: Ledger, *hashes: int) -> list[float] | None:
    groups = ledger.shared_groups(pack(*hashes))
    if groups is None:
        return None
    by_slot = {int(slot): float(blocks) for blocks, slots in groups for slot in slots}
    return [by_slot.get(slot, 0.0) for slot in range(len(ledger._generations))]


def test_prefill_of_the_full_range_of_u64_leaves_nothing_behind(ledger: Ledger) -> None:
    huge, small = book(ledger, "a", prefill=2**64 - 1), book(ledger, "b", prefill=3)
    ledger.free(huge)
    assert ledger.loads.prefill_left[0] == ledger.loads.prefill[0] == 3
    ledger.free(small)
    assert ledger.loads.prefill[0] == 0


def test_long_prompts_make_slices_shorter(ledger: Ledger) -> None:
    for n in range(4):
        ledger.book(str(n), 0, pack(*range(n * 1000, n * 1000 + 640)), 0, 0.0)
    ledger.drop_slot(0)
    assert [len(ledger.sweep(20)) for _ in range(3)] == [2, 2, 0]


# Few values and few forks, so that prefixes, repeats and collisions are the rule.
ODD = st.lists(st.integers(0, 2), max_size=4)
CHAINED = st.builds(  # as honest clients send: the value tells the whole prefix
    lambda fork, length: [10 + i if i < fork else 20 + fork * 10 + i for i in range(length)],
    st.integers(1, 3),
    st.integers(0, 5),
)
CHAINS = st.one_of(
    ODD,
    CHAINED,
    st.builds(lambda chained, odd: chained + odd, CHAINED, ODD),
    st.builds(lambda chained, cut: chained[cut:] + chained[:cut], CHAINED, st.integers(1, 3)),
)
FRACTIONS = st.none() | st.sampled_from([0.0, 0.3, 0.5, 1.0]) | st.floats(0, 1)


def test_a_lane_that_closed_shares_nothing_though_every_slot_has_its_own_again() -> None:
    ledger = Ledger()
    ledger.ensure(1)
    book(ledger, "first", 1)
    ledger.drop_slot(0)  # closes lane 0, and the slot goes on in lane 1
    ledger.sweep(10)
    book(ledger, "second", 2)
    ledger.drop_slot(0)  # closes lane 1, and the slot is back in lane 0
    assert shared(ledger, 2) in (None, [0.0])
    assert not [slots for _, slots in ledger.shared_groups(pack(2)) or () if len(slots)]
    ledger.check()


def test_who_shares_is_told_by_slot_also_after_a_rank_has_gone(ledger: Ledger) -> None:
    book(ledger, "gone", 1, 2, 3)
    ledger.drop_slot(0)
    book(ledger, "here", 1, 2)
    book(ledger, "there", 1, slot=1)
    groups = ledger.shared_groups(pack(1, 2, 3)) or []
    shared_blocks = {int(slot): blocks for blocks, slots in groups for slot in slots}
    assert shared_blocks == {0: 2, 1: 1}
    assert shared(ledger, 1, 2, 3) == [
        shared_blocks.get(slot, 0) for slot in range(len(ledger.loads.prefill))
    ]


class AgainstTheTwin(RuleBasedStateMachine):
    live = Bundle("live")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.ledger = Ledger(sequence_blocks=3)
        self.ledger.ensure(SLOTS)
        self.twin = NaiveLedger(sequence_blocks=3)
        self.names: dict[str, LedgerReservation] = {}
        self.dropped: set[LedgerReservation] = set()  # and not swept yet
        self.slots = SLOTS
        self.number = 0

    @rule(
        target=live,
        slot=st.integers(0, SLOTS + 1),
        hashes=CHAINS,
        prefill=st.integers(0, 100),
        ttl_s=st.sampled_from([0.0, 2.0, 5.0]),
    )
    def book(self, slot: int, hashes: list[int], prefill: int, ttl_s: float) -> str:
        slot %= self.slots
        self.number += 1
        name = str(self.number)
        self.names[name] = self.ledger.book(
            name, slot, pack(*hashes), prefill, self.now, ttl_s=ttl_s
        )
        self.twin.live[name] = NaiveReservation(slot, hashes, prefill, self.now, ttl_s)
        return name

    @rule(name=live)
    def prefill_complete(self, name: str) -> None:
        if name in self.names:
            self.ledger.prefill_complete(self.names[name], self.now)
            self.twin.live[name].prefill_done = True
            self.twin.live[name].touched = self.now

    @rule(name=live, fraction=FRACTIONS)
    def output_block(self, name: str, fraction: float | None) -> None:
        if name in self.names:
            self.ledger.output_block(self.names[name], fraction, self.now)
            self.twin.output_block(name, fraction)
            self.twin.live[name].touched = self.now

    @rule(name=live, ttl_s=st.sampled_from([None, 0.0, 1.0, 7.0]))
    def touch(self, name: str, ttl_s: float | None) -> None:
        if name in self.names:
            self.ledger.touch(self.names[name], self.now, ttl_s)
            self.twin.live[name].touched = self.now
            if ttl_s is not None:
                self.twin.live[name].ttl_s = ttl_s

    @rule(name=consumes(live))
    def free(self, name: str) -> None:
        if name in self.names:
            self.ledger.free(self.names.pop(name))
            self.twin.free(name)

    @rule(slot=st.integers(0, SLOTS - 1))
    def drop_slot(self, slot: int) -> None:
        dropped = [n for n, r in self.twin.live.items() if r.slot == slot]
        assert self.ledger.drop_slot(slot) == len(dropped)
        for name in dropped:
            self.dropped.add(self.names.pop(name))
            self.twin.free(name)

    @precondition(lambda self: self.dropped)
    @rule(limit=st.integers(1, 3))
    def sweep(self, limit: int) -> None:
        swept = set(self.ledger.sweep(limit))
        assert swept
        assert swept <= self.dropped
        self.dropped -= swept
        assert self.ledger.is_swept is not bool(self.dropped)

    @rule(
        slot=st.integers(0, SLOTS - 1),
        seats=st.sampled_from([None, 1, 2, 3, 2**64 - 1]),
        wait=st.sampled_from([0, 5, 100]),
    )
    def limit_running_requests(self, slot: int, seats: int | None, wait: int) -> None:
        self.ledger.loads.limit_running_requests(slot, seats, wait)
        self.twin.seats.pop(slot, None)
        if seats is not None:
            self.twin.seats[slot] = seats, wait

    @rule(more=st.integers(0, 1))
    def grow(self, more: int) -> None:
        self.slots = min(SLOTS + 2, self.slots + more)
        self.ledger.ensure(self.slots)

    @rule(step=st.sampled_from([0.5, 1.0, 4.0]), limit=st.integers(1, 4))
    def expire(self, step: float, limit: int) -> None:
        self.now += step
        expected = self.twin.expired(self.now)
        while self.ledger.next_expiry() <= self.now:
            for reservation in self.ledger.expired(self.now, limit):
                expected.remove(reservation.reservation_id)
                self.ledger.free(reservation)
                del self.names[reservation.reservation_id]
                self.twin.free(reservation.reservation_id)
        assert not expected

    @rule(hashes=CHAINS)
    def shared_prefix(self, hashes: list[int]) -> None:
        expected = [self.twin.shared_prefix(hashes, slot) for slot in range(self.slots)]
        assert (shared(self.ledger, *hashes) or [0] * self.slots) == expected

    @invariant()
    def agrees(self) -> None:
        self.ledger.check()
        assert not any(audit(self.ledger)), "it adds up"
        assert self.ledger.live == len(self.twin.live)
        for slot in range(self.slots):
            assert self.ledger.loads.prefill[slot] == self.twin.prefill(slot)
            assert self.ledger.loads.decode[slot] == self.twin.decode(slot)
            assert self.ledger.loads.context[slot] == self.twin.context(slot)
            assert self.ledger.loads.requests[slot] == len(self.twin.on(slot))
        for name, reservation in self.names.items():
            assert unpack_u64(self.ledger.chain_of(reservation)) == self.twin.live[name].hashes
            assert reservation.output_blocks == len(self.twin.live[name].outputs)

    @override
    def teardown(self) -> None:
        for slot in range(self.slots):
            self.ledger.drop_slot(slot)
        while self.ledger.sweep(1):
            self.ledger.check()
        assert (self.ledger.blocks.nodes, self.ledger.blocks.blocks) == (0, 0)
        assert not self.ledger.loads.prefill.any()
        assert not self.ledger.loads.decode.any()
        assert not self.ledger.loads.context.any()


AgainstTheTwin.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=40, deadline=None
)
TestAgainstTheTwin = AgainstTheTwin.TestCase
