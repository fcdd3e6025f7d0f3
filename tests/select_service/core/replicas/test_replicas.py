"""What a receiver does with what it hears of the reference's selectors, and of ours."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from select_service.core.books.loads import worked_off
from select_service.core.effects import Pull
from select_service.core.replicas.claims import SEQ_BITS
from select_service.core.replicas.events import TOPIC, ReplicaEnvelope
from select_service.core.replicas.messages import Ended, Heartbeat, Said, SnapshotHead
from select_service.core.replicas.wire import decode_message
from select_service.errors import ReservationConflict, ReservationNotFound
from select_service.types import CoreLimits
from tests.select_service.core.whole_fleet import DEFAULT, Fleet

OURS = 1000
DYNAMO = 77


class Replica(Fleet):
    """A fleet on a replica plane, with two workers."""

    def __init__(self, router_id: int = OURS, **limits: Any) -> None:
        super().__init__(router_id=router_id, limits=CoreLimits(**limits))
        self.router_id = router_id
        self.core.replica_announce(8092)
        self.worker(1, data_parallel_size=1)
        self.worker(2)

    def hears(self, message: Any, peer: str = "tcp://peer:1") -> None:
        self._did(self.core.replica_heard(peer, message, self.now))

    def turn(self, seconds: float = 0.0) -> list[Any]:
        """One turn of the replica plane; what it says."""
        self.now += seconds
        said = []
        more = True
        while more:
            more, effects = self.core.replica_tick(self.now)
            self._did(effects)
            said += effects.published
            self.pulls = effects.pulls
        return said

    def dynamo(self, data: Any, request_id: str = "x", worker_id: int = 1, **more: Any) -> None:
        """One event as the reference publishes it."""
        envelope = {
            "model_name": more.get("model_name", "default"),
            "tenant_id": more.get("tenant_id", "default"),
            "block_size": more.get("block_size", 16),
            "event": {
                "request_id": request_id,
                "worker": {"worker_id": worker_id, "dp_rank": more.get("dp_rank", 0)},
                "data": data,
                "router_id": more.get("router_id", DYNAMO),
                "lora_name": None,
            },
        }
        self.hears(decode_message(TOPIC, msgspec.msgpack.encode(envelope)))


def endings(messages: Any) -> list[Any]:
    """What is told of reservations, without heartbeats and the like."""
    return [one.event.data for one in messages if isinstance(one, ReplicaEnvelope) and one.event]


def add(*hashes: int, tokens: int | None = 40, **more: Any) -> dict[str, Any]:
    hint = None if tokens is None else {"initial_effective_prefill_tokens": tokens}
    return {"AddRequest": {"token_sequence": list(hashes), "prefill_load_hint": hint} | more}


# -- the reference's selectors ---------------------------------------------------------------------


def test_an_admission_of_a_dynamo_is_a_full_reservation() -> None:
    here = Replica()
    here.dynamo(add(1, 2, 2**64 - 1))
    assert here.load(1) == (40, 3, 1)
    with pytest.raises(ReservationConflict):
        here.book("x", 1, 5)
    here.done("x")
    assert here.load(1) == (0, 3, 1)
    assert endings(here.effects.published) == ["MarkPrefillCompleted"]
    here.core.output_block("x", None, here.now)
    assert here.load(1) == (0, 4, 1)
    here.free("x")
    assert endings(here.effects.published) == ["Free"]
    assert here.load(1) == (0, 0, 0)


@pytest.mark.parametrize(
    ("data", "load"),
    [
        (add(1, tokens=None), (0, 1, 1)),
        (add(1, track_prefill_tokens=False), (0, 1, 1)),
        (add(1, tokens=0), (0, 1, 1)),
        ({"AddRequest": {}}, (0, 0, 1)),
    ],
)
def test_tokens_count_only_when_tracked(data: Any, load: tuple[int, int, int]) -> None:
    here = Replica()
    here.dynamo(data)
    assert here.load(1) == load


@pytest.mark.parametrize(
    "where",
    [
        {"worker_id": 9},
        {"dp_rank": 1},
        {"model_name": "other"},
        {"tenant_id": "other"},
        {"block_size": 32},
    ],
)
def test_what_is_not_here_is_dropped(where: dict[str, Any]) -> None:
    here = Replica()
    here.dynamo(add(1), **where)
    assert here.load(1) == here.load(2) == (0, 0, 0)
    assert here.core.replicas.counters.dropped == 1


def test_our_own_echo_is_ignored() -> None:
    here = Replica()
    here.dynamo(add(1), router_id=OURS)
    assert here.load(1) == (0, 0, 0)
    assert here.core.replica_status(here.now) == []


@pytest.mark.parametrize("worker_id", [1, 2])
def test_an_admission_for_a_live_id_is_ignored(worker_id: int) -> None:
    here = Replica()
    here.book("x", 1, 5)
    here.dynamo(add(1, 2), worker_id=worker_id)
    here.dynamo(add(7), request_id="y")
    here.dynamo(add(7, 8), request_id="y", worker_id=worker_id)
    assert here.load(1) == (16 + 40, 2, 2)
    assert here.load(2) == (0, 0, 0)


def test_endings_go_by_the_id_and_unknown_ones_are_ignored() -> None:
    here = Replica()
    here.book("x", 1, 5)
    here.dynamo("MarkPrefillCompleted", worker_id=2, dp_rank=9)
    assert here.load(1) == (0, 1, 1)
    here.dynamo("Free", request_id="nobody")
    here.dynamo("MarkPrefillCompleted", request_id="nobody")
    here.dynamo("Free", worker_id=2)  # of one booked here, too
    assert here.load(1) == (0, 0, 0)
    here.free("x")  # no error: freed lately
    with pytest.raises(ReservationNotFound):
        here.free("nobody")


def test_what_a_dynamo_freed_is_told_to_ours_but_not_on_its_topic() -> None:
    here = Replica()
    here.book("x", 1, 5)
    here.dynamo("Free")
    (said, beat) = here.turn()
    assert isinstance(said, Said)
    assert [item.reservation_id for item in said.items if isinstance(item, Ended)] == ["x"]
    assert isinstance(beat, Heartbeat)
    assert beat.live == 0


def test_a_dynamo_is_listed() -> None:
    here = Replica()
    here.dynamo(add(1))
    (row,) = here.core.replica_status(here.now + 3)
    assert (row.router_id, row.state, row.peer, row.heard_s_ago) == (
        DYNAMO,
        "foreign",
        "tcp://peer:1",
        3.0,
    )


def test_the_oldest_prefill_of_a_rank_fades_over_its_duration() -> None:
    here = Replica()
    for name in "xy":
        hint = {
            "initial_effective_prefill_tokens": 100,
            "expected_prefill_duration": {"secs": 1, "nanos": 0},
        }
        here.dynamo({"AddRequest": {"prefill_load_hint": hint}}, request_id=name)
    here.turn()
    for left in (175, 150, 125, 100, 100):
        here.turn(0.25)
        assert here.load(1) == (left, 0, 2)
    here.free("x")
    here.turn()  # now y is the oldest
    here.turn(0.5)
    assert here.load(1) == (50, 0, 1)
    here.done("y")
    here.turn(1.0)
    assert here.load(1) == (0, 0, 1)


def test_what_fades_does_not_count_as_worked_off_once_more() -> None:
    here = Replica()
    ledger = here.core.partitions[DEFAULT].ledger
    ledger.follow_queues(True)
    hint = {
        "initial_effective_prefill_tokens": 10_000,
        "expected_prefill_duration": {"secs": 4, "nanos": 0},
    }
    for name in "xy":
        here.dynamo({"AddRequest": {"prefill_load_hint": hint}}, request_id=name)
    here.turn()
    for left in (17_500, 15_000, 12_500, 10_000, 10_000):
        here.turn(1.0)
        worked = worked_off(ledger.heard, ledger.ahead, 8000.0, here.now)
        assert (ledger.prefill - worked).max() == left
    here.core.check()


# -- ours ------------------------------------------------------------------------------------------


def test_a_booking_there_is_a_booking_here_and_ends_from_either_side() -> None:
    here, there = Replica(), Replica(2000)
    there.book("a", 1, 1, 2)
    (told,) = there.effects.published
    here.hears(told)
    assert here.load(1) == there.load(1) == (32, 2, 1)
    here.hears(told)  # again
    assert here.load(1) == (32, 2, 1)
    here.free("a")
    (freed,) = here.effects.published
    there.hears(freed)
    assert there.load(1) == (0, 0, 0)


def test_a_free_that_overtakes_its_admission() -> None:
    here, there = Replica(), Replica(2000)
    there.book("a", 1, 1)
    (told,) = there.effects.published
    there.free("a")
    (freed,) = there.effects.published
    here.hears(freed)
    here.hears(told)
    assert here.load(1) == (0, 0, 0)


def test_output_blocks_are_shared() -> None:
    here, there = Replica(), Replica(2000)
    there.book("a", 1, 1, 2)
    here.hears(there.effects.published[0])
    here.core.output_block("a", None, here.now)
    there.core.output_block("a", 0.5, there.now)
    for said in here.turn():
        there.hears(said)
    for said in there.turn():
        here.hears(said)
    assert here.load(1) == there.load(1)
    assert there.core.desk.bookings.get("a").reservation.output_blocks == 2


def test_the_lower_router_wins_an_id_booked_twice() -> None:
    here, there = Replica(1000), Replica(2000)
    here.book("a", 1, 1)
    there.book("a", 2, 2, 3)
    (ours,), (theirs,) = here.effects.published, there.effects.published
    here.hears(theirs)
    there.hears(ours)
    assert here.load(1) == there.load(1) == (16, 1, 1)
    assert here.load(2) == there.load(2) == (0, 0, 0)
    there.free("a")  # both
    here.hears(there.effects.published[0])
    assert here.load(1) == here.load(2) == (0, 0, 0)


def test_a_claim_waits_for_its_worker() -> None:
    here, there = Replica(), Replica(2000)
    there.worker(3)
    there.book("a", 3, 1)
    here.hears(there.effects.published[0])
    assert here.load(3) is None
    here.worker(3)
    here.turn()
    assert here.load(3) == (16, 1, 1)
    here.delete(3)
    here.worker(3)
    here.tick(0.0)
    here.turn()
    assert here.load(3) == (16, 1, 1)


def test_a_claim_that_has_ended_waits_for_its_worker_no_longer() -> None:
    here, there = Replica(), Replica(2000)
    there.worker(3)
    for name in "abc":
        there.book(name, 3, 1)
        here.hears(there.effects.published[0])
        there.free(name)
        here.hears(there.effects.published[0])
    assert not list(here.core.desk.announcer.claims.waited_for(DEFAULT, 3))


def test_a_claim_without_its_worker_can_be_freed() -> None:
    here, there = Replica(), Replica(2000)
    there.worker(3)
    there.book("a", 3, 1)
    here.hears(there.effects.published[0])
    here.free("a")
    there.hears(here.effects.published[0])
    assert there.load(3) == (0, 0, 0)


def pulled(here: Replica, there: Replica) -> None:
    """Carry out the pull that `here` asks for."""
    (pull,) = here.pulls
    parts = there.core.replica_snapshot(there.now)
    head = next(parts)
    assert isinstance(head, SnapshotHead)
    assert here.core.replica_snapshot_begin(pull, head, here.now)
    for part in parts:
        here.core.replica_snapshot_part(pull.router_id, part, here.now)
    here.core.replica_snapshot_end(pull.router_id, here.now, complete=True)
    here.turn()


def test_prompts_that_a_snapshot_tells_as_computed_tell_nothing_of_the_pace() -> None:
    here, there = Replica(), Replica(2000)
    for name in "ab":
        there.book(name, 1, 1, 2)
        there.done(name)
    here.hears(there.turn(1.0)[-1])
    here.turn()
    pulled(here, there)
    assert here.load(1) == (0, 2, 2)
    assert here.core.partitions[DEFAULT].ledger.work.computed == 0
    there.book("c", 1, 1, 2)
    here.hears(there.effects.published[0])
    there.done("c")
    here.hears(there.effects.published[0])
    assert here.core.partitions[DEFAULT].ledger.work.computed == 32, "but what is heard at once"


def acquainted() -> tuple[Replica, Replica]:
    """Two who have met: at first sight everybody pulls."""
    here, there = Replica(), Replica(2000)
    for said in there.turn():
        here.hears(said)
    here.turn()
    pulled(here, there)
    here.turn(here.core.limits.replica_pull_retry_s)
    there.now = here.now
    assert here.pulls == []
    return here, there


def test_a_gap_is_pulled_after_a_moment() -> None:
    here, there = acquainted()
    there.book("a", 1, 1)  # lost
    there.book("b", 1, 2)
    here.hears(there.effects.published[0])
    for said in there.turn():
        here.hears(said)
    here.turn()
    assert here.pulls == []
    here.turn(1.0)
    assert here.pulls == [Pull("tcp://peer:1", 2000, 8092, None)]
    pulled(here, there)
    assert here.load(1) == (32, 2, 2)
    assert here.core.replica_status(here.now)[0].state == "synced"


def test_another_digest_is_pulled_at_once() -> None:
    here, there = acquainted()
    there.book("a", 1, 1)
    here.hears(there.effects.published[0])
    (beat,) = there.turn()
    here.hears(beat)
    here.turn()
    assert here.pulls == []
    here.hears(msgspec.structs.replace(beat, digest=1, number=beat.number + 1))
    here.turn()
    assert here.core.replicas.counters.digests_differed == 1
    pulled(here, there)
    assert here.load(1) == (16, 1, 1)


def test_a_late_joiner_pulls() -> None:
    here, there = Replica(), Replica(2000)
    there.book("a", 1, 1, 2)
    there.done("a")
    there.core.output_block("a", None, there.now)
    for said in there.turn():
        if isinstance(said, Heartbeat):
            here.hears(said)
    here.turn(1.0)
    pulled(here, there)
    assert here.load(1) == there.load(1) == (0, 3, 1)


def test_a_pull_that_fails_is_tried_again() -> None:
    here, there = Replica(), Replica(2000)
    there.book("a", 1, 1)
    for said in there.turn():
        here.hears(said)
    here.turn(1.0)
    here.core.replica_snapshot_end(2000, here.now, complete=False)
    here.turn()
    assert here.pulls == []
    here.turn(here.core.limits.replica_pull_retry_s)
    pulled(here, there)
    (row,) = here.core.replica_status(here.now)
    assert (row.pulls, row.pulls_failed, row.state) == (2, 1, "synced")


def test_a_snapshot_that_was_cut_short_does_not_end_anything() -> None:
    here, there = Replica(), Replica(2000)
    for name in "ab":
        there.book(name, 1, 1)
        here.hears(there.effects.published[0])
    (beat,) = there.turn()
    here.hears(msgspec.structs.replace(beat, digest=1, number=beat.number + 1))
    here.turn()
    (pull,) = here.pulls
    parts = there.core.replica_snapshot(there.now)
    head = next(parts)
    assert isinstance(head, SnapshotHead)
    here.core.replica_snapshot_begin(pull, head, here.now)
    here.core.replica_snapshot_part(2000, next(parts), here.now)
    here.core.replica_snapshot_end(2000, here.now, complete=True)
    here.turn()
    assert here.load(1) == (32, 1, 2)
    assert here.core.replica_status(here.now)[0].pulls_failed == 1


def silent(here: Replica) -> None:
    here.turn(here.core.limits.replica_timeout_s + 1)


def test_what_a_gone_replica_owned_ages_out_unheard_of() -> None:
    here, there = Replica(), Replica(2000)
    there.book("a", 1, 1)
    here.hears(there.effects.published[0])
    here.tick(200.0)
    silent(here)
    assert here.core.replica_status(here.now)[0].state == "gone"
    here.tick(400.0)
    assert here.load(1) == (0, 0, 0)
    assert here.effects.published == []
    assert here.core.replicas.counters.orphans_expired == 1


def test_while_its_replica_lives_nothing_ages_here() -> None:
    here, there = Replica(), Replica(2000)
    there.book("a", 1, 1)
    here.hears(there.effects.published[0])
    for _ in range(3):
        here.tick(301.0)
    assert here.load(1) == (16, 1, 1)


def test_a_call_for_an_orphan_adopts_it() -> None:
    here, there, third = Replica(), Replica(2000), Replica(3000)
    there.book("a", 1, 1)
    told = there.effects.published[0]
    here.hears(told)
    third.hears(told)
    silent(here)
    here.done("a")
    marked = here.effects.published
    for said in [*here.turn(), *marked]:
        third.hears(said)
        there.hears(said)
    for one in (here, there, third):
        assert one.load(1) == (0, 1, 1)
        assert one.core.desk.bookings.get("a").reservation.origin in ("local", OURS)
    assert here.core.desk.announcer.claims.adopted == 1
    here.tick(301.0)  # it is ours now, and nobody called
    assert endings(here.effects.published) == ["Free"]


def test_a_replica_that_leaves_says_so_and_what_it_owned_moves_with_the_next_call() -> None:
    here, there = acquainted()
    for name in ("a", "b"):
        there.book(name, 1, 1)
        here.hears(there.effects.published[0])
    there.core.replica_leave()
    for said in there.turn():
        here.hears(said)
    (status,) = here.core.replica_status(here.now)
    assert status.state == "leaving"
    here.done("a")
    assert here.core.desk.announcer.claims.adopted == 0, "it is still there to end its own"

    here.hears(there.core.replica_last_word())
    (status,) = here.core.replica_status(here.now)
    assert status.state == "gone", "and nobody waits until the silence is long enough"
    here.done("b")
    assert here.core.desk.announcer.claims.adopted == 1
    here.hears(there.turn(there.core.limits.replica_heartbeat_s)[-1])
    (status,) = here.core.replica_status(here.now)
    assert status.state != "gone", "it has come back after all"


def test_a_heartbeat_that_comes_again_says_nothing() -> None:
    """Kept on the way and replayed: it neither moves its sender, nor revives it."""
    here, there = acquainted()
    old = there.core.replica_last_word()
    old = msgspec.structs.replace(old, left=False, leaving=True, url="http://10.6.6.6")
    here.hears(old)
    (new,) = there.turn(there.core.limits.replica_heartbeat_s)
    here.hears(new)
    here.hears(old)
    view = here.core.replicas.publishers.views[2000]
    assert (view.leaving, view.url, view.http_port) == (False, None, 8092)
    heard_at = view.heard_at
    here.now += 1.0
    here.hears(new)
    assert view.heard_at == heard_at, "no sign of life"
    here.hears(there.core.replica_last_word())
    here.hears(new)
    assert view.state == "gone"
    assert here.core.replicas.counters.repeated == 3


def test_a_heartbeat_that_a_snapshot_overtook_moves_nobody() -> None:
    here, there = acquainted()
    beat = there.core.replica_last_word()
    there.book("a", 1, 1)
    here.hears(there.effects.published[0])
    here.hears(msgspec.structs.replace(beat, left=False, leaving=True, url="http://10.6.6.6"))
    view = here.core.replicas.publishers.views[2000]
    assert (view.leaving, view.url, view.state) == (False, None, "synced")


def test_the_last_word_of_somebody_else_is_none() -> None:
    here, there = Replica(), Replica(2000)
    for said in there.turn():
        here.hears(said, "tcp://peer:1")
    here.hears(there.core.replica_last_word(), "tcp://stranger:1")
    (status,) = here.core.replica_status(here.now)
    assert status.state != "gone"
    assert here.core.replicas.counters.impostors == 1


def test_the_last_word_of_an_earlier_life_is_none() -> None:
    """It may stand in the old connection's queue while the new one has begun to speak."""
    here, there = acquainted()
    last = there.core.replica_last_word()
    again = Replica(2000)
    claims = again.core.desk.announcer.claims
    claims.epoch, claims.seq = 2, 1 << SEQ_BITS
    for said in again.turn():
        here.hears(said)
    again.book("a", 1, 1)
    here.hears(again.effects.published[0])
    here.hears(last)
    (status,) = here.core.replica_status(here.now)
    assert status.state != "gone"
    here.done("a")
    assert here.core.desk.announcer.claims.adopted == 0, "it lives"


