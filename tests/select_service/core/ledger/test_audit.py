"""What the ledger carries, computed anew: every column that is wrong is named, and nothing else.

That a ledger that was only ever used as it is meant to be adds up is seen in `test_ledger.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from indexer.core.packing import pack_u64
from select_service.core.ledger.audit import STEPS_PER_TURN, LedgerDifference, audit
from select_service.core.ledger.ledger import Ledger
from select_service.core.ledger.reservation import LedgerReservation

SLOTS = 4


def lived(seed: int, bookings: int = 60) -> tuple[Ledger, list[LedgerReservation]]:
    """A ledger with shared, repeated and faded blocks, seats that are taken, and some who went."""
    rng, ledger = random.Random(seed), Ledger(sequence_blocks=3)
    ledger.ensure(SLOTS)
    ledger.loads.limit_running_requests(1, 4, 17)
    live: list[LedgerReservation] = []
    for number in range(bookings):
        blocks = [rng.randrange(3)] + [rng.randrange(40) for _ in range(rng.randrange(6))]
        one = ledger.book(
            f"r{number}", rng.randrange(SLOTS), pack_u64(blocks), rng.randrange(900), number
        )
        live.append(one)
        if rng.random() < 0.5:
            ledger.prefill_complete(rng.choice(live), number)
        if rng.random() < 0.5:
            fraction = rng.choice([None, 0.25, 1.0])
            ledger.output_block(rng.choice(live), fraction, number, rng.randrange(1, 5))
        if rng.random() < 0.3:
            ledger.free(live.pop(rng.randrange(len(live))))
    return ledger, live


def found(ledger: Ledger) -> list[LedgerDifference]:
    return [one for one in audit(ledger) if one is not None]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_was_done_it_adds_up(seed: int) -> None:
    ledger, _ = lived(seed)
    assert found(ledger) == []
    ledger.drop_slot(2)
    assert found(ledger) == []


def spoil(column: str) -> Callable[[Ledger], None]:
    def change(ledger: Ledger) -> None:
        getattr(ledger.loads, column)[1] += 1

    return change


def forget(ledger: Ledger) -> None:
    """A reservation of which nobody took the load away."""
    name = next(iter(ledger.reservations_on(1))).reservation_id
    del ledger._generations[1].reservations[name]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (spoil("requests"), {(1, "requests"), (None, "requests")}),
        (spoil("computing"), {(1, "computing"), (None, "computing")}),
        (spoil("prefill_left"), {(1, "prefill"), (None, "prefill")}),
        (spoil("decode"), {(1, "decode")}),
        (spoil("context"), {(1, "context")}),
    ],
)
def test_what_is_wrong_is_named(
    change: Callable[[Ledger], None], what: set[tuple[int | None, str]]
) -> None:
    ledger, _ = lived(7)
    change(ledger)
    differences = found(ledger)
    assert {(one.slot, one.what) for one in differences} == what
    for one in differences:
        assert abs(one.carried - one.recomputed) == 1


def test_a_ghost_is_seen() -> None:
    ledger, _ = lived(7)
    forget(ledger)
    assert {one.what for one in found(ledger)} >= {"requests", "context"}


def test_what_happens_between_two_turns_is_no_difference() -> None:
    """Bookings and ends at every pause, on the slot that is looked at and on others."""
    ledger, live = lived(3, bookings=4 * STEPS_PER_TURN)
    rng, pauses = random.Random(1), 0
    for one in audit(ledger):
        assert one is None
        pauses += 1
        ledger.free(live.pop(rng.randrange(len(live))))
        chain = pack_u64([rng.randrange(3), rng.randrange(40), rng.randrange(40)])
        booked = ledger.book(f"new{pauses}", rng.randrange(SLOTS), chain, 7, 9999.0)
        live.append(booked)
    assert pauses > SLOTS
