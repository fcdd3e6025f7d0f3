"""Of two that tell where a session is, every replica believes the same one: who knew more of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.types import Scope
from select_service.core.replication.message_codec import (
    MalformedReplicaMessage,
    decode_message,
    encode_message,
)
from select_service.core.replication.messages import (
    SESSIONS_TOPIC,
    ClaimRecord,
    SessionRank,
    SessionRanks,
)
from select_service.core.reservations.sessions import GAP_TTL_MIN_S, RETOLD_SHARE
from tests.select_service.core.reservations.test_sessions import ask
from tests.select_service.core.reservations.test_shared_sessions import (
    TTL_S,
    SessionNet,
    effects_of,
    select,
)

if TYPE_CHECKING:
    from select_service.core.partition import Partition
    from tests.models.replica_net import Node

WORKERS = range(3, 9)


def place_of(node: Node, session_id: str = "s") -> int | None:
    """Return the worker that a node would send a session's next request to."""
    partition = _scope(node)
    rank = node.core.sessions.present(partition, session_id)
    return None if rank is None else partition.fleet_slots.rank_at(rank.slot)[0].worker_id


def _scope(node: Node) -> Partition:
    return node.core.partitions[Scope("default", "default")]


def places(net: SessionNet) -> list[int | None]:
    return [place_of(node) for node in net.nodes]


def back(node: Node) -> None:
    """Start a node again with nothing but its workers."""
    node.net.crash(node)
    for worker_id in WORKERS:
        node.put_worker(worker_id)


@pytest.mark.parametrize("is_booked", [False, True], ids=["selected", "reserved"])
@pytest.mark.parametrize("lost", [1, 4], ids=["one move", "more moves"])
def test_a_restart_from_a_state_of_a_while_ago_takes_nobody_back(
    *, is_booked: bool, lost: int
) -> None:
    net = SessionNet(nodes=3)
    here, there, _ = net.nodes
    select(here, 8)
    net.run(0.5)
    here.flush()
    rows = dict(here.rows)
    for number in range(lost):
        select(there if number % 2 else here, 3 + number)
        net.run(0.5)
    last = 2 + lost
    assert places(net) == [last] * 3

    here.rows = rows
    here.reboot()
    assert place_of(here) == 8, "what its file says"
    if is_booked:
        ask(here, "r")
    else:
        select(here)
    net.run(2 * net.limits.replica_heartbeat_s)
    assert places(net) == [last] * 3


@pytest.mark.parametrize("pause_s", [0.1, 1.0], ids=["at once", "greeted"])
def test_a_restart_with_nothing_takes_nobody_elsewhere(pause_s: float) -> None:
    net = SessionNet()
    here, _ = net.nodes
    for worker_id in (4, 3):
        select(here, worker_id)
        net.run(0.5)
    back(here)
    net.run(pause_s)
    select(here, 8)
    net.run(1.0)
    assert places(net) == [3, 3]


def test_one_that_starts_is_told_of_all_sessions_once_whoever_chose_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = SessionNet(nodes=3)
    monkeypatch.setattr(net.rng, "expovariate", lambda _: 0.01)  # in order, as over TCP
    for number, node in enumerate(net.nodes):
        select(node, 3 + number, session_id=f"s{number}")
        net.run(0.5)
    net.told.clear()
    net.nodes[2].is_down = True
    net.run(2 * net.limits.replica_heartbeat_s)
    back(net.nodes[2])
    net.nodes[2].is_down = False
    net.run(3.0)
    assert [place_of(net.nodes[2], f"s{number}") for number in range(3)] == [3, 4, 5]
    assert sorted({one.session_id for one in net.told}) == ["s0", "s1", "s2"]
    assert not any(one.is_new for one in net.told)
    assert len(net.told) <= 4, "those of the one that is gone are told by both"


def test_one_that_starts_is_told_of_no_session_that_is_over() -> None:
    net = SessionNet(session_ttl_s=60.0)
    here, there = net.nodes
    ask(here, "a", 3)
    here.did(here.core.reservations.free("a", net.now))
    net.run(1.0)
    ask(here, "b", 3)
    here.did(here.core.reservations.free("b", net.now))
    net.run(2 * GAP_TTL_MIN_S)
    assert place_of(here) == 3, "what is known of its gaps is kept"
    back(there)
    net.run(3.0)
    assert net.told == []
    assert place_of(there) is None


