"""Any history of pairs: both legs or none, and all load ends."""

from __future__ import annotations

import contextlib

from hypothesis import given, settings
from hypothesis import strategies as st

from select_service.core.ledger.reservation_ids import leg_ids
from select_service.errors import ServiceError
from tests.effort import examples
from tests.select_service.core.whole_fleet import Fleet

STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ("pair", "take", "book", "done", "output", "free", "leg", "delete", "worker", "wait")
        ),
        st.integers(0, 3),
        st.integers(1, 5),
    ),
    max_size=40,
)
ROLES = {1: "prefill", 2: "prefill", 3: "decode", 4: "decode", 5: "aggregated"}


def step(fleet: Fleet, verb: str, number: int, worker: int) -> None:
    name = f"r{number}"
    if verb == "pair":
        fleet.pair(name, *range(number * 3 + worker))
    elif verb == "take":
        fleet.take(name, *range(number + 1))
    elif verb == "book":
        fleet.book(leg_ids(name)[worker % 2], worker, *range(number + 1))
    elif verb == "done":
        fleet.done(name)
    elif verb == "output":
        fleet.core.reservations.output_block(name, None, fleet.now)
    elif verb == "free":
        fleet.free(name)
    elif verb == "leg":
        fleet.free(leg_ids(name)[worker % 2])
    elif verb == "delete":
        fleet.delete(worker)
    elif verb == "worker":
        fleet.worker(worker, role=ROLES[worker], max_num_batched_tokens=16)
    else:
        fleet.tick(120.0)


@settings(deadline=None, max_examples=examples(150))
@given(STEPS)
def test_there_are_both_legs_or_none_and_all_load_ends(
    steps: list[tuple[str, int, int]],
) -> None:
    fleet = Fleet()
    for worker in ROLES:
        step(fleet, "worker", 0, worker)
    live = fleet.core.lifecycle.bookings
    for one in steps:
        before = {name for n in range(4) for name in leg_ids(f"r{n}") if live.live(name)}
        pairs = {leg.reservation.pair for n in range(4) for leg in live.legs(f"r{n}")}
        with contextlib.suppress(ServiceError):
            step(fleet, *one)
        for number in range(4):
            legs = live.legs(f"r{number}")
            if legs and f"r{number}" not in pairs:
                assert len(legs) == 2, "a pair that is new has both legs"
                assert not before & set(leg_ids(f"r{number}"))
    end_all(fleet)
    rows = [row for scope in fleet.core.queries.loads() for row in scope.loads]
    assert not any(row.potential_prefill_tokens for row in rows)
    assert not any(row.potential_decode_blocks for row in rows)
    assert not any(row.active_requests for row in rows)


def end_all(fleet: Fleet) -> None:
    """End what is booked, and what is let in by that, until nobody waits."""
    pending = True
    while pending:
        for number in range(4):
            for name in (f"r{number}", *leg_ids(f"r{number}")):
                with contextlib.suppress(ServiceError):
                    fleet.free(name)
        fleet.tick(1e6)
        pending = any(scope.pending_count for scope in fleet.core.queries.loads())
    fleet.tick(1e6)
