"""The sockets of the replica plane: a PUB socket for our messages, a SUB socket per peer.

Sends never wait, and each turn of the event loop reads a bounded slice, whatever peers do. This
file decides nothing; `plane.py` connects it to the core.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from math import inf
from typing import TYPE_CHECKING, Final

from indexer.edge.backoff import Backoff
from indexer.edge.endpoint_follower import EndpointFollower
from indexer.edge.sockets import Link, Sockets, Subscriber, open_publisher
from indexer.errors import EndpointRefused, SchemeRefused
from indexer.types import StreamLimits
from select_service.types.doctor import PeerLink

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from indexer.edge.addresses import Addresses
    from indexer.edge.curve import ReplicaKeys
    from indexer.edge.sockets import KeyCheck, Publisher
    from select_service.types import ReplicaLimits

_log = logging.getLogger("select_service")

TURN_S: Final = 0.0003
"""Time for all peers together before the event loop serves requests again."""

MESSAGES_PER_TURN: Final = 32
"""Messages read from one peer before the next peer's turn."""

KEYS_PER_TURN: Final = 8
"""Handshakes judged at once, some 20 µs each; the rest wait for the next turn."""

RECONNECT_AFTER_S: Final = 1.0
RECONNECT_AFTER_MAX_S: Final = 5.0
"""First and longest wait before reconnecting where libzmq has given up; doubled in between.
Meanwhile the peer's bookings are not seen; a handshake with a replica costs less than that."""


ASLEEP_S: Final = 1.0
"""A longer gap between two checks for silent peers means that we ourselves were not listening."""


class ReplicaPublisher:
    """Bound on every interface; a slow or absent subscriber loses messages and never blocks us."""

    def __init__(self, port: int, messages_max: int, keys: ReplicaKeys | None = None) -> None:
        """Bind.

        Args:
            port: on every interface.
            messages_max: queued per slow subscriber before it loses some.
            keys: encrypt, and admit only the listed subscribers; handshakes run on the running
                loop.

        Raises:
            indexer.errors.EndpointRefused: the port cannot be bound.
        """
        self._port, self._messages_max, self._keys = port, messages_max, keys
        self.key_check: KeyCheck | None = None
        self._socket: Publisher | None = None
        self._again: asyncio.Handle | None = None
        self._open()
        if keys is not None:
            keys.when_narrower.append(self._begin_again_soon)
        self.sent = 0
        self.dropped = 0  # the queue was full, or there is no socket at the moment

    def _open(self) -> None:
        self._socket = open_publisher(f"tcp://*:{self._port}", self._messages_max, self._keys)
        check, before = self._socket.key_check, self.key_check
        self.key_check = check
        if check is not None:
            if before is not None:  # carry the counts over
                check.accepted, check.refused = before.accepted, before.refused
            asyncio.get_running_loop().add_reader(check.fd, self._check_keys)
            self._check_keys()  # the descriptor signals only changes

    def _begin_again_soon(self) -> None:
        """Make all subscribers reconnect: libzmq checks keys only during the handshake.

        Admitted subscribers miss what is sent meanwhile, notice the gap in the numbers, and fetch
        it.
        """
        if self._again is None:
            self._again = asyncio.get_running_loop().call_soon(self._begin_again)

    def _begin_again(self) -> None:
        self._again = None
        self._close_socket()
        try:
            self._open()
        except EndpointRefused as error:  # another process took the port
            _log.error("replicas receive nothing for now: %s", error)
            loop = asyncio.get_running_loop()
            self._again = loop.call_later(RECONNECT_AFTER_S, self._begin_again)

    def publish(self, topic: bytes, payload: bytes) -> None:
        """Send one message to all subscribers."""
        if self._socket is not None and self._socket.send((topic, payload)):
            self.sent += 1
        else:
            self.dropped += 1

    def _check_keys(self) -> None:
        """Answer some of the pending handshakes."""
        is_open = self._socket is not None
        if is_open and self.key_check is not None and self.key_check.answer(KEYS_PER_TURN):
            asyncio.get_running_loop().call_soon(self._check_keys)

    def _close_socket(self) -> None:
        if self._socket is not None:
            if self.key_check is not None:
                asyncio.get_running_loop().remove_reader(self.key_check.fd)
            self._socket.close()
            self._socket = None

    def close(self) -> None:
        """Close without lingering."""
        if self._again is not None:
            self._again.cancel()
        self._close_socket()
        self.key_check = None


