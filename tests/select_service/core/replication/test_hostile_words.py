"""Words in another's name, words heard before and too many names change nothing."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from select_service.core.replication.message_codec import (
    MalformedReplicaMessage,
    decode_message,
    encode_message,
)
from select_service.core.replication.messages import (
    ANCESTORS_MAX,
    ITEMS_MAX,
    OUTPUT_BLOCKS_MAX,
    OUTPUT_TELLERS_MAX,
    ClaimGrowth,
    ClaimRecord,
    Ended,
    Grown,
    Heartbeat,
    Said,
)
from select_service.types import CoreLimits, LeaseState
from tests.select_service.core.replication.replica import OURS, Replica


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
    (claim,) = there.core.lifecycle.announcer.claims.own.by_id.values()
    seq = there.core.lifecycle.announcer.claims.outbox.seq
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
    here.hears(*there.effects.published, *there.turn(), peer="tcp://there:1")
    here.turn()
    load, status = here.load(1), here.core.replica_operations.status(here.now)
    assert load is not None
    assert load[2] == 1
    words = hostile_words(here, there)
    for message in words:
        here.hears(message, peer="tcp://evil:1")
        here.turn()
    assert here.load(1) == load
    assert here.core.replica_operations.status(here.now) == status
    assert here.pulls == []
    assert here.core.replicas.counters.impostors == len(words)
    here.core.check()
    here.hears(words[0], peer="tcp://there:1")  # itself it may
    assert here.load(1) == (0, 0, 0)


def test_a_lease_with_a_revision_that_none_can_have_is_refused() -> None:
    """No time to live would count as later, not even its own: it would never end here."""
    record = ClaimRecord("a", 1, "m", "t", 16, 1, 0, lease=LeaseState("l", "o", 60.0, revision=-1))
    with pytest.raises(MalformedReplicaMessage):
        decode_message(*encode_message(Said(2000, 1, 1, [record])))


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
    here.hears(*captured)
    load = here.load(1)
    assert load is not None
    assert load[2] == 1
    counters = here.core.replicas.counters
    here.hears(*captured)
    assert here.load(1) == load
    assert counters.repeated == len(captured)
    here.core.check()


def test_ends_of_what_nobody_owns_change_nothing() -> None:
    here, there = Replica(), Replica(2000)
    here.book("mine", 1, 5)
    there.book("theirs", 1, 7)
    here.hears(*there.effects.published)
    load = here.load(1)
    (claim,) = here.core.lifecycle.announcer.claims.own.by_id.values()
    strange: list[Any] = [
        Ended("mine", OURS, claim.born + 1, freed=True),  # another life of the id
        Ended("mine", 4711, claim.born, freed=True),  # an owner nobody knows
        Ended("other", *claim.key, freed=True),  # another id under that name
        Ended("theirs", 2000, 4711, freed=True),
    ]
    here.hears(Said(3000, 1, 1, strange), peer="tcp://evil:1")
    here.turn()
    assert here.load(1) == load
    here.core.check()


def test_a_name_is_free_again_once_nobody_is_heard_under_it() -> None:
    here = Replica()
    here.hears(Heartbeat(2000, 1, 0, 0, 0), peer="tcp://old:1")
    here.turn(11.0)
    here.hears(Heartbeat(2000, 1, 0, 0, 0), peer="tcp://new:1")
    assert here.core.replica_operations.status(here.now)[0].peer == "tcp://new:1"
    assert here.core.replicas.counters.impostors == 0


def test_more_publishers_than_allowed_are_refused() -> None:
    here = Replica(replica_publishers_max=1)
    here.hears(Heartbeat(1, 1, 0, 0, 0))
    here.hears(Heartbeat(2, 1, 0, 0, 0))
    assert len(here.core.replica_operations.status(here.now)) == 1
    assert here.core.replicas.counters.publishers_refused == 1


@pytest.mark.parametrize(
    "growth",
    [
        ClaimGrowth(outputs={1: (1 << 64) - 1}),
        ClaimGrowth(outputs={1: (1 << 64) - 1}, faded_at=(1 << 64) - 1, fraction=0.3),
        ClaimGrowth(outputs=dict.fromkeys(range(OUTPUT_TELLERS_MAX), (1 << 64) - 1)),
    ],
)
def test_output_without_end_takes_nothing_of_others_with_it(growth: ClaimGrowth) -> None:
    """Loads are sums of doubles: what is far larger than all others swallows them."""
    here = Replica()
    here.book("mine", 1, 5)
    load = here.load(1)
    assert load is not None
    ghost = ClaimRecord("ghost", 1, "default", "default", 16, 1, 0)
    here.hears(Said(3000, 1, 1, [ghost, Grown("ghost", 3000, 1, growth)]), peer="tcp://evil:1")
    most = here.load(1)
    assert most is not None
    assert load[1] < most[1] <= load[1] + OUTPUT_BLOCKS_MAX
    here.hears(Said(3000, 1, 2, [Ended("ghost", 3000, 1)]), peer="tcp://evil:1")
    assert here.load(1) == load
    here.free("mine")
    assert here.load(1) == (0, 0, 0)


def test_output_is_told_by_so_many_routers_and_no_more() -> None:
    """Each of them is remembered as long as the claim: they would fill the memory, a few a word."""
    here = Replica()
    here.book("mine", 1, 5)
    (claim,) = here.core.lifecycle.announcer.claims.own.by_id.values()
    for seq in range(1, 4):
        first = seq * OUTPUT_TELLERS_MAX
        told = ClaimGrowth(outputs=dict.fromkeys(range(first, first + OUTPUT_TELLERS_MAX), 1))
        here.hears(Said(3000, 1, seq, [Grown("mine", *claim.key, told)]), peer="tcp://evil:1")
        early = Grown("unheard", 3000, 77, told)
        here.hears(Said(3000, 1, seq + 10, [early]), peer="tcp://evil:1")
    assert len(claim.growth.outputs) == OUTPUT_TELLERS_MAX
    late = ClaimRecord("unheard", 77, "default", "default", 16, 1, 0)
    here.hears(Said(3000, 1, 20, [late]), peer="tcp://evil:1")
    (unheard,) = here.core.lifecycle.announcer.claims.alive("unheard")
    assert len(unheard.growth.outputs) == OUTPUT_TELLERS_MAX


def test_a_lease_remembers_so_many_owners_of_claims_and_no_more() -> None:
    """Any number can be named as predecessors, while one claim keeps the copy of the lease."""
    here = Replica(replica_publishers_max=16)
    lease = LeaseState("l", "o", 60.0)
    stays = ClaimRecord("stays", 1, "default", "default", 16, 1, 0, lease=lease)
    here.hears(Said(3000, 1, 1, [stays]), peer="tcp://evil:1")
    for at in range(2, 30):
        adopts = [(at * 100 + one, at) for one in range(ANCESTORS_MAX)]
        heir = replace(stays, reservation_id=f"r{at}", born=at, adopts=adopts)
        said = Said(3000, 1, at, [heir, Ended(heir.reservation_id, 3000, at)])
        here.hears(said, peer="tcp://evil:1")
    copy = here.core.lifecycle.announcer.claims.copies.find("l")
    assert copy is not None
    for known in (copy.latest, copy.ancestors):
        assert len(known) == len(list(known.items())) == 16
        assert max(born for _, born in known.items()) == 29, "what was told last stays"
    here.core.check()


def test_a_hostile_replica_makes_us_forget_only_what_it_told_of_a_lease_itself() -> None:
    """A close would not say of a forgotten owner's claims how far it reaches."""
    here = Replica(replica_publishers_max=16)
    lease = LeaseState("l", "o", 60.0)
    stays = ClaimRecord("stays", 1, "default", "default", 16, 1, 0, lease=lease)
    kept = replace(stays, adopts=[(1000, 7)])
    here.hears(Said(2000, 1, 1, [kept]), peer="tcp://good:1")
    for at in range(1, 30):
        adopts = [(at * 100 + one, at) for one in range(ANCESTORS_MAX)]
        heir = replace(stays, reservation_id=f"r{at}", born=at, adopts=adopts)
        here.hears(Said(3000, 1, at, [heir]), peer="tcp://evil:1")
    copy = here.core.lifecycle.announcer.claims.copies.find("l")
    assert copy is not None
    assert (1000, 7) in copy.ancestors.items()
    assert (1000, 7) in copy.latest.items()
    assert len(copy.ancestors) == len(copy.latest) == 16


