"""Thousands of scopes hold the loop no longer than a few: some are looked after a turn."""

from __future__ import annotations

import math

import pytest

from indexer.types import Scope
from select_service.core.dict_compaction import all_tables
from select_service.types import CoreLimits, ReservationRequest
from tests.select_service.core.whole_fleet import Fleet

PER_TURN = 3
SCOPES = 10


def booked(fleet: Fleet, number: int, count: int = 1, ttl_s: float | None = None) -> None:
    for turn in range(count):
        request = ReservationRequest(
            reservation_id=f"r{number}-{turn}",
            worker_id=number,
            model_name=f"model-{number}",
            isl_tokens=16,
            sequence_hashes=[number],
            ttl_s=ttl_s,
        )
        fleet.core.reservations.reserve(request, fleet.now)


def many(limits: CoreLimits) -> Fleet:
    fleet = Fleet(limits=limits)
    for number in range(SCOPES):
        fleet.worker(number, model_name=f"model-{number}")
    while fleet.core.tick(fleet.now)[0]:
        pass
    return fleet


def live(fleet: Fleet) -> list[int]:
    return [one.ledger.live for one in fleet.core.partitions.values()]


def test_a_turn_looks_after_some_and_a_round_after_all() -> None:
    fleet = many(CoreLimits(scopes_per_turn_max=PER_TURN))
    for number in range(SCOPES):
        booked(fleet, number, ttl_s=10.0)
    fleet.now += 11.0
    left = []
    more = True
    while more:
        more, _ = fleet.core.tick(fleet.now)
        left.append(sum(live(fleet)))
    assert left == [7, 4, 1, 0], "more is said while somebody is left"


@pytest.mark.parametrize("scopes", [SCOPES, 70, 100])
def test_a_round_that_finds_nothing_ends(scopes: int) -> None:
    """Indexes are gone round too, more a turn: no round may begin because the other goes on."""
    fleet = Fleet()
    for number in range(scopes):
        fleet.worker(number, model_name=f"model-{number}")
    while fleet.core.tick(fleet.now)[0]:
        pass
    fleet.now += 1.0
    turns = 1
    while fleet.core.tick(fleet.now)[0]:
        turns += 1
    assert turns == math.ceil(scopes / CoreLimits().scopes_per_turn_max)


def test_who_has_much_to_do_keeps_nobody_waiting() -> None:
    limits = CoreLimits(scopes_per_turn_max=PER_TURN, expired_per_turn_max=5)
    fleet = many(limits)
    booked(fleet, 0, count=100, ttl_s=10.0)
    booked(fleet, SCOPES - 1, ttl_s=10.0)
    fleet.now += 11.0
    turns = 0
    while live(fleet)[-1]:
        more, _ = fleet.core.tick(fleet.now)
        assert more
        turns += 1
    assert turns <= -(-SCOPES // PER_TURN) + 1
    assert live(fleet)[0] > 50, "it is not done itself"
    while fleet.core.tick(fleet.now)[0]:
        turns += 1
    assert not any(live(fleet))
    assert turns < 30, "nor does it wait for whole rounds"


def test_who_looks_at_tables_keeps_no_scope_alive() -> None:
    """A round of a thousand lasts for minutes when nothing happens."""
    fleet = many(CoreLimits())
    core = fleet.core
    tables = all_tables(core.registry, core.lifecycle, core.partitions)
    first = next(iter(core.partitions.values())).ledger
    for table in tables:
        if table is first.blocks.root.children:
            break
    for number in range(1, SCOPES):
        del core.partitions[Scope(f"model-{number}", "default")]
        core.registry.drop_index(Scope(f"model-{number}", "default"))
    rest = list(tables)
    assert rest, "the first scope's index is still there"
    assert len(rest) < 2 * SCOPES, "of those that are gone nothing is looked at"