class _Peer:
    """One replica we listen to."""

    __slots__ = (
        "backoff",
        "beats",
        "endpoint",
        "follower",
        "is_queued",
        "key",
        "quiet_since",
        "received_at",
        "reconnect",
        "state",
        "subscriber",
    )

    def __init__(self, endpoint: str, subscriber: Subscriber, key: str | None, now: float) -> None:
        self.endpoint = endpoint
        self.key = key  # the key we require of it
        self.received_at = now
        self.quiet_since = now  # or since we last reconnected
        self.beats = False  # it has sent heartbeats, so long silence is suspicious
        self.subscriber = subscriber
        self.follower: EndpointFollower | None = None  # if the endpoint contains a host name
        self.state = Link.RETRYING
        self.is_queued = False
        self.reconnect: asyncio.TimerHandle | None = None
        self.backoff = Backoff(RECONNECT_AFTER_S, RECONNECT_AFTER_MAX_S)


class Subscriptions:
    """All SUB sockets of the replica plane; bound to the event loop they are used on.

    Attributes:
        faults: messages whose handling raised, which is a bug; the message is lost.
        renewed: reconnections of connections that were up but silent.
    """

    def __init__(
        self,
        topics: Sequence[bytes],
        on_message: Callable[[str, list[bytes]], None],
        limits: ReplicaLimits,
        clock: Callable[[], float],
        addresses: Addresses,
        keys: ReplicaKeys | None = None,
        *,
        beats_on: bytes | None = None,
        silence_s: Callable[[], float] = lambda: inf,
    ) -> None:
        """Open nothing yet.

        Args:
            topics: what to subscribe to at each peer.
            on_message: called with (endpoint, frames) for each message.
            limits: of queues and messages.
            clock: monotonic seconds.
            addresses: where sockets may connect to.
            keys: our own, and those that identify peers; None: no encryption.
            beats_on: topic of heartbeats; a peer that publishes on it sends them regularly.
            silence_s: longest silence of such a peer; beyond it the connection is considered
                broken.
        """
        self._addresses = addresses
        self._topics = topics
        self._keys = keys
        self._on_message = on_message
        self._clock = clock
        self._sockets = Sockets(
            StreamLimits(
                receive_messages_max=limits.receive_messages_max,
                message_bytes_max=limits.message_bytes_max,
                descriptors_kept=0,  # the reserve is for uses like replicas
            ),
            None if keys is None else keys.own,
        )
        if keys is not None:
            keys.when_changed.append(self._follow_keys)
        self._peers: dict[str, _Peer] = {}
        self._ready: deque[_Peer] = deque()
        self._turn_handle: asyncio.Handle | None = None
        self.faults = 0
        self.renewed = 0
        self._beats_on = beats_on
        self._silence_s = silence_s
        self._looked_at = clock()

    def __len__(self) -> int:
        return len(self._peers)

    def __contains__(self, endpoint: str) -> bool:
        return endpoint in self._peers

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._peers))

    def states(self) -> Iterator[tuple[str, Link]]:
        """Yield endpoints and the states of their connections.

        A connection that the other side refused is broken for as long as nothing else is known,
        although libzmq tries again within milliseconds.
        """
        for endpoint, peer in self._peers.items():
            yield endpoint, Link.BROKEN if peer.subscriber.is_refused else peer.state

    def links(self) -> list[PeerLink]:
        """Return the link of every peer, for the doctor."""
        now = self._clock()
        return [
            PeerLink(
                endpoint,
                peer.state is Link.CONNECTED,
                now - peer.received_at,
                is_refused=peer.subscriber.is_refused,
            )
            for endpoint, peer in self._peers.items()
        ]

    @property
    def handshakes_failed(self) -> Mapping[str, int]:
        """Failed handshakes with replicas, by kind of failure."""
        return self._sockets.handshakes_failed

    # -- verbs -------------------------------------------------------------------------------------

    def add(self, endpoint: str) -> None:
        """Listen to a new peer.

        Raises:
            indexer.errors.EndpointRefused: libzmq will not connect there, or it is forbidden.
        """
        assert endpoint not in self._peers
        is_led = True
        try:
            place = self._addresses.place(endpoint)
        except SchemeRefused as error:
            # The contract wants such a peer listed; nothing requires that it be listened to.
            _log.warning("replica peer is not listened to: %s", error)
            place, is_led = None, False
        key = None if self._keys is None else self._keys.key_of(endpoint)
        subscriber = self._sockets.subscribe(place, self._topics, key)
        peer = _Peer(endpoint, subscriber, key, self._clock())
        self._peers[endpoint] = peer
        if is_led and self._addresses.is_named(endpoint):
            peer.follower = EndpointFollower(
                self._addresses,
                endpoint,
                peer.subscriber,
                place,
                moved=lambda: self._queue(peer),
                refused=lambda error: _log.warning("replica peer: %s", error),
            )
        loop = asyncio.get_running_loop()
        loop.add_reader(peer.subscriber.fd, self._queue, peer)
        loop.add_reader(peer.subscriber.news_fd, self._follow_link, peer)
        self._queue(peer)  # the descriptors signal only changes, and one may be past
        self._follow_link(peer)

    def remove(self, endpoint: str) -> bool:
        """Stop listening; False if the peer is unknown."""
        peer = self._peers.pop(endpoint, None)
        if peer is None:
            return False
        loop = asyncio.get_running_loop()
        loop.remove_reader(peer.subscriber.fd)
        loop.remove_reader(peer.subscriber.news_fd)
        if peer.reconnect is not None:
            peer.reconnect.cancel()
        if peer.follower is not None:
            peer.follower.close()
            peer.follower = None  # breaks a reference cycle
        peer.subscriber.close()
        return True

    def _follow_keys(self) -> None:
        """Reconnect to peers whose required key has changed: the old one may be stolen."""
        assert self._keys is not None
        self._sockets.use_keys(self._keys.own)
        for endpoint, peer in list(self._peers.items()):
            if peer.key == self._keys.key_of(endpoint):
                peer.subscriber.use_keys(self._keys.own)
                continue
            self.remove(endpoint)
            try:
                self.add(endpoint)
            except EndpointRefused as error:
                _log.error("replica peer is not listened to any more: %s", error)

    def close(self) -> None:
        """Close everything. Idempotent."""
        for endpoint in list(self._peers):
            self.remove(endpoint)
        if self._turn_handle is not None:
            self._turn_handle.cancel()
            self._turn_handle = None
        self._ready.clear()
        self._sockets.close()

    # -- turns -------------------------------------------------------------------------------------

    def _queue(self, peer: _Peer) -> None:
        if not peer.is_queued:
            peer.is_queued = True
            self._ready.append(peer)
            if self._turn_handle is None:
                self._turn_handle = asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        """Serve peers with pending messages round-robin until the turn's time is up."""
        end = self._clock() + TURN_S
        while self._ready:
            peer = self._ready.popleft()
            if self._peers.get(peer.endpoint) is not peer:
                continue  # removed while queued
            if self._serve(peer, end):
                self._ready.append(peer)
            else:
                peer.is_queued = False
            if self._clock() >= end:
                break
        self._turn_handle = None
        if self._ready:
            self._turn_handle = asyncio.get_running_loop().call_soon(self._turn)

    def _serve(self, peer: _Peer, end: float) -> bool:
        """Read messages and pass them on; False when the socket is empty."""
        for _ in range(MESSAGES_PER_TURN):
            frames = peer.subscriber.receive()
            if frames is None:
                return peer.subscriber.is_copying
            peer.received_at = peer.quiet_since = self._clock()
            peer.beats = peer.beats or frames[0] == self._beats_on
            try:
                self._on_message(peer.endpoint, frames)
            except Exception as error:  # noqa: BLE001 - a bug must not stop the listening
                self._report(error)
            if self._clock() >= end or self._peers.get(peer.endpoint) is not peer:
                break
        return True

    # -- connections -------------------------------------------------------------------------------

    def renew_silent(self) -> None:
        """Reconnect peers whose connection is up but silent; call it often.

        A garbled length makes libzmq read all that follows as one message; a garbled subscription
        makes the sender send us nothing. Neither ends the connection, which still answers pings.
        Silence is a sign only for peers that send heartbeats: others may just have nothing to say,
        and reconnecting would lose what they say meanwhile.
        """
        now, silence_s = self._clock(), self._silence_s()
        asleep, self._looked_at = now - self._looked_at > ASLEEP_S, now
        for peer in self._peers.values():
            if asleep:
                peer.quiet_since = now
            is_silent = peer.beats and now - peer.quiet_since > silence_s
            if is_silent and peer.state is Link.CONNECTED:
                peer.quiet_since = now
                self.renewed += 1
                _log.warning("replica %s: connected and silent, connecting anew", peer.endpoint)
                peer.subscriber.connect_again()

    def _follow_link(self, peer: _Peer) -> None:
        """Track the state of a connection; reconnect where libzmq does not."""
        for link in peer.subscriber.news():
            peer.state = link
            if peer.follower is not None:
                (peer.follower.connected if link is Link.CONNECTED else peer.follower.lost)()
            if peer.reconnect is not None:
                peer.reconnect.cancel()
                peer.reconnect = None
            if link is Link.CONNECTED:
                peer.backoff.holds(self._clock())
            elif link is Link.BROKEN:
                peer.backoff.broke(self._clock())
                self._reconnect_later(peer)

    def _reconnect_later(self, peer: _Peer) -> None:
        loop = asyncio.get_running_loop()
        peer.reconnect = loop.call_later(peer.backoff.next_s(), self._reconnect, peer)

    def _reconnect(self, peer: _Peer) -> None:
        peer.subscriber.connect_again()
        self._reconnect_later(peer)  # until the state changes

    def _report(self, error: Exception) -> None:
        self.faults += 1
        asyncio.get_running_loop().call_exception_handler(
            {"message": "handling a replica's message failed", "exception": error}
        )