def test_to_be_told_again_is_no_sign_of_life() -> None:
    net = SessionNet()
    here, there = net.nodes
    ask(here, "a", 3)
    net.run(0.5)
    here.did(here.core.reservations.free("a", net.now))
    net.run(0.5)
    partition = _scope(there)
    known = there.core.sessions.find(partition, "s")
    assert known is not None
    assert known.is_resting
    told = SessionRank("default", "default", "s", 3, known.slot % 2, known.version, False)
    for version in (known.version, known.version + 1):
        here.did(effects_of(here, [msgspec.structs.replace(told, version=version)]))
        net.run(0.2)
    again = there.core.sessions.find(partition, "s")
    assert again is not None
    assert again._replace(sent_at=0.0) == known._replace(sent_at=0.0, version=known.version + 1)


@pytest.mark.parametrize("first", [3, 8])
def test_of_the_reservations_that_a_newcomer_hears_of_the_last_one_counts(first: int) -> None:
    net = SessionNet()
    here, there = net.nodes
    last = 11 - first
    ask(here, "b" if first == 3 else "a", first)
    net.run(0.5)
    ask(here, "a" if first == 3 else "b", last)
    net.run(0.5)
    back(there)
    net.run(2.0)
    assert places(net) == [last, last]


def test_a_replica_that_missed_a_move_is_told_of_it_again() -> None:
    net = SessionNet(nodes=3)
    here, there, _ = net.nodes
    select(here, 8)
    net.run(0.5)
    net.loss = 1.0
    for worker_id in (3, 4):
        select(here, worker_id)
        net.run(0.1)
    net.loss = 0.0
    net.run(RETOLD_SHARE * TTL_S)
    assert select(there) == 8
    net.run(0.5)
    assert place_of(there) == 4
    select(there, 5)
    net.run(0.5)
    assert places(net) == [5] * 3, "now it knows, and its next move counts"


def test_two_that_choose_at_once_agree_at_once() -> None:
    for one, other in ((3, 4), (4, 3)):
        net = SessionNet()
        here, there = net.nodes
        select(here, one)
        select(there, other)
        net.run(0.5)
        assert places(net) == [4, 4], "whose rank is the larger one: as good as any rule"


def test_a_session_that_is_over_comes_back_wherever_it_is_asked_for() -> None:
    net = SessionNet()
    here, there = net.nodes
    for worker_id in (3, 4, 8):
        select(here, worker_id)
        net.run(0.1)
    back(there)
    net.run(1.5 * TTL_S)
    select(there, 3)
    net.run(0.5)
    assert places(net) == [3, 3]


def test_of_one_whose_rank_has_gone_any_word_counts() -> None:
    net = SessionNet()
    here, there = net.nodes
    for worker_id in (3, 4, 8):
        select(here, worker_id)
        net.run(0.1)
    back(there)
    net.run(1.0)
    for node in net.nodes:
        node.did(node.core.workers.delete_worker(8, net.now)[1])
    select(there, 3)
    net.run(0.5)
    assert places(net) == [3, 3]


def test_a_file_counts_for_more_than_what_was_chosen_before_its_worker_was_back() -> None:
    net = SessionNet()
    here, _ = net.nodes
    for worker_id in (3, 4, 8):
        select(here, worker_id)
        net.run(0.1)
    here.flush()
    rows = {key: row for key, row in here.rows.items() if key[0] == "session"}
    assert rows
    net.kill(net.nodes[1])
    back(here)
    select(here, 3)
    for key, row in rows.items():
        here.core.state.restore(key, row, net.now)
    here.core.check()
    assert place_of(here) == 8


def test_older_replicas_are_believed_and_believe() -> None:
    net = SessionNet()
    here, there = net.nodes
    for worker_id in (3, 4):
        select(there, worker_id)
        net.run(0.1)
    here.did(effects_of(here, [SessionRank("default", "default", "s", 8, 0)]))
    net.run(0.5)
    assert place_of(there) == 8
    fields = [["default", "default", "s", 8, 0, 7, False, "of a later version"]]
    message = {"type": "sessions", "router_id": 1, "epoch": 1, "number": 1, "sessions": fields}
    told = decode_message(SESSIONS_TOPIC, msgspec.msgpack.encode(message))
    assert isinstance(told, SessionRanks)
    assert told.sessions == [SessionRank("default", "default", "s", 8, 0, 7, False)]