def adopted(here: Replica, there: Replica, *others: Replica, **more: Any) -> Said:
    """Of what one replica has booked, what another says when it adopts that: the claim, the end."""
    there.book("a", 1, 1, **more)
    for one in (here, *others):
        one.hears(there.effects.published[0])
    silent(here)
    here.done("a")
    (adoption,) = (one for one in here.turn() if isinstance(one, Said))
    return adoption


@pytest.mark.parametrize("who", ["owner", "third"])
def test_who_hears_the_end_of_a_claim_before_its_adoption_knows_the_reservation(who: str) -> None:
    here, there, third = Replica(), Replica(2000), Replica(3000)
    adoption = adopted(here, there, third, selection_id="selected")
    record, end = adoption.items
    told = {"owner": there, "third": third}[who]
    told.hears(Heartbeat(OURS, 1, adoption.seq - 1, 0, 0))  # it lives
    told.core.output_block("a", None, told.now)
    told.hears(Said(OURS if who == "owner" else 2000, 1, 9, [end]))
    assert told.load(1) == (16, 2, 1)
    told.done("selected")
    (done,) = told.effects.published
    here.hears(done)  # it is meant, under its new name
    assert told.load(1) == (0, 2, 1)
    told.hears(Said(OURS, 1, adoption.seq, [record]))
    for said in told.turn(1.0):
        here.hears(said)
    assert told.load(1) == here.load(1) == (0, 2, 1)
    theirs = told.core.desk.announcer.claims.sets[OURS]
    assert theirs.digest == here.core.desk.announcer.claims.own.digest
    told.free("a")
    here.hears(told.effects.published[0])
    assert here.load(1) == told.load(1) == (0, 0, 0)


