"""A request that is repeated at another replica: the same body gets the first answer, others a 409.

By whatever route it was booked, and whatever became of the replica that booked it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec import UNSET

from select_service.core.effects import Effects
from select_service.core.replication.dynamo_events import ReplicaEnvelope
from select_service.core.replication.message_codec import decode_message, encode_message
from select_service.core.replication.messages import ClaimRecord, Said
from select_service.errors import ReservationConflict, ReservationUnderWay
from select_service.types import (
    PairSelection,
    ReservationAnswer,
    ReservationRequest,
    RoutingConstraints,
)
from select_service.types.batches import SelectBatchAnswer, SelectBatchRequest
from tests.select_service.core.batches.test_batch_selection import place, prompt
from tests.select_service.core.replication.replica import (
    DYNAMO,
    Replica,
    acquainted,
    add,
    pulled,
    silent,
    tell,
)
from tests.select_service.core.test_state import Disk
from tests.select_service.core.whole_fleet import selection_of

PROMPT = (1, 2, 3)

Ask = Callable[..., Any]


def reserved(fleet: Replica, name: str = "a", *, isl: int = 48, **more: Any) -> ReservationAnswer:
    request = ReservationRequest(
        reservation_id=name, worker_id=1, sequence_hashes=list(PROMPT), isl_tokens=isl, **more
    )
    answer, effects = fleet.core.reservations.reserve(request, fleet.now)
    fleet.effects = effects
    fleet.core.check()
    return answer


def taken(fleet: Replica, name: str = "a", *, isl: int = 48, **more: Any) -> Any:
    return fleet.take(name, *PROMPT, isl=isl, **more)


def leased(fleet: Replica, name: str = "a", *, isl: int = 48) -> Any:
    """Under a lease that only one replica has open."""
    if fleet.router_id == THERE and fleet.core.lifecycle.leases.find("lease") is None:
        fleet.core.lifecycle.leases.open("lease", "o", 60.0, fleet.now)
    return fleet.take(name, *PROMPT, isl=isl, lease_id="lease", selection_id="selected")


def wishful(fleet: Replica, name: str = "a", *, isl: int = 48) -> Any:
    """With more to an answer than plain ones have."""
    fleet.hold(2, [1, 2])
    return fleet.take(
        name,
        *PROMPT,
        isl=isl,
        cache_hit_threshold=0.1,
        routing_constraints=RoutingConstraints(preferred_taints={"fast": 1.0}),
    )


def paired(fleet: Replica, name: str = "a", *, isl: int = 48) -> Any:
    answer = fleet.pair(name, *PROMPT, isl=isl)
    assert isinstance(answer, PairSelection)
    assert answer.mode == "disaggregated"
    return answer


def unpaired(fleet: Replica, name: str = "a", *, isl: int = 48) -> Any:
    """A pair was asked for, and one worker costs less."""
    answer = fleet.pair(name, *PROMPT, isl=isl)
    assert isinstance(answer, PairSelection)
    assert answer.mode == "aggregated"
    return answer


def advised(fleet: Replica, name: str = "a", *, isl: int = 48) -> Any:
    """Where workers have roles, an answer says whether a pair were better."""
    answer = fleet.take(name, *PROMPT, isl=isl)
    assert selection_of(answer).advice
    return answer


def in_batch(fleet: Replica, name: str = "a", *, isl: int = 48, **wishes: Any) -> Any:
    item = prompt(*PROMPT, isl=isl, reservation_id=name, **wishes)
    return alone(place(fleet, item, reserve=True))


def alone(answer: SelectBatchAnswer) -> Any:
    """Return the only selection of a batch."""
    (result,) = answer.results
    if result.status == 409:
        raise ReservationConflict(str(result.error))
    assert result.status == 200
    return result.selection


ASKS = (reserved, taken, leased, wishful, paired, unpaired, advised, in_batch)
THERE = 2000


def furnished(fleet: Replica, ask: Ask) -> Replica:
    """With the workers that an ask is for."""
    if ask in {paired, unpaired, advised}:
        fleet.worker(3, role="prefill")
        fleet.worker(4, role="decode")
    if ask is paired:
        fleet.delete(1)
        fleet.delete(2)
    return fleet


def told(fleet: Replica) -> list[Any]:
    """What it has just told, as it comes off the wire."""
    return [decode_message(*encode_message(one)) for one in fleet.effects.published]


def conflicts(ask: Ask, fleet: Replica, **body: Any) -> None:
    before = fleet.core.lifecycle.bookings.own
    with pytest.raises(ReservationConflict):
        ask(fleet, **body)
    assert fleet.core.lifecycle.bookings.own == before


def agrees(ask: Ask, first: Any, fleet: Replica) -> None:
    """It has no load from a repeat, tells nothing of it, and knows another body."""
    before = fleet.core.queries.loads()
    assert ask(fleet) == first
    assert not fleet.effects.published
    assert fleet.core.queries.loads() == before
    conflicts(ask, fleet, isl=49)


def booked_there(ask: Ask) -> tuple[Replica, Replica, Any]:
    """Two replicas that know one another, and what was booked at the second."""
    here, there = (furnished(one, ask) for one in acquainted())
    return here, there, ask(there)


@pytest.mark.parametrize("ask", ASKS)
def test_a_repeat_elsewhere_gets_the_first_answer(ask: Ask) -> None:
    here, there, first = booked_there(ask)
    here.hears(*told(there))
    agrees(ask, first, here)
    agrees(ask, first, there)
    assert here.core.counters.reservations_repeated == 1
    assert here.core.counters.reservations_conflicting == 1


def the_rest(steps: Any, now: float | None = None) -> Any:
    """What a batch, or its undoing, tells from now on."""
    try:
        yield steps.send(now)
        while True:
            yield steps.send(now or 0.0)
    except StopIteration:
        return


@pytest.mark.parametrize("by_snapshot", [False, True])
@pytest.mark.parametrize("kept", [True, False])
def test_a_repeat_elsewhere_of_a_batch_that_may_yet_be_taken_back(
    *, kept: bool, by_snapshot: bool
) -> None:
    """The answer would tell of what is going; whoever asks again is told what became of it."""
    here, there = acquainted()
    item = prompt(*PROMPT, reservation_id="a")
    request = SelectBatchRequest(requests=[], reserve=True, atomic=True)
    batch = there.core.batch_selection.begin(request, [(item, b"")])
    steps = batch.steps(there.now)
    there.effects = next(steps)

    def tells() -> None:
        if by_snapshot:
            tell(there, here, there.turn(there.core.limits.replica_heartbeat_s))
            here.now = there.now
            here.turn(here.core.limits.replica_gap_grace_s + 1.0)
            there.now = here.now
            pulled(here, there)
        else:
            here.hears(*told(there))

    while there.core.lifecycle.bookings.live("a") is None:
        there.effects = steps.send(there.now)
    tells()
    assert here.core.lifecycle.bookings.live("a") is not None
    with pytest.raises(ReservationUnderWay):
        taken(here)
    assert place(here, item, reserve=True).results[0].code == ReservationUnderWay.code
    conflicts(taken, here, isl=49)
    there.effects = Effects()
    for effects in the_rest(steps, there.now) if kept else the_rest(batch.undo(there.now)):
        there.effects.published += effects.published
    tells()
    own = here.core.lifecycle.bookings.own
    first = alone(place(there, item, reserve=True))
    here.hears(*told(there))
    assert in_batch(here) == first
    assert here.core.lifecycle.bookings.own == own


@pytest.mark.parametrize("ask", ASKS)
def test_a_repeat_after_a_snapshot(ask: Ask) -> None:
    here, there, first = booked_there(ask)
    tell(there, here, there.turn(there.core.limits.replica_heartbeat_s))
    here.now = there.now
    here.turn(here.core.limits.replica_gap_grace_s + 1.0)
    pulled(here, there)
    agrees(ask, first, here)


@pytest.mark.parametrize("ask", ASKS)
def test_a_repeat_at_the_heir_of_a_dead_owner_and_at_who_hears_of_it(ask: Ask) -> None:
    here, there, first = booked_there(ask)
    here.hears(*told(there))
    silent(here)
    agrees(ask, first, here)
    here.core.reservations.output_block("a", None, here.now)  # which adopts it
    assert here.core.lifecycle.announcer.claims.adopted == 1
    agrees(ask, first, here)
    third = furnished(Replica(3000), ask)
    tell(here, third, here.turn())
    if ask is paired:  # which has two claims; the other leg's is not adopted yet
        conflicts(ask, third, isl=49)
        return
    agrees(ask, first, third)


@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("who", ["owner", "heir"])
def test_a_repeat_after_a_restart_from_state(ask: Ask, who: str) -> None:
    here, there, first = booked_there(ask)
    disk = Disk((there if who == "owner" else here).core.keep_changes())
    if who == "owner":
        for key in ("a", "a:prefill", "a:decode"):
            if there.core.lifecycle.bookings.live(key) is not None:
                there.core.lifecycle.bookings.touched(there.core.lifecycle.bookings.get(key))
        if ask is leased:
            there.core.lifecycle.leases.touch(
                there.core.lifecycle.leases.get("lease"), there.now, 61.0
            )
        disk.write(there)
        known = there
    else:
        here.hears(*told(there))
        silent(here)
        here.core.reservations.output_block("a", None, here.now)
        here.core.reservations.prefill_complete("a", here.now)
        disk.write(here)
        known = here
    again = furnished(Replica(known.router_id), ask)
    again.now = known.now
    state = again.core.state
    for key in sorted(disk.rows, key=lambda one: state.turn(one[0], disk.rows[one])):
        state.restore(key, disk.rows[key], again.now)
    agrees(ask, first, again)
    # and whoever hears of it from there
    third = furnished(Replica(3000), ask)
    tell(again, third, again.turn())
    third.turn()
    pulled(third, again)
    agrees(ask, first, third)


@pytest.mark.parametrize("ask", ASKS)
def test_another_route_is_another_body(ask: Ask) -> None:
    here, there, _ = booked_there(ask)
    here.hears(*told(there))
    alike = ({taken, in_batch, advised}, {paired, unpaired})
    for other in ASKS:
        if other is not ask and not any({ask, other} <= some for some in alike):
            here.worker(1)
            here.worker(2)
            conflicts(other, here)


def without_body(message: ReplicaEnvelope) -> ReplicaEnvelope:
    """As an older version of ours tells it."""
    assert message.select_service is not UNSET
    stamp = msgspec.structs.replace(message.select_service, fingerprint=b"", answer=b"")
    return msgspec.structs.replace(message, select_service=stamp)


def test_of_an_older_version_s_reservation_no_request_is_a_repeat_until_it_is_told_anew() -> None:
    here, there, first = booked_there(taken)
    (message,) = told(there)
    here.hears(without_body(message))
    conflicts(taken, here)
    (record,) = (
        one
        for one in there.core.replica_operations.snapshot(there.now)
        if isinstance(one, ClaimRecord)
    )
    here.hears(Said(THERE, 1, there.core.lifecycle.announcer.claims.outbox.seq + 1, [record]))
    agrees(taken, first, here)
    assert here.core.lifecycle.announcer.claims.counters.claims_corrected == 0


@pytest.mark.parametrize(
    "answer", [b"\xc1", b"\x92\xa1r\x01", b"\x92\xa1r\xa1\xff", b"\x92\xa1r\xa1x"]
)
def test_an_answer_that_does_not_fit_is_none(answer: bytes) -> None:
    """As a newer version may write it; the last is of another route."""
    here, there, _ = booked_there(taken)
    (message,) = told(there)
    stamp = msgspec.structs.replace(message.select_service, answer=answer)
    here.hears(msgspec.structs.replace(message, select_service=stamp))
    conflicts(taken, here)
    assert here.load(1) is not None


def test_a_reservation_of_dynamo_is_nobody_s_repeat() -> None:
    """Its messages do not say what was asked, and its own selectors refuse every repeat."""
    here = Replica()
    here.dynamo(add(*PROMPT, tokens=48), "a")
    for ask in (reserved, taken, in_batch):
        conflicts(ask, here)
    assert here.core.lifecycle.bookings.get("a").reservation.origin == DYNAMO


def test_an_id_made_here_has_no_repeat_to_tell_of() -> None:
    _, there = acquainted()
    there.take(None, *PROMPT)
    (message,) = told(there)
    assert message.select_service.answer == message.select_service.fingerprint == b""


@pytest.mark.parametrize("isl", [48, 49])
def test_a_request_that_waits_while_it_is_repeated_elsewhere(isl: int) -> None:
    here, there = acquainted()
    for worker_id in (1, 2):
        here.patch(worker_id, max_num_batched_tokens=1)
        here.book(f"load{worker_id}", worker_id, isl=1000)
    ticket = taken(here)
    first = taken(there, isl=isl)
    here.hears(*told(there))
    here.free("load1")
    here.free("load2")
    if isl == 48:
        assert ticket.answer == first
    else:  # another body has taken the id
        assert isinstance(ticket.answer, ReservationConflict)
    assert here.core.counters.reservations_booked == 2
