"""A request that waits for a place, or ran before a restart, is no silence of its session."""

from __future__ import annotations

from typing import TYPE_CHECKING

from select_service.types import CoreLimits, Selection
from select_service.types.admission import AdmissionSettings
from tests.select_service.core.whole_fleet import DEFAULT, Fleet, selection_of, ticket_of

if TYPE_CHECKING:
    from select_service.core.changes import StateKey
    from select_service.core.reservations.sessions import SessionCounters

GAP_S = 0.5


def programs() -> tuple[Fleet, int]:
    """Two workers behind a gate, and a program with short gaps; where it is."""
    fleet = Fleet(
        admission=AdmissionSettings(policy="slo-shed", prefill_tokens_per_s=1_000.0),
        limits=CoreLimits(session_ttl_s=600.0),
    )
    for worker_id in (1, 2):
        fleet.worker(worker_id)
    place = 0
    for number in range(3):
        answer = selection_of(fleet.take(f"r{number}", number, session_id="s"))
        assert place in {0, answer.worker_id}
        place = answer.worker_id
        fleet.free(f"r{number}")
        fleet.now += GAP_S
    return fleet, place


def restarted(fleet: Fleet, rows: dict[StateKey, bytes]) -> Fleet:
    """Another life of the service, from its disk."""
    again = Fleet(limits=fleet.core.limits)
    again.now = fleet.now
    for key in sorted(rows, key=lambda one: again.core.state.turn(one[0], rows[one])):
        again.core.state.restore(key, rows[key], again.now)
    again.core.check()
    return again


def counters(fleet: Fleet) -> SessionCounters:
    return fleet.core.sessions.counters


def test_a_session_stays_where_it_is_although_its_request_waited_for_longer() -> None:
    fleet, place = programs()
    for worker_id in (1, 2):
        fleet.book(f"load{worker_id}", worker_id, *range(100), isl=3_200)
    ticket = ticket_of(fleet.take("late", 9, session_id="s", slo_class="batch"))
    fleet.now += 60.0
    for worker_id in (1, 2):
        fleet.free(f"load{worker_id}")
    assert isinstance(ticket.answer, Selection)
    assert ticket.answer.worker_id == place
    assert (counters(fleet).begun, counters(fleet).expired) == (1, 0)
    rank = fleet.core.sessions.find(fleet.core.partitions[DEFAULT], "s")
    assert rank is not None
    assert rank.gap_s <= GAP_S, "nor did its tool take any longer"


def test_a_session_whose_request_ran_before_a_restart_is_not_silent_after_it() -> None:
    fleet, place = programs()
    changes = fleet.core.keep_changes()
    fleet.worker(1)
    fleet.worker(2)
    fleet.take("long", 9, session_id="s")
    rows: dict[StateKey, bytes] = {}
    while (taken := changes.take([], ())) is not None:
        record = fleet.core.state.record(taken[0])
        if record is not None:
            rows[taken[0]] = record
        changes.written(*taken)
    again = restarted(fleet, rows)
    again.tick(60.0)
    assert selection_of(again.take("beside", 10, session_id="s")).worker_id == place
    assert counters(again).kept == 1
    for name in ("beside", "long"):
        again.free(name)
    again.tick(60.0)
    again.take("later", 11, session_id="s")
    assert counters(again).begun == 1, "only now it was silent"