def test_the_heir_of_a_claim_that_its_adopter_no_longer_has_is_forgotten() -> None:
    """Freed where it was adopted before anybody else had heard of it."""
    here, there = Replica(), Replica(2000)
    adoption = adopted(here, there)
    record, end = adoption.items
    here.free("a")
    (freed,) = here.effects.published
    there.hears(Said(OURS, 1, adoption.seq + 5, [end]))
    assert there.load(1) == (16, 1, 1)
    there.turn(1.0)
    for beat in here.turn(10.0):
        there.hears(beat)
    there.turn(1.0)
    (pull,) = there.pulls
    head, *rest = here.core.replica_snapshot(here.now)
    assert isinstance(head, SnapshotHead)
    assert there.core.replica_snapshot_begin(pull, head, there.now)
    for part in rest:
        there.core.replica_snapshot_part(OURS, part, there.now)
    there.core.replica_snapshot_end(OURS, there.now, complete=True)
    there.turn()
    assert there.load(1) == (0, 0, 0)
    there.hears(Said(OURS, 1, adoption.seq, [record]))
    there.hears(freed)
    assert there.load(1) == (0, 0, 0)


def test_an_end_after_which_the_heir_ended_too_names_nobody() -> None:
    here, there, third = Replica(), Replica(2000), Replica(3000)
    adoption = adopted(here, there, third)
    there.hears(adoption)
    here.free("a")
    there.hears(here.effects.published[0])
    (said,) = (one for one in there.turn() if isinstance(one, Said))
    (end,) = said.items
    assert end == Ended("a", 2000, 1, freed=True)
    third.hears(said)
    assert third.load(1) == (0, 0, 0)


