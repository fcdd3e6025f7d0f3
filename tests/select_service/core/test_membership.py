"""What is left of partitions and of large tables when they are not needed any more."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sized

from indexer.types import Scope
from select_service.core.dict_compaction import (
    LOOKS_PER_TURN_MAX,
    ROUND_EVERY_S,
    TABLE_BYTES_MIN,
    DictCompaction,
    slim,
)
from select_service.core.effects import Effects
from select_service.types import CoreLimits, ReservationRequest
from tests.select_service.core.whole_fleet import Fleet


def test_a_partition_that_is_given_up_leaves_no_ring() -> None:
    """Only a full collection would find it, and there is none for minutes."""
    fleet = Fleet(limits=CoreLimits(scope_linger_s=0.0))
    left: list[weakref.ref[object]] = []
    gc.disable()
    try:
        for number in range(10):
            model = f"model-{number}"
            fleet.worker(number, model_name=model)
            booking = ReservationRequest(
                reservation_id=f"r{number}",
                worker_id=number,
                sequence_hashes=[9],
                isl_tokens=16,
                model_name=model,
            )
            fleet.core.reservations.reserve(booking, fleet.now)
            fleet.core.reservations.free(f"r{number}", fleet.now)
            partition = fleet.core.partitions[Scope(model, "default")]
            parts = (partition, partition.index, partition.index.tree, partition.ledger)
            left += map(weakref.ref, (*parts, partition.ledger.blocks))
            left += map(weakref.ref, fleet.core.registry.streams())
            del partition, parts
            fleet.delete(number)
        for _ in range(10):
            fleet.now += 11.0
            fleet.core.tick(fleet.now)
        fleet.effects = Effects()
        assert not fleet.core.partitions
        assert not [one for one in left if one() is not None]
    finally:
        gc.enable()


def test_a_table_that_was_large_is_made_anew() -> None:
    table = {number: str(number) for number in range(10_000)}
    full = table.__sizeof__()
    assert not slim(table), "it is needed"
    for number in range(9_900):
        del table[number]
    assert table.__sizeof__() == full
    left = list(table.items())
    assert slim(table)
    assert list(table.items()) == left, "in the same order"
    assert table.__sizeof__() < TABLE_BYTES_MIN
    assert not slim(table)


def test_all_tables_are_looked_at_in_turn() -> None:
    tables = [dict.fromkeys(range(5000)) for _ in range(1000)]
    for table in tables:
        for number in range(5000):
            del table[number]
    slimming = DictCompaction(lambda: iter(tables))
    slimming.go_on(0.0)
    for turn in range(1, 6):
        slimming.go_on(ROUND_EVERY_S + turn / 1000)
        assert slimming.slimmed == min(turn * LOOKS_PER_TURN_MAX, 1000)


def test_after_a_round_the_tables_rest() -> None:
    rounds = 0

    def tables() -> Iterator[Sized]:
        nonlocal rounds
        rounds += 1
        return iter([{}, {}, {}])

    slimming = DictCompaction(tables)
    for turn in range(1000):
        slimming.go_on(turn / 100)
    assert rounds == 10 / ROUND_EVERY_S


def test_after_many_reservations_no_table_is_large() -> None:
    fleet = Fleet(limits=CoreLimits())
    fleet.worker(1)
    for number in range(5000):
        booking = ReservationRequest(
            reservation_id=f"r{number}",
            worker_id=1,
            sequence_hashes=[2 * number, 2 * number + 1],
            isl_tokens=32,
        )
        fleet.core.reservations.reserve(booking, fleet.now)
    for number in range(5000):
        fleet.core.reservations.free(f"r{number}", fleet.now)
    for _ in range(4):
        fleet.now += ROUND_EVERY_S
        fleet.core.tick(fleet.now)
    assert fleet.core.dict_compaction.slimmed >= 3, "of the ids, of the rank, of the chains"
    assert len(fleet.core.lifecycle.bookings.by_id) == 0
    assert fleet.core.lifecycle.bookings.by_id.__sizeof__() < TABLE_BYTES_MIN
    fleet.core.check()