def test_our_own_count_told_to_us_does_not_overflow() -> None:
    """What we say of it afterwards must fit the words there are."""
    here = Replica()
    here.book("mine", 1, 5)
    (claim,) = here.core.lifecycle.announcer.claims.own.by_id.values()
    told = ClaimGrowth(outputs={OURS: OUTPUT_BLOCKS_MAX, 2: OUTPUT_BLOCKS_MAX})
    here.hears(Said(3000, 1, 1, [Grown("mine", *claim.key, told)]), peer="tcp://evil:1")
    here.core.reservations.output_block("mine", 0.5, here.now)
    said = here.turn(here.core.limits.replica_output_interval_s)
    assert said
    for message in said:
        assert decode_message(*encode_message(message)) == message


@pytest.mark.parametrize("more", [{1 << 40: 1}, {0: OUTPUT_BLOCKS_MAX + 1}, {0: -1}])
def test_a_word_with_more_output_than_that_is_none(more: dict[int, int]) -> None:
    told = ClaimGrowth(outputs=dict.fromkeys(range(OUTPUT_TELLERS_MAX), OUTPUT_BLOCKS_MAX))
    said = Said(3000, 1, 1, [Grown("x", 3000, 1, told)])
    assert decode_message(*encode_message(said)) == said
    told.outputs.update(more)
    with pytest.raises(MalformedReplicaMessage, match="outputs"):
        decode_message(*encode_message(said))


def test_no_message_is_long_enough_to_hold_the_loop() -> None:
    """A message of 4 MiB with 35,000 claims took 0.6 s to be taken in."""
    ended = Ended("a", 1, 1)
    longest = Said(2000, 1, 1, [ended] * ITEMS_MAX)
    assert decode_message(*encode_message(longest)) == longest
    with pytest.raises(MalformedReplicaMessage):
        decode_message(*encode_message(Said(2000, 1, 1, [ended] * (ITEMS_MAX + 1))))
    assert CoreLimits().replica_items_per_message_max <= ITEMS_MAX
    record = ClaimRecord("a", 1, "m", "t", 16, 1, 0)
    for count in (ANCESTORS_MAX, ANCESTORS_MAX + 1):
        said = Said(2000, 1, 1, [replace(record, adopts=[(1, at) for at in range(count)])])
        if count <= ANCESTORS_MAX:
            assert decode_message(*encode_message(said)) == said
        else:
            with pytest.raises(MalformedReplicaMessage):
                decode_message(*encode_message(said))