def test_of_adoptions_in_a_row_the_last_is_the_heir() -> None:
    first, second, third, last = Replica(), Replica(2000), Replica(3000), Replica(4000)
    adoption = adopted(second, first, third, last)
    third.now = last.now = second.now
    third.hears(adoption)
    silent(third)
    third.done("a")
    (again,) = (one for one in third.turn() if isinstance(one, Said))
    _, first_end = adoption.items
    _, second_end = again.items
    last.hears(Said(2000, 1, 50, [second_end]))  # of a claim nobody has told it of
    last.hears(Said(2000, 1, 51, [first_end]))
    assert last.core.desk.bookings.get("a").reservation.origin == 3000
    assert last.load(1) == (16, 1, 1)


def test_an_heir_is_known_on_the_terms_of_the_old_claim_until_its_owner_tells_others() -> None:
    here, there, third = Replica(), Replica(2000), Replica(3000)
    adoption = adopted(here, there, third, ttl_s=60.0)
    record, end = adoption.items
    third.hears(Said(2000, 1, 9, [end]))
    assert third.core.desk.bookings.get("a").reservation.ttl_s == 60.0
    other = msgspec.structs.replace(record, ttl_s=90.0)
    third.hears(Said(OURS, 1, adoption.seq, [other]))
    assert third.core.desk.bookings.get("a").reservation.ttl_s == 90.0
    assert third.load(1) == (16, 1, 1)