@pytest.mark.parametrize("version", [-1, 1 << 32, 1.5, "1", None])
def test_what_is_no_version_is_malformed(version: object) -> None:
    fields = [["default", "default", "s", 8, 0, version]]
    message = {"type": "sessions", "router_id": 1, "epoch": 1, "number": 1, "sessions": fields}
    with pytest.raises(MalformedReplicaMessage):
        decode_message(SESSIONS_TOPIC, msgspec.msgpack.encode(message))


def test_the_largest_version_ends_no_session_and_no_replica() -> None:
    net = SessionNet()
    here, there = net.nodes
    most = (1 << 32) - 1
    here.did(effects_of(here, [SessionRank("default", "default", "s", 4, 0, most)]))
    net.run(0.5)
    select(there, 8)
    net.run(0.5)
    assert places(net) == [8, 8]
    told = SessionRanks(1, 1, 1, [SessionRank("m", "t", "s", 1, 0, most)])
    assert decode_message(*encode_message(told)) == told


def test_an_empty_name_is_no_session_whoever_tells_it() -> None:
    net = SessionNet()
    here, there = net.nodes
    ask(here, "r")
    (claim,) = here.core.lifecycle.announcer.claims.own.by_id.values()
    claim.record = msgspec.structs.replace(claim.record, session_id="")
    here.core.lifecycle.announcer.claims.outbox.say_later(claim)
    back(there)
    net.run(2.0)
    booked = there.core.lifecycle.bookings.live("r")
    assert booked is not None
    assert booked.reservation.session_id is None
    assert there.core.sessions.find(_scope(there), "") is None


def test_a_claim_says_how_much_was_known_and_older_ones_do_not() -> None:
    net = SessionNet()
    here, _ = net.nodes
    for name in ("a", "b"):
        ask(here, name)
    versions = [
        one.record.session_version
        for one in here.core.lifecycle.announcer.claims.own.by_id.values()
    ]
    assert versions == [1, 2]
    assert "session_version" in ClaimRecord.__struct_fields__
    here.flush()
    here.reboot()
    again = here.core.lifecycle.announcer.claims.own.by_id.values()
    assert [one.record.session_version for one in again] == [1, 2]


STEPS = st.tuples(
    st.sampled_from(("select", "reserve", "free", "flush", "reboot", "lose", "cut", "run")),
    st.integers(0, 2),
    st.sampled_from(WORKERS),
)


@given(st.lists(STEPS, min_size=4, max_size=24), st.integers(0, 99))
def test_whatever_happens_one_more_request_and_all_agree(
    steps: list[tuple[str, int, int]], seed: int
) -> None:
    net = SessionNet(nodes=3, session_ttl_s=3600.0, session_gap_factor=0.0)
    net.rng.seed(seed)
    net.prompt_writes = 0.3
    for number, (what, which, worker_id) in enumerate(steps):
        _do(net, what, net.nodes[which], worker_id, f"r{number}")
    net.settle(10.0)
    for node in net.nodes:
        for name in node.ledger():
            node.did(node.core.reservations.free(name, net.now))
        net.run(0.5)
    known = {*places(net)} - {None}
    for node in net.nodes:
        name = f"last{node.number}"
        ask(node, name)
        net.run(0.5)
        node.did(node.core.reservations.free(name, net.now))
        net.run(0.5)
        node.core.check()
    told = {*places(net)}
    assert len(told) == 1
    assert len(known) != 1 or told == known, "some forgot it, and nobody knew of another"


def _do(net: SessionNet, what: str, node: Node, worker_id: int, name: str) -> None:
    if what == "select":
        select(node, worker_id)
    elif what == "reserve":
        ask(node, name, worker_id)
    elif what == "free":
        for live in [*node.ledger()][:1]:
            node.did(node.core.reservations.free(live, net.now))
    elif what == "flush":
        node.flush()
    elif what == "reboot":
        node.reboot()
    elif what == "lose":
        net.loss = 0.5 - net.loss
    elif what == "cut":
        net.cut ^= {frozenset((node.number, (node.number + 1) % 3))}
    else:
        net.run(0.2)
