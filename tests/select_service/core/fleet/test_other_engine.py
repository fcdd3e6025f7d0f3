"""A worker with another endpoint is another engine: what was learnt of the first is forgotten."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from select_service.types import CoreLimits, TrustSettings
from tests.select_service.core.decisions.doubted import ISL, PROMPT
from tests.select_service.core.fleet.test_kv_events import blind, matched
from tests.select_service.core.whole_fleet import DEFAULT, Fleet, selection_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from select_service.core.partition import Partition

OTHER = "http://elsewhere"
SAME: dict[str, Callable[[Fleet], object]] = {
    "patched": lambda fleet: fleet.patch(1, max_inflight=9),
    "again": lambda fleet: fleet.worker(1),
    "drained and not": lambda fleet: (fleet.drain(1), fleet.undrain(1)),
    "patched with what it has": lambda fleet: fleet.patch(1, endpoint="http://w1"),
    "other events": lambda fleet: fleet.worker(1, replay_endpoint="tcp://127.0.0.1:6001"),
}
MOVED: dict[str, Callable[[Fleet], object]] = {
    "registered": lambda fleet: fleet.worker(1, endpoint=OTHER),
    "patched": lambda fleet: fleet.patch(1, endpoint=OTHER),
}
moves = pytest.mark.parametrize("move", MOVED.values(), ids=MOVED)
stays = pytest.mark.parametrize("stay", SAME.values(), ids=SAME)


def made(**settings: Any) -> Fleet:
    fleet = Fleet(**settings)
    fleet.worker(1)
    return fleet


def partition_of(fleet: Fleet) -> Partition:
    return fleet.core.partitions[DEFAULT]


def measured(fleet: Fleet) -> tuple[int, int]:
    """How many first tokens and blocks of output were measured."""
    (slot,) = partition_of(fleet).fleet_slots.workers[1].slots.values()
    rank = partition_of(fleet).ledger.loads.speeds.by_slot.get(slot)
    return (0, 0) if rank is None else (rank.ttft.samples, rank.block.samples)


def serve(fleet: Fleet, name: str, steps: int = 9) -> None:
    """Serve a prompt, or the first steps of that."""
    fleet.now += 1.0
    fleet.book(name, 1, int(name[1:]) + 100, isl=640)
    go_on(fleet, name, range(steps))


def go_on(fleet: Fleet, name: str, steps: range) -> None:
    for step in steps:
        fleet.now += 0.5
        if not step:
            fleet.done(name)
        elif step < 4:
            fleet.core.reservations.output_block(name, None, fleet.now)
        elif step == 4:
            fleet.free(name)


@stays
def test_speeds_stay_where_the_engine_does(stay: Callable[[Fleet], object]) -> None:
    fleet = made()
    for number in range(6):
        serve(fleet, f"r{number}")
    before = measured(fleet)
    assert before == (6, 12)
    stay(fleet)
    assert measured(fleet) == before


@moves
def test_speeds_are_forgotten_with_the_engine(move: Callable[[Fleet], object]) -> None:
    fleet = made()
    for number in range(6):
        serve(fleet, f"r{number}")
    move(fleet)
    assert measured(fleet) == (0, 0)
    serve(fleet, "r9")
    assert measured(fleet) == (1, 2)
    fleet.core.check()


@moves
@pytest.mark.parametrize("steps", range(5))
def test_requests_of_the_engine_before_teach_nothing(
    move: Callable[[Fleet], object], steps: int
) -> None:
    fleet = made()
    serve(fleet, "r1", steps)
    assert fleet.load(1) is not None
    load = fleet.load(1)
    move(fleet)
    assert fleet.load(1) == load, "reservations stay"
    go_on(fleet, "r1", range(steps, 9))
    assert measured(fleet) == (0, 0)
    assert fleet.load(1) == (0, 0, 0)
    fleet.core.check()


@moves
def test_the_next_engine_is_not_passed_over(move: Callable[[Fleet], object]) -> None:
    fleet = made(limits=CoreLimits(outlier_failures=2, outlier_ejection_s=60.0))
    fleet.worker(2)
    for number in range(4):
        fleet.book(f"r{number}", 1, number + 1)
    fail(fleet, "r0", "r1")
    assert partition_of(fleet).outliers.ejected
    fleet.now += 1.0
    move(fleet)
    assert not partition_of(fleet).outliers.ejected
    fail(fleet, "r2", "r3")
    assert not partition_of(fleet).outliers.ejected, "those were booked on the one before"
    fleet.now += 1.0
    for number in (5, 6):
        fleet.book(f"r{number}", 1, number)
    fail(fleet, "r5", "r6")
    assert partition_of(fleet).outliers.ejected
    fleet.core.check()


def fail(fleet: Fleet, *names: str) -> None:
    for name in names:
        fleet._did(fleet.core.reservations.free(name, fleet.now, None, "failed"))


@pytest.mark.parametrize("is_estimated", [False, True])
def test_distrust_is_of_estimates_or_of_the_source_of_events(*, is_estimated: bool) -> None:
    fleet = Fleet(trust=TrustSettings(samples=4))
    if is_estimated:
        blind(1, fleet)
    else:
        fleet.worker(1)
        fleet.hold(1, [*PROMPT])
    (slot,) = partition_of(fleet).fleet_slots.workers[1].slots.values()
    trust = partition_of(fleet).trust
    fleet.now += 1.0
    trust.compare(slot, 128, 128, fleet.now)
    for _ in range(5):
        trust.compare(slot, 128, 0, fleet.now)
    assert trust.distrusted()
    selection_of(fleet.take("live", *PROMPT, isl=ISL, allowed_worker_ids=[1]))
    fleet.now += 1.0
    fleet.patch(1, endpoint=OTHER)
    assert bool(trust.distrusted()) != is_estimated
    before = trust.find(slot)
    samples = 0 if before is None else before.samples
    fleet._did(fleet.core.reservations.prefill_complete("live", fleet.now, 0))
    after = trust.find(slot)
    assert samples == (0 if after is None else after.samples), "of the engine before"
    fleet.core.check()


@pytest.mark.parametrize("is_patched", [False, True])
def test_the_next_engine_has_nothing_cached_that_was_estimated(*, is_patched: bool) -> None:
    fleet = Fleet()
    blind(1, fleet)
    for name in ("r", "live"):
        selection_of(fleet.take(name, *PROMPT, isl=ISL))
    fleet.done("r")
    assert matched(fleet, 1, *PROMPT) == len(PROMPT)
    fleet.now += 1.0
    if is_patched:
        fleet.patch(1, endpoint=OTHER)
    else:
        blind(1, fleet, endpoint=OTHER)
    assert matched(fleet, 1, *PROMPT) == 0
    fleet._did(fleet.core.reservations.prefill_complete("live", fleet.now, ISL))
    assert matched(fleet, 1, *PROMPT) == 0, "what was computed elsewhere is not cached here"
    fleet.now += 1.0
    selection_of(fleet.take("next", *PROMPT, isl=ISL))
    fleet.done("next")
    assert matched(fleet, 1, *PROMPT) == len(PROMPT)
    fleet.core.check()


@moves
def test_sessions_of_the_engine_before_may_go_anywhere(move: Callable[[Fleet], object]) -> None:
    fleet = made(limits=CoreLimits(session_ttl_s=60.0))
    fleet.worker(2)
    chosen = {selection_of(fleet.select(9, session_id="s")).worker_id for _ in range(4)}
    assert len(chosen) == 1
    if chosen == {2}:
        selection_of(fleet.select(9, session_id="s", allowed_worker_ids=[1]))
    assert selection_of(fleet.select(9, session_id="s")).worker_id == 1
    move(fleet)
    fleet.select(9, session_id="s")
    assert fleet.core.sessions.counters.released == 1


def test_a_rank_that_stays_is_another_engine_and_one_that_goes_is_none() -> None:
    fleet = Fleet()
    several = {"kv_events_endpoints": {str(rank): f"tcp://w1:{rank}" for rank in range(2)}}
    fleet.worker(1, data_parallel_size=2, **several)
    ledger = partition_of(fleet).ledger
    slots = dict(partition_of(fleet).fleet_slots.workers[1].slots)
    fleet.worker(1, data_parallel_size=2, endpoint=OTHER, **several)
    assert ledger.engine_since.keys() == set(slots.values())
    fleet.worker(1, endpoint="http://w1")
    assert ledger.engine_since.keys() == {slots[0]}
    fleet.delete(1)
    assert not ledger.engine_since
    fleet.core.check()