def test_two_adoptions_of_one_orphan_are_one_reservation() -> None:
    """What was said of either has happened to it, and it ends under every name it has had."""
    here, there, third = Replica(), Replica(2000), Replica(3000)
    adoption = adopted(here, there, third)
    third.now = here.now
    silent(third)
    third.core.output_block("a", None, third.now)
    (other,) = (one for one in third.turn() if isinstance(one, Said) and len(one.items) == 2)
    third.hears(adoption)
    assert third.load(1) == (16, 2, 1), "the lower router's claim, with what we were told"
    here.hears(other)
    for said in third.turn(1.0):
        here.hears(said)
    for said in here.turn(1.0):
        third.hears(said)
    assert here.load(1) == third.load(1) == (0, 2, 1)
    there.free("a")
    for one in (here, third):
        one.hears(there.effects.published[0])  # it has heard of no adoption
        assert one.load(1) == (0, 0, 0)
        assert not one.core.desk.announcer.claims.alive("a")


def test_what_has_lapsed_where_it_was_booked_lives_where_it_was_adopted() -> None:
    here, there, third = Replica(), Replica(2000), Replica(3000)
    adoption = adopted(here, there, third, ttl_s=60.0)
    there.tick(61.0)
    (lapsed,) = there.effects.published
    third.hears(lapsed)
    third.hears(adoption)
    here.hears(lapsed)
    assert here.load(1) == (0, 1, 1)
    assert third.load(1) == (16, 1, 1)  # it has not heard yet that the prompt is computed


