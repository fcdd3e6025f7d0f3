"""Replicas know where a session is although nothing is booked: plain selections are told of."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from select_service.core.effects import Effects
from select_service.core.replication.message_codec import (
    MalformedReplicaMessage,
    decode_message,
    encode_message,
)
from select_service.core.replication.messages import (
    CACHED_TOKENS_TOPIC,
    LOADS_TOPIC,
    OWN_TOPIC,
    SESSION_RANKS_MAX,
    SESSIONS_TOPIC,
    SessionRank,
    SessionRanks,
)
from select_service.core.reservations.sessions import RETOLD_SHARE
from select_service.types import SelectAndReserveRequest, Selection, SelectRequest
from tests.models.replica_net import LIMITS, Net, Node

if TYPE_CHECKING:
    from collections.abc import Iterator

TTL_S = 6.0


class SessionNet(Net):
    """Replicas with six workers; `told` are all sessions that were told of, one by one."""

    def __init__(self, nodes: int = 2, **limits: float) -> None:
        self.told: list[SessionRank] = []
        self.sizes: list[int] = []
        super().__init__(
            1, nodes, msgspec.structs.replace(LIMITS, **{"session_ttl_s": TTL_S} | limits)
        )
        for node in self.nodes:
            node.keep()
            for worker_id in range(3, 9):
                node.put_worker(worker_id)
        self.run(1.0)

    def observe(self, source: Node, message: object) -> None:
        super().observe(source, message)
        if isinstance(message, SessionRanks):
            self.told += message.sessions
            self.sizes.append(len(message.sessions))


def select(node: Node, *allowed: int, session_id: str = "s") -> int:
    """Ask a node for a worker, and book nothing; return which."""
    request = SelectRequest(
        block_hashes=b"",
        sequence_hashes=b"",
        isl_tokens=4,
        session_id=session_id,
        allowed_worker_ids=[*allowed] or None,
    )
    answer, effects = node.core.selection.select(request, node.net.now)
    node.did(effects)
    assert isinstance(answer, Selection)
    return answer.worker_id


def begun(net: Net) -> list[int]:
    return [node.core.sessions.counters.begun for node in net.nodes]


def others(place: int) -> Iterator[int]:
    return (one for one in range(3, 9) if one != place)


def test_replicas_hear_of_sessions_of_plain_selections() -> None:
    net = SessionNet()
    here, there = net.nodes
    place = select(here)
    net.run(1.0)
    assert [select(there) for _ in range(4)] == [place] * 4
    moved = select(there, *others(place))
    net.run(1.0)
    assert select(here) == moved
    assert begun(net) == [1, 0]


def test_of_one_that_stays_they_are_told_once_in_a_while_so_that_they_do_not_forget_it() -> None:
    net = SessionNet()
    here, there = net.nodes
    step_s = RETOLD_SHARE * TTL_S / 3
    for _ in range(16):
        select(here)
        net.run(step_s)
    assert len(net.told) == 6, "the first, and every third after it"
    assert select(there) == select(here)
    assert begun(net) == [1, 0]


def test_one_turn_tells_of_a_session_once_however_often_it_has_moved() -> None:
    net = SessionNet()
    here, _ = net.nodes
    for worker_id in (3, 4, 5, 6):
        select(here, worker_id)
    net.run(1.0)
    assert [one.worker_id for one in net.told] == [6]


def test_many_are_told_of_in_bounded_messages_and_nobody_tells_them_on() -> None:
    net = SessionNet(nodes=3)
    for number in range(SESSION_RANKS_MAX + 1):
        select(net.nodes[0], session_id=f"s{number}")
    net.run(1.0)
    assert net.sizes == [SESSION_RANKS_MAX, 1]
    assert len(net.told) == SESSION_RANKS_MAX + 1


def test_two_that_chose_at_once_agree_after_the_next_request() -> None:
    net = SessionNet()
    here, there = net.nodes
    select(here, 3)
    select(there, 4)
    net.run(1.0)
    place = select(here)
    net.run(1.0)
    assert select(there) == place == select(here)


def test_what_its_reservation_tells_is_not_told_again() -> None:
    net = SessionNet()
    here, there = net.nodes
    request = SelectAndReserveRequest(
        reservation_id="r", block_hashes=b"", sequence_hashes=b"", isl_tokens=4, session_id="s"
    )
    place = select(here)
    answer, effects = here.core.selection.select_and_reserve(request, net.now)
    here.did(effects)
    assert isinstance(answer, Selection)
    net.run(1.0)
    assert net.told == []
    assert select(there) == answer.worker_id == place
    net.run(1.0)
    assert net.told == [], "that one was heard of, too"


def test_after_a_restart_it_is_told_again() -> None:
    net = SessionNet()
    here, there = net.nodes
    place = select(here)
    net.run(1.0)
    here.flush()
    here.reboot()
    there.core.sessions.forget(net.now + 2 * TTL_S, 9)
    net.run(1.0)
    net.told.clear()
    assert select(here) == place
    net.run(1.0)
    assert [one.session_id for one in net.told] == ["s"]
    assert select(there) == place


def test_what_is_not_here_or_too_long_is_not_taken() -> None:
    net = SessionNet(id_length_max=8)
    here, there = net.nodes
    told = [
        SessionRank("default", "default", "s" * 9, 3, 0),
        SessionRank("default", "default", "", 3, 0),
        SessionRank("default", "default", "s", 99, 0),
        SessionRank("default", "default", "s", 3, 7),
        SessionRank("default", "nobody", "s", 3, 0),
    ]
    number = there.core.replicas.counters.ignored
    here.did(effects_of(here, told))
    net.run(1.0)
    assert len(there.core.sessions) == 0
    assert there.core.replicas.counters.ignored == number + len(told)


def test_without_replicas_or_sessions_nothing_waits_to_be_told() -> None:
    net = SessionNet(session_ttl_s=0.0)
    for node in net.nodes:
        select(node)
    net.run(1.0)
    assert net.told == []


def test_older_versions_are_sent_nothing_that_they_cannot_read() -> None:
    message = SessionRanks(1, 1, 1, [SessionRank("m", "t", "s", 1, 0)])
    topic, payload = encode_message(message)
    assert topic == SESSIONS_TOPIC
    assert decode_message(topic, payload) == message
    subscribed = OWN_TOPIC, LOADS_TOPIC, CACHED_TOKENS_TOPIC
    assert not topic.startswith(subscribed), "what they subscribe to"
    for wrong in subscribed:
        with pytest.raises(MalformedReplicaMessage):
            decode_message(wrong, payload)
    many = SessionRanks(1, 1, 1, message.sessions * (SESSION_RANKS_MAX + 1))
    with pytest.raises(MalformedReplicaMessage):
        decode_message(*encode_message(many))


def effects_of(node: Node, told: list[SessionRank]) -> Effects:
    """Return effects that publish a message of this node, as its plane would."""
    claims = node.core.lifecycle.announcer.claims
    node.core.replicas._reported += 1
    number = node.core.replicas._reported
    message = SessionRanks(claims.router_id, claims.outbox.epoch, number, told)
    return Effects(published=[message])
