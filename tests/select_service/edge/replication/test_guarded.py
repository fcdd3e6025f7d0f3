"""Replicas that trust nobody: keys on the wire, tokens and TLS on the way to a snapshot or a dump.

Two whole services in one loop, with genuine sockets; between them a relay that writes all down.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import zmq

from indexer.edge.curve import KeyPair, new_key_file
from indexer.edge.sockets import Link
from indexer.errors import KeyFileUnusable
from select_service.core.replication.dynamo_events import TOPIC
from select_service.edge.driver.driver import Driver
from select_service.edge.security.credentials import ClientCredentials
from select_service.types import ReservationRequest
from tests.live.ports import free_port
from tests.live.relay import Relay
from tests.select_service.edge.security.credentials_made import Authority, TokenFile
from tests.select_service.edge.serving import PROMPT, add_worker, listening
from tests.wait import until

SECRET_ID = "reservation-4711"


def book(service: Driver, name: str = SECRET_ID) -> None:
    service.reserve(ReservationRequest(reservation_id=name, worker_id=1, **PROMPT))


class Guarded(NamedTuple):
    """Two services that trust nobody, and a relay that writes down what one says to the other."""

    one: Driver
    two: Driver
    relay: Relay
    port: int
    keys: Path  # whom `one` lets listen
    two_key: KeyPair


@contextlib.asynccontextmanager
async def two_guarded(at: Path) -> AsyncIterator[Guarded]:
    ca, tokens = Authority(at), TokenFile(at / "tokens")
    (at / "peer").write_text(tokens.add("replica", "read") + "\n")
    new_key_file(str(at / "one"))
    two_key = new_key_file(str(at / "two"))
    keys, servers, port = at / "replicas", at / "servers", free_port()
    keys.write_text(two_key.public + "\n")
    guarded: dict[str, Any] = {
        **ca.serving("replica"),
        **tokens.setting,
        "peer_token_file": str(at / "peer"),
        "peer_ca": str(ca.cert),
    }
    mine: dict[str, Any] = {"curve_key": str(at / "one"), "curve_replica_keys": str(keys)}
    theirs: dict[str, Any] = {"curve_key": str(at / "two"), "curve_replica_keys": str(servers)}
    async with listening(replica_sync_port=port, **mine, **guarded) as (https, one, _):
        one.core.replica_operations.announce(https)
        add_worker(one)
        book(one, "before")
        relay = Relay(f"tcp://127.0.0.1:{port}")
        endpoint = await relay.start()
        assert one.credentials is not None
        assert one.credentials.keys is not None
        servers.write_text(f"{one.credentials.keys.public} {endpoint}\n")
        async with listening(replica_sync_port=free_port(), **theirs, **guarded) as (_, two, _):
            add_worker(two)
            two.register_peer(endpoint)
            # what was booked before comes by a snapshot: over TLS, with the token
            await until(lambda: two.core.lifecycle.bookings.live("before") is not None)
            assert two.replicas is not None
            outcomes = two.replicas.pulls.outcomes  # counted once all of it has come
            await until(lambda: outcomes["complete"] == 1)
            yield Guarded(one, two, relay, port, keys, two_key)
            await relay.stop()


async def test_captured_traffic_shows_no_ids(tmp_path: Path) -> None:
    stranger = KeyPair.new()
    async with two_guarded(tmp_path) as (one, two, relay, port, keys, two_key):
        book(one)
        await until(lambda: two.core.lifecycle.bookings.live(SECRET_ID) is not None)
        assert b"CURVE" in relay.seen
        assert SECRET_ID.encode() not in relay.seen
        assert b"default" not in relay.seen
        assert one.replicas is not None
        publisher: Any = one.replicas.publisher
        check = publisher.key_check
        assert check.accepted == 1

        # nobody else receives anything
        assert one.credentials is not None
        assert one.credentials.keys is not None
        with zmq.Context() as context, context.socket(zmq.SUB) as spy:
            spy.setsockopt(zmq.CURVE_SERVERKEY, one.credentials.keys.public.encode())
            spy.setsockopt(zmq.CURVE_PUBLICKEY, stranger.public.encode())
            spy.setsockopt(zmq.CURVE_SECRETKEY, stranger.secret.encode())
            spy.setsockopt(zmq.LINGER, 0)
            spy.subscribe(b"")
            spy.connect(f"tcp://127.0.0.1:{port}")
            await until(lambda: check.refused > 0)
            book(one, "later")
            await until(lambda: two.core.lifecycle.bookings.live("later") is not None)
            assert not spy.poll(0)
        one.free(SECRET_ID)
        await until(lambda: two.core.lifecycle.bookings.live(SECRET_ID) is None)

        # a key that is taken out receives no more, on the connection it has
        keys.write_text(stranger.public + "\n")
        assert one.security is not None
        refused = check.refused
        one.security.prepare()()
        await until(lambda: publisher.key_check.refused > refused)
        book(one, "unheard")
        # and one that is put in again receives what it has missed
        keys.write_text(two_key.public + "\n")
        one.security.prepare()()
        await until(lambda: two.core.lifecycle.bookings.live("unheard") is not None)
        assert publisher.key_check.accepted == 2


def rewrite(path: Path, pair: KeyPair) -> None:
    path.write_text(f"public {pair.public}\nsecret {pair.secret}\n")


async def test_a_key_is_exchanged_under_traffic(tmp_path: Path) -> None:
    """The procedure of deploy/docs/security.md, two replicas booking all the while."""
    one_path, two_path = tmp_path / "one", tmp_path / "two"
    old, other, new = new_key_file(str(one_path)), new_key_file(str(two_path)), KeyPair.new()
    ports = free_port(), free_port()
    at = [f"tcp://127.0.0.1:{port}" for port in ports]
    lists = tmp_path / "by-one", tmp_path / "by-two"
    lists[0].write_text(f"{other.public} {at[1]}\n")
    lists[1].write_text(f"{old.public} {at[0]}\n")
    async with (
        listening(
            replica_sync_port=ports[0],
            curve_key=str(one_path),
            curve_replica_keys=str(lists[0]),
            replica_heartbeat_s=0.2,
        ) as (http_one, one, _),
        listening(
            replica_sync_port=ports[1],
            curve_key=str(two_path),
            curve_replica_keys=str(lists[1]),
            replica_heartbeat_s=0.2,
        ) as (http_two, two, _),
    ):
        both: tuple[Driver, Driver] = (one, two)
        for service, port, peer in ((one, http_one, at[1]), (two, http_two, at[0])):
            service.core.replica_operations.announce(port)
            add_worker(service)
            service.register_peer(peer)
        books = [one.core.lifecycle.bookings, two.core.lifecycle.bookings]
        number = 0

        async def agree(because: str) -> None:
            nonlocal number
            names = []
            for service in both:
                number += 1
                names.append(f"{because}-{number}")
                book(service, names[-1])
            await until(lambda: all(one.live(name) for one in books for name in names))

        def reload(service: Driver) -> None:
            assert service.security is not None
            service.security.prepare()()

        await agree("before")
        lists[1].write_text(f"{old.public} {at[0]}\n{new.public}\n")
        reload(two)  # the new key may listen, the old one is still that of its endpoint
        await agree("both-listed")
        book(two, "between")
        rewrite(one_path, new)
        reload(one)
        book(one, "unheard-at-first")
        lists[1].write_text(f"{new.public} {at[0]}\n{old.public}\n")
        reload(two)
        await agree("exchanged")
        lists[1].write_text(f"{new.public} {at[0]}\n")
        reload(two)  # the old one may listen no more: whoever has it is cut off
        await agree("old-gone")
        await until(lambda: all(one.live("unheard-at-first") for one in books))
        assert len(books[0]) == len(books[1]) == number + 2
        assert one.credentials is not None
        assert one.credentials.replica_keys is not None
        ours = one.credentials.replica_keys
        assert ours.own.public == new.public

        # half a file changes nothing
        one_path.write_text(f"public {new.public}\n")
        with pytest.raises(KeyFileUnusable):
            reload(one)
        assert ours.own.public == new.public
        rewrite(one_path, new)
        publisher: Any = one.replicas.publisher if one.replicas else None
        socket = publisher._socket
        reload(one)
        await asyncio.sleep(0)
        assert publisher._socket is socket, "nobody is cut off by the same key"
        await agree("unchanged")


async def test_a_replica_whose_key_is_taken_out_is_listened_to_no_longer(tmp_path: Path) -> None:
    """And one that has another is, once that stands in the list: no restart on either side."""
    own, other = new_key_file(str(tmp_path / "one")), new_key_file(str(tmp_path / "two"))
    (tmp_path / "one.public").write_text(own.public + "\n")
    stranger = KeyPair.new()
    port = free_port()
    endpoint = f"tcp://127.0.0.1:{port}"
    (tmp_path / "replicas").write_text(f"{stranger.public} {endpoint}\n")
    async with (
        listening(
            replica_sync_port=free_port(),
            curve_key=str(tmp_path / "one"),
            curve_replica_keys=str(tmp_path / "replicas"),
        ) as (_, one, _),
        listening(
            replica_sync_port=port,
            curve_key=str(tmp_path / "two"),
            curve_replica_keys=str(tmp_path / "one.public"),
        ) as (_, two, _),
    ):
        add_worker(one)
        add_worker(two)
        one.register_peer(endpoint)
        assert one.security is not None
        assert one.replicas is not None
        subscriptions = one.replicas.subscriptions
        # its key was another than we expected
        (tmp_path / "replicas").write_text(f"{other.public} {endpoint}\n")
        one.security.prepare()()
        await until(lambda: dict(subscriptions.states())[endpoint] is Link.CONNECTED)
        assert one.replicas.peers() == [endpoint]
        # a connection is no subscription yet, and what is missed here cannot be fetched
        await until(lambda: one.core.replicas.counters.received > 0)
        book(two, "heard")
        await until(lambda: one.core.lifecycle.bookings.live("heard") is not None)
        # what is in the list as it was, stays connected
        one.security.prepare()()
        assert dict(subscriptions.states())[endpoint] is Link.CONNECTED
        # a thief has it: whatever comes from there is not believed any more
        (tmp_path / "replicas").write_text("")
        one.security.prepare()()
        publisher: Any = two.replicas.publisher if two.replicas else None
        await until(lambda: dict(subscriptions.states())[endpoint] is Link.BROKEN)
        book(two, "forged")
        sent = publisher.sent
        await until(lambda: publisher.sent > sent)
        assert one.core.lifecycle.bookings.live("forged") is None


async def test_without_keys_captured_traffic_shows_ids() -> None:
    port = free_port()
    async with (
        listening(replica_sync_port=port) as (_, one, _),
        listening(replica_sync_port=free_port()) as (_, two, _),
    ):
        add_worker(one)
        add_worker(two)
        relay = Relay(f"tcp://127.0.0.1:{port}")
        two.register_peer(await relay.start())
        await until(lambda: b"heartbeat" in relay.seen or len(relay.seen) > 500)
        book(one)
        await until(lambda: two.core.lifecycle.bookings.live(SECRET_ID) is not None)
        assert SECRET_ID.encode() in relay.seen
        await relay.stop()


async def test_the_references_words_count_for_nothing_where_keys_are_asked_for(
    tmp_path: Path,
) -> None:
    new_key_file(str(tmp_path / "key"))
    async with listening(replica_sync_port=free_port(), curve_key=str(tmp_path / "key")) as (
        _,
        service,
        _,
    ):
        add_worker(service)
        book(service)
        rank = {"worker_id": 1, "dp_rank": 0}
        event = {"request_id": SECRET_ID, "worker": rank}
        event |= {"data": "Free", "router_id": 77, "lora_name": None}  # type: ignore[dict-item]
        envelope: dict[str, Any] = {
            "model_name": "default",
            "tenant_id": "default",
            "block_size": 16,
        }
        assert service.replicas is not None
        forged = msgspec.msgpack.encode(envelope | {"event": event})
        service.replicas._receive("tcp://evil:1", [TOPIC, forged])
        assert service.core.lifecycle.bookings.live(SECRET_ID) is not None
        assert service.replicas.foreign_refused == 1
        assert service.replicas.malformed == 0


@pytest.mark.parametrize("shows", [True, False], ids=["token", "no token"])
async def test_recovery_shows_its_token_and_verifies_tls(tmp_path: Path, shows: bool) -> None:
    ca, tokens = Authority(tmp_path), TokenFile(tmp_path / "tokens")
    (tmp_path / "peer").write_text(tokens.add("replica", "read"))
    async with listening(**ca.serving("replica"), **tokens.setting) as (
        port,
        one,
        _,
    ):
        add_worker(one)
        asking: dict[str, Any] = {
            "indexer_peers": (f"https://127.0.0.1:{port}",),
            "recovery_attempts_max": 1,
            "peer_ca": str(ca.cert),
        }
        if shows:
            asking["peer_token_file"] = str(tmp_path / "peer")
        async with listening(**asking) as (_, two, _):
            await two.recovered(20.0)
            assert two.recovery is not None
            assert two.recovery.outcome == ("recovered" if shows else "failed")
            assert two.recovery.failures == ({} if shows else {"status": 1})


async def test_recovery_believes_no_stranger(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    ca, other = Authority(tmp_path / "a"), Authority(tmp_path / "b")
    (tmp_path / "peer").write_text("sst_" + "t" * 43)
    async with (
        listening(**ca.serving("replica")) as (port, _, _),
        listening(
            indexer_peers=(f"https://127.0.0.1:{port}",),
            recovery_attempts_max=1,
            peer_ca=str(other.cert),
            peer_token_file=str(tmp_path / "peer"),
        ) as (_, two, _),
    ):
        await two.recovered(20.0)
        assert two.recovery is not None
        assert two.recovery.failures == {"connection": 1}


@pytest.mark.parametrize(
    ("url", "host", "ca", "shown"),
    [
        ("http://10.0.0.1:8092/x", "10.0.0.1", None, True),
        ("http://10.0.0.2:8092/x", "10.0.0.1", None, False),
        ("https://10.0.0.2:8092/x", "10.0.0.1", None, False),
        ("https://10.0.0.2:8092/x", "10.0.0.1", "ca.pem", True),
        ("http://10.0.0.2:8092/x", "10.0.0.1", "ca.pem", False),
        ("http://10.0.0.1:8092/x", "10.0.0.1", "ca.pem", False),
        ("http://10.0.0.1@evil/x", "10.0.0.1", None, False),
        ("http://10.0.0.1.evil/x", "10.0.0.1", None, False),
        ("http://x/", None, None, False),
    ],
)
def test_a_token_is_shown_to_whom_it_is_meant_for(
    tmp_path: Path, url: str, host: str | None, ca: str | None, shown: bool
) -> None:
    """A heartbeat may name any address; the token does not follow it."""
    (tmp_path / "token").write_text("secret\n")
    passport = ClientCredentials(str(tmp_path / "token"), ca)
    assert passport.headers(url, host) == ({"authorization": "Bearer secret"} if shown else {})
    assert passport.withheld == (not shown)


@pytest.mark.parametrize("content", ["", "two words", "line\nbreak", "é"])
def test_a_file_without_a_token(tmp_path: Path, content: str) -> None:
    (tmp_path / "token").write_text(content)
    for path in (tmp_path / "token", tmp_path / "none"):
        passport = ClientCredentials(str(path))
        assert passport.headers("http://h/", "h") == {}
        assert passport.failures == 1