def test_an_adoption_of_what_was_freed_meanwhile_is_over_where_that_was_heard() -> None:
    here, there, third = Replica(), Replica(2000), Replica(3000)
    adoption = adopted(here, there, third)
    there.free("a")
    third.hears(there.effects.published[0])
    third.hears(adoption)
    assert third.load(1) == (0, 0, 0)
    for said in third.turn():
        here.hears(said)
    assert here.load(1) == (0, 0, 0)


def test_what_somebody_who_died_said_is_repeated_to_those_who_come_back() -> None:
    """The owner was out of reach for all when somebody completed its prefill, and died."""
    owner, teller, third = Replica(), Replica(2000), Replica(3000)
    owner.book("a", 1, 1)
    told = owner.effects.published[0]
    teller.hears(told)
    third.hears(told)
    teller.done("a")
    third.hears(teller.effects.published[0])
    silent(third)  # of both
    third.turn()
    (beat,) = owner.turn()
    third.hears(beat)
    for said in third.turn():
        owner.hears(said)
    assert owner.load(1) == (0, 1, 1)


@pytest.mark.parametrize("name", ["a", "selected"])
def test_a_free_between_the_end_of_a_claim_and_its_adoption_ends_the_adopted_one(name: str) -> None:
    """Its owner has heard that its claim is over, and not yet who owns the reservation now."""
    here, there = Replica(), Replica(2000)
    adoption = adopted(here, there, selection_id="selected")
    record, end = adoption.items
    assert isinstance(end, Ended)
    end = msgspec.structs.replace(end, heir=None)  # from somebody who does not know it
    there.hears(Said(OURS, 1, adoption.seq + 1, [end]))  # repeated; it has overtaken
    assert there.load(1) == (0, 0, 0)
    there.free(name)  # acknowledged, as its caller knows that it lives
    there.hears(Said(OURS, 1, adoption.seq, [record]))
    assert there.load(1) == (0, 0, 0)
    for said in there.turn():
        here.hears(said)
    assert here.load(1) == (0, 0, 0)


