"""What a replica owned that is silent, has gone or comes back."""

from __future__ import annotations

import msgspec

from select_service.core.replication.statement_outbox import SEQ_BITS
from tests.select_service.core.replication.replica import OURS, Replica, acquainted, endings, silent


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
        assert one.core.lifecycle.bookings.get("a").reservation.origin in ("local", OURS)
    assert here.core.lifecycle.announcer.claims.adopted == 1
    here.tick(301.0)  # it is ours now, and nobody called
    assert endings(here.effects.published) == ["Free"]


def test_a_replica_that_leaves_says_so_and_what_it_owned_moves_with_the_next_call() -> None:
    here, there = acquainted()
    for name in ("a", "b"):
        there.book(name, 1, 1)
        here.hears(there.effects.published[0])
    there.core.replica_operations.leave()
    here.hears(*there.turn())
    (status,) = here.core.replica_operations.status(here.now)
    assert status.state == "leaving"
    here.done("a")
    assert here.core.lifecycle.announcer.claims.adopted == 0, "it is still there to end its own"

    here.hears(there.core.replica_operations.last_word())
    (status,) = here.core.replica_operations.status(here.now)
    assert status.state == "gone", "and nobody waits until the silence is long enough"
    here.done("b")
    assert here.core.lifecycle.announcer.claims.adopted == 1
    here.hears(there.turn(there.core.limits.replica_heartbeat_s)[-1])
    (status,) = here.core.replica_operations.status(here.now)
    assert status.state != "gone", "it has come back after all"


def test_a_heartbeat_that_comes_again_says_nothing() -> None:
    """Kept on the way and replayed: it neither moves its sender, nor revives it."""
    here, there = acquainted()
    old = there.core.replica_operations.last_word()
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
    here.hears(there.core.replica_operations.last_word())
    here.hears(new)
    assert view.state == "gone"
    assert here.core.replicas.counters.repeated == 3


def test_a_heartbeat_that_a_snapshot_overtook_moves_nobody() -> None:
    here, there = acquainted()
    beat = there.core.replica_operations.last_word()
    there.book("a", 1, 1)
    here.hears(there.effects.published[0])
    here.hears(msgspec.structs.replace(beat, left=False, leaving=True, url="http://10.6.6.6"))
    view = here.core.replicas.publishers.views[2000]
    assert (view.leaving, view.url, view.state) == (False, None, "synced")


def test_the_last_word_of_somebody_else_is_none() -> None:
    here, there = Replica(), Replica(2000)
    here.hears(*there.turn(), peer="tcp://peer:1")
    here.hears(there.core.replica_operations.last_word(), peer="tcp://stranger:1")
    (status,) = here.core.replica_operations.status(here.now)
    assert status.state != "gone"
    assert here.core.replicas.counters.impostors == 1


def test_the_last_word_of_an_earlier_life_is_none() -> None:
    """It may stand in the old connection's queue while the new one has begun to speak."""
    here, there = acquainted()
    last = there.core.replica_operations.last_word()
    again = Replica(2000)
    claims = again.core.lifecycle.announcer.claims
    claims.outbox.epoch, claims.outbox.seq = 2, 1 << SEQ_BITS
    here.hears(*again.turn())
    again.book("a", 1, 1)
    here.hears(again.effects.published[0])
    here.hears(last)
    (status,) = here.core.replica_operations.status(here.now)
    assert status.state != "gone"
    here.done("a")
    assert here.core.lifecycle.announcer.claims.adopted == 0, "it lives"


def test_an_orphan_freed_after_its_time_is_freed_at_its_owner_too() -> None:
    here, there = Replica(), Replica(2000)
    there.book("a", 1, 1)
    here.hears(there.effects.published[0])
    silent(here)
    here.tick(here.core.limits.replica_orphan_ttl_s)
    assert here.load(1) == (0, 0, 0)
    here.free("a")
    there.hears(*here.effects.published)
    assert there.load(1) == (0, 0, 0)


def test_who_is_gone_and_has_load_yet_is_not_looked_through_at_every_turn() -> None:
    here, there = Replica(replica_orphan_ttl_s=5000.0), Replica(2000)
    for number in range(200):
        there.book(f"r{number}", 1, number)
        here.hears(there.effects.published[0])
    here.turn(700.0)
    more, _ = here.core.replica_operations.tick(here.now + 0.1)
    assert not more
    assert here.load(1) == (200 * 16, 200, 200)


def test_who_is_gone_for_long_is_forgotten() -> None:
    here, there = Replica(), Replica(2000)
    there.book("a", 1, 1)
    here.hears(there.effects.published[0])
    silent(here)
    here.tick(here.core.limits.replica_orphan_ttl_s)
    here.turn(here.core.limits.replica_ended_s)
    assert here.core.replica_operations.status(here.now) == []
    assert here.core.lifecycle.announcer.claims.sets.keys() == {OURS}