def test_an_id_booked_anew_is_not_meant_by_an_earlier_free() -> None:
    here, there, third = Replica(), Replica(2000), Replica(3000)
    there.book("a", 1, 1)
    there.free("a")
    there.free("a")  # again
    there.now += 1.0
    third.now = there.now
    third.book("a", 1, 1)
    told = third.effects.published[0]
    for one in (here, there):
        one.hears(told)
    silent(here)
    here.done("a")
    (adoption,) = (one for one in here.turn() if isinstance(one, Said))
    record, end = adoption.items
    there.hears(Said(OURS, 1, adoption.seq + 1, [end]))
    there.hears(Said(OURS, 1, adoption.seq, [record]))
    assert there.load(1) == (16, 1, 1)


def test_who_was_put_back_to_before_an_end_is_reminded_of_it() -> None:
    """A state directory restored from a backup knows of no free since."""
    here, there = Replica(), Replica(2000)
    there.book("a", 1, 1)
    (told,) = there.effects.published
    here.hears(told)
    there.free("a")
    here.hears(there.effects.published[0])
    again = Replica(2000)
    again.core.desk.announcer.claims.epoch = 2
    again.book("a", 1, 1)  # under the number it had
    again.core.desk.announcer.claims.seq = 1 << 40
    for beat in again.turn():
        here.hears(beat)
    here.turn(1.0)
    (pull,) = here.pulls
    head, *rest = again.core.replica_snapshot(again.now)
    assert isinstance(head, SnapshotHead)
    assert here.core.replica_snapshot_begin(pull, head, here.now)
    for part in rest:
        here.core.replica_snapshot_part(2000, part, here.now)
    here.core.replica_snapshot_end(2000, here.now, complete=True)
    for said in here.turn():
        again.hears(said)
    assert here.load(1) == again.load(1) == (0, 0, 0)


def test_words_under_our_own_name_that_we_never_said_are_counted() -> None:
    here = Replica()
    here.book("a", 1, 1)
    (echo,) = here.effects.published
    here.hears(echo)
    here.hears(Heartbeat(OURS, 1, 1, 1, 0))
    assert here.core.replicas.counters.namesakes == 0
    here.hears(Heartbeat(OURS, 1, 2, 1, 0))
    here.hears(Said(OURS, 2, 1 << 40, []))
    assert here.core.replicas.counters.namesakes == 2


def hostile_words(here: Replica, there: Replica) -> list[Any]:
    """What would end or change the one reservation of `there`, were its owner to say it."""
    (claim,) = there.core.desk.announcer.claims.own.by_id.values()
    seq = there.core.desk.announcer.claims.seq
    return [
        Said(there.router_id, 1, seq + 1, [Ended("a", *claim.key, freed=True)]),
        Said(there.router_id, 2, (1 << 40) + 1, [Ended("a", *claim.key)]),
        Heartbeat(there.router_id, 1, seq + 5, 0, 0),
        Heartbeat(there.router_id, 1, seq, 1, 0, 80, "http://169.254.169.254"),
    ]


def test_words_in_anothers_name_change_nothing_while_it_is_heard() -> None:
    """A hostile replica has a name and an endpoint of its own: it may speak for nobody else."""
    here, there = Replica(), Replica(2000)
    there.book("a", 1, 5)
    for message in (*there.effects.published, *there.turn()):
        here.hears(message, "tcp://there:1")
    here.turn()
    load, status = here.load(1), here.core.replica_status(here.now)
    assert load is not None
    assert load[2] == 1
    words = hostile_words(here, there)
    for message in words:
        here.hears(message, "tcp://evil:1")
        here.turn()
    assert here.load(1) == load
    assert here.core.replica_status(here.now) == status
    assert here.pulls == []
    assert here.core.replicas.counters.impostors == len(words)
    here.core.check()
    here.hears(words[0], "tcp://there:1")  # itself it may
    assert here.load(1) == (0, 0, 0)


def test_words_heard_before_change_nothing_again() -> None:
    here, there = Replica(), Replica(2000)
    captured: list[Any] = []
    there.book("a", 1, 5)
    captured += there.effects.published
    there.done("a")
    captured += there.effects.published
    there.free("a")
    captured += there.effects.published
    there.book("a", 1, 7)  # the same id, later
    captured += there.effects.published
    for message in captured:
        here.hears(message)
    load = here.load(1)
    assert load is not None
    assert load[2] == 1
    counters = here.core.replicas.counters
    for message in captured:
        here.hears(message)
    assert here.load(1) == load
    assert counters.repeated == len(captured)
    here.core.check()


def test_ends_of_what_nobody_owns_change_nothing() -> None:
    here, there = Replica(), Replica(2000)
    here.book("mine", 1, 5)
    there.book("theirs", 1, 7)
    for message in there.effects.published:
        here.hears(message)
    load = here.load(1)
    (claim,) = here.core.desk.announcer.claims.own.by_id.values()
    strange: list[Any] = [
        Ended("mine", OURS, claim.born + 1, freed=True),  # another life of the id
        Ended("mine", 4711, claim.born, freed=True),  # an owner nobody knows
        Ended("other", *claim.key, freed=True),  # another id under that name
        Ended("theirs", 2000, 4711, freed=True),
    ]
    here.hears(Said(3000, 1, 1, strange), "tcp://evil:1")
    here.turn()
    assert here.load(1) == load
    here.core.check()


def test_a_name_is_free_again_once_nobody_is_heard_under_it() -> None:
    here = Replica()
    here.hears(Heartbeat(2000, 1, 0, 0, 0), "tcp://old:1")
    here.turn(11.0)
    here.hears(Heartbeat(2000, 1, 0, 0, 0), "tcp://new:1")
    assert here.core.replica_status(here.now)[0].peer == "tcp://new:1"
    assert here.core.replicas.counters.impostors == 0


def test_more_publishers_than_allowed_are_refused() -> None:
    here = Replica(replica_publishers_max=1)
    here.hears(Heartbeat(1, 1, 0, 0, 0))
    here.hears(Heartbeat(2, 1, 0, 0, 0))
    assert len(here.core.replica_status(here.now)) == 1
    assert here.core.replicas.counters.publishers_refused == 1


def test_a_new_life_under_the_same_id_is_pulled_and_replaces_the_old_one() -> None:
    here, there = Replica(), Replica(2000)
    there.book("a", 1, 1)
    here.hears(there.effects.published[0])
    again = Replica(2000)
    again.core.desk.announcer.claims.epoch = 2
    again.core.desk.announcer.claims.seq = 1 << 40
    again.book("b", 2, 1)
    here.hears(again.effects.published[0])
    assert here.load(2) == (16, 1, 1)
    for said in again.turn():
        here.hears(said)
    here.turn()
    pulled(here, again)
    assert here.load(1) == (0, 0, 0)
    assert here.load(2) == (16, 1, 1)


def test_a_snapshot_tells_the_hashes_of_what_is_not_swept_yet() -> None:
    here, there, third = Replica(dropped_per_turn_max=1), Replica(2000), Replica(3000)
    for name, hashes in (("a", [1, 2]), ("b", [3])):
        there.book(name, 1, *hashes)
        here.hears(there.effects.published[0])
    silent(here)
    here.delete(1)  # one of them is swept at once, and one is not
    for said in here.turn(1.0):
        third.hears(said)
    third.turn()
    pulled(third, here)
    assert third.load(1) == (48, 3, 2)


def test_an_orphan_freed_after_its_time_is_freed_at_its_owner_too() -> None:
    here, there = Replica(), Replica(2000)
    there.book("a", 1, 1)
    here.hears(there.effects.published[0])
    silent(here)
    here.tick(here.core.limits.replica_orphan_ttl_s)
    assert here.load(1) == (0, 0, 0)
    here.free("a")
    for said in here.effects.published:
        there.hears(said)
    assert there.load(1) == (0, 0, 0)


def test_an_owner_who_comes_back_brings_its_reservations_back() -> None:
    here, there = Replica(), Replica(2000)
    there.book("a", 1, 1)
    here.hears(there.effects.published[0])
    silent(here)
    here.tick(here.core.limits.replica_orphan_ttl_s)
    for said in there.turn():
        here.hears(said)
    here.turn()
    pulled(here, there)
    assert here.load(1) == (16, 1, 1)


def test_who_is_gone_and_has_load_yet_is_not_looked_through_at_every_turn() -> None:
    here, there = Replica(replica_orphan_ttl_s=5000.0), Replica(2000)
    for number in range(200):
        there.book(f"r{number}", 1, number)
        here.hears(there.effects.published[0])
    here.turn(700.0)
    more, _ = here.core.replica_tick(here.now + 0.1)
    assert not more
    assert here.load(1) == (200 * 16, 200, 200)


def test_who_is_gone_for_long_is_forgotten() -> None:
    here, there = Replica(), Replica(2000)
    there.book("a", 1, 1)
    here.hears(there.effects.published[0])
    silent(here)
    here.tick(here.core.limits.replica_orphan_ttl_s)
    here.turn(here.core.limits.replica_ended_s)
    assert here.core.replica_status(here.now) == []
    assert here.core.desk.announcer.claims.sets.keys() == {OURS}
