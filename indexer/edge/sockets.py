"""The only file that opens ZMQ sockets, and sets all their limits.

There are three kinds: a subscriber to an engine's events, a dealer for one replay, a publisher for
the service's own events. All are non-blocking; their file descriptors are edge-triggered, so a
socket must be read until it is empty before waiting for it again. `listener` and `replays` read
them, the replica plane of the service publishes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections import Counter
from enum import Enum
from itertools import cycle
from typing import TYPE_CHECKING, Final

import zmq

from indexer.edge.curve import KeyPair
from indexer.edge.descriptors import descriptors_end
from indexer.edge.receiver import Receiver
from indexer.errors import EndpointRefused, NoDescriptorLeft

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from indexer.edge.curve import ReplicaKeys
    from indexer.types import StreamLimits

SOCKETS_MAX: Final = 65_535
"""libzmq's own bound; its default of 1,023 is fewer than a large fleet has workers."""

IO_THREADS: Final = 2
"""libzmq threads for all sockets together; one can resolve names while the other moves bytes. Each
socket has one of them, in turn: two would tell of its connection in no certain order."""

RECONNECT_MS: Final = 100
RECONNECT_MAX_MS: Final = 5_000
"""Waits between attempts to reach an engine that is down, growing from the first to the second."""

HEARTBEAT_MS: Final = 10_000
HEARTBEAT_TIMEOUT_MS: Final = 30_000
"""A peer that vanished silently (a pulled cable) is noticed after this timeout."""

KEEPALIVE_IDLE_S: Final = 60
REPLAY_MESSAGES_MAX: Final = 200_000
"""Replies queued for us; engines before vLLM 0.33 lose what exceeds their own 1,000 anyway."""

PUBLISHED_MESSAGES_MAX: Final = 10_000
"""Messages queued per slow subscriber of ours before it loses some."""

SUBSCRIPTION_BYTES_MAX: Final = 4_096
"""Longest message a subscriber may send us: the name of a topic."""

_ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"  # where libzmq looks for the authenticator
_ZAP_VERSION: Final = b"1.0"
_ZAP_DOMAIN: Final = b"replicas"  # without a domain libzmq would not ask
_ZAP_FRAMES: Final = 7

_NO_SUCH_FAMILY: Final = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.ENODEV})
_DELIMITER: Final = b""
_CONNECTED: Final = frozenset({zmq.EVENT_HANDSHAKE_SUCCEEDED})
_REFUSED: Final = {
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "silent",  # hung up without a word: a key it cannot read
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "protocol",  # one side encrypts, or is not ZMQ at all
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "key",  # our key is not on its list
}
_BROKEN: Final = frozenset({zmq.EVENT_DISCONNECTED, *_REFUSED})
_CONNECTING: Final = frozenset({zmq.EVENT_CONNECT_DELAYED, zmq.EVENT_CLOSED})
_RETRYING: Final = frozenset({zmq.EVENT_CONNECT_RETRIED})
_WATCHED: Final = sum(_CONNECTED | _BROKEN | _CONNECTING | _RETRYING)


class Link(Enum):
    """What happened to a subscriber's connection."""

    CONNECTED = "connected"
    BROKEN = "broken"  # and libzmq may or may not try again
    RETRYING = "retrying"  # libzmq will try again by itself
    CONNECTING = "connecting"  # an attempt began or failed


class Subscriber(Receiver):
    """A subscriber and the events of its connection.

    libzmq reconnects after a lost connection, but never after a breach of protocol (a message
    beyond the limit, an HTTP server on the port while the engine restarts). Without the connection
    events such a subscriber would stay deaf.

    Attributes:
        is_refused: Whether a peer is there but rejected our last handshake.
    """

    __slots__ = ("_endpoint", "_failures", "_monitor", "is_refused", "news_fd")

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        endpoint: str | None,
        longest: int,
        failures: Counter[str] | None = None,
    ) -> None:
        super().__init__(socket, longest)
        self.is_refused = False
        self._failures = Counter() if failures is None else failures  # failed handshakes by cause
        self._endpoint = endpoint  # None: not connected yet
        self._monitor: zmq.Socket[bytes] = socket.get_monitor_socket(_WATCHED)
        self.news_fd: int = self._monitor.getsockopt(zmq.FD)  # type: ignore[assignment]

    def news(self) -> Iterator[Link]:
        """Yield what has happened to the connection since the last call."""
        while True:
            try:
                frames = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                return
            event = zmq.Event(int.from_bytes(frames[0][:2], sys.byteorder))
            if event in _REFUSED:
                self.is_refused = True
                self._failures[_REFUSED[event]] += 1
            elif event in _CONNECTED or event == zmq.EVENT_CLOSED:  # the latter: no peer is there
                self.is_refused = False
            if event in _CONNECTED:
                yield Link.CONNECTED
            elif event in _BROKEN:
                yield Link.BROKEN
            else:
                yield Link.RETRYING if event in _RETRYING else Link.CONNECTING

    def connect_again(self) -> None:
        """Replace the connection by a new one."""
        self.move_to(self._endpoint)

    def use_keys(self, keys: KeyPair) -> None:
        """Use a new identity from the next connection on; the current one continues."""
        if self._socket.getsockopt(zmq.MECHANISM) == zmq.CURVE:
            _set_keys(self._socket, keys)

    def move_to(self, endpoint: str | None) -> None:
        """Replace the connection by one to another endpoint, or by none."""
        if self._endpoint is not None:
            with contextlib.suppress(zmq.ZMQError):  # libzmq may have given it up already
                self._socket.disconnect(self._endpoint)
        self._endpoint = endpoint
        if endpoint is not None:
            with contextlib.suppress(zmq.ZMQError):  # out of file descriptors: next time then
                self._socket.setsockopt(zmq.IPV6, int("[" in endpoint))
                self._socket.connect(endpoint)

    def close(self) -> None:
        """Close both sockets and drop what was not read."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        super().close()


class KeyCheck:
    """Answers libzmq's questions about clients of an encrypted socket (ZAP): is this key listed?

    libzmq asks from its own thread; only the handshake waits until the loop has answered.

    Attributes:
        accepted: Handshakes of clients with a listed key.
        refused: Handshakes of other clients.
    """

    __slots__ = ("_keys", "_socket", "accepted", "fd", "refused")

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: ReplicaKeys) -> None:
        """Answer for all sockets of a context; must exist before the first one is bound."""
        self._keys = keys
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ZAP_ENDPOINT)
        self.fd: int = self._socket.getsockopt(zmq.FD)  # type: ignore[assignment]
        self.accepted = 0
        self.refused = 0

    def answer(self, limit: int) -> bool:
        """Answer some of the questions; True: there may be more."""
        for _ in range(limit):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                return False
            self._socket.send_multipart(self._verdict(frames), zmq.NOBLOCK)
        return True

    def _verdict(self, frames: list[bytes]) -> list[bytes]:
        number = frames[1] if len(frames) > 1 else b""
        # version, number, domain, address, identity, mechanism, and for CURVE the public key
        listed = (
            len(frames) == _ZAP_FRAMES and frames[5] == b"CURVE" and frames[6] in self._keys.allowed
        )
        if listed:
            self.accepted += 1
            return [_ZAP_VERSION, number, b"200", b"OK", b"", b""]
        self.refused += 1
        return [_ZAP_VERSION, number, b"400", b"not listed", b"", b""]

    def close(self) -> None:
        """Stop answering."""
        self._socket.close(linger=0)


class Publisher:
    """A bound socket whose subscribers lose messages rather than slow us down."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        socket: zmq.Socket[bytes],
        key_check: KeyCheck | None = None,
    ) -> None:
        self._context = context
        self._socket = socket
        self.key_check = key_check
        """Only for an encrypted socket; the owner must call its `answer`."""

    def send(self, frames: Sequence[bytes]) -> bool:
        """Send one message; False if it could not even be queued."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        """Close; what is queued is dropped."""
        self._socket.close(linger=0)
        if self.key_check is not None:
            self.key_check.close()
        self._context.term()


class Sockets:
    """The receiving sockets of one process, in one libzmq context."""

    def __init__(
        self, limits: StreamLimits, keys: KeyPair | None = None, *, received: int = 1
    ) -> None:
        """Open nothing yet.

        Args:
            limits: of queues and messages.
            keys: our identity towards servers that ask for one; None: a new one on every start.
            received: messages up to this many times the longest are received, and only their heads
                returned; beyond it the connection is dropped.
        """
        self._limits = limits
        self._received = received
        self._keys = keys
        self.handshakes_failed: Counter[str] = Counter(dict.fromkeys(_REFUSED.values(), 0))
        """Of subscribers, by cause; libzmq makes few attempts a minute."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(IO_THREADS)
        self._threads = cycle(1 << thread for thread in range(IO_THREADS))  # masks for libzmq
        self._context.set(zmq.MAX_SOCKETS, SOCKETS_MAX)

    def use_keys(self, keys: KeyPair) -> None:
        """Use a new identity from the next socket on; open sockets must be updated separately."""
        self._keys = keys

    def subscribe(
        self,
        endpoint: str | None,
        topics: Sequence[bytes] = (b"",),
        server_key: str | None = None,
    ) -> Subscriber:
        """Connect to a publisher and subscribe to all its messages, or to some topics.

        Args:
            endpoint: where it publishes; must contain an address, because libzmq would resolve a
                name itself. None: not known yet, `Subscriber.move_to` connects later.
            topics: prefixes of its messages' first frame.
            server_key: the CURVE key it must have; None: unencrypted.

        Raises:
            EndpointRefused: libzmq will not connect there.
            NoDescriptorLeft: too many files are open.
        """
        socket = self._open(zmq.SUB, endpoint, self._limits.receive_messages_max, server_key)
        number: int = socket.getsockopt(zmq.FD)  # type: ignore[assignment]
        if number >= descriptors_end(self._limits.descriptors_kept // 2):
            socket.close(linger=0)
            raise NoDescriptorLeft(endpoint or "", os.strerror(errno.EMFILE))
        for topic in topics:
            socket.setsockopt(zmq.SUBSCRIBE, topic)
        try:
            # before connecting, or early events are missed
            limit = self._limits.message_bytes_max
            subscriber = Subscriber(socket, endpoint, limit, self.handshakes_failed)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise _refused(endpoint or "", error) from error
        if endpoint is None:
            return subscriber
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            subscriber.close()
            raise _refused(endpoint, error) from error
        return subscriber

    def ask_replay(self, endpoint: str, start: int, server_key: str | None = None) -> Receiver:
        """Connect a fresh socket and ask for every batch from `start` on.

        Args:
            endpoint: of the engine's replay socket.
            start: the first sequence number wanted.
            server_key: as for `subscribe`.

        Raises:
            EndpointRefused: libzmq will not connect there.
        """
        socket = self._open(zmq.DEALER, endpoint, REPLAY_MESSAGES_MAX, server_key)
        try:
            socket.connect(endpoint)
            # the empty frame first: without it engines do not answer
            socket.send_multipart([_DELIMITER, start.to_bytes(8, "big")], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise _refused(endpoint, error) from error
        return Receiver(socket, self._limits.message_bytes_max)

    def try_connect(self, endpoint: str) -> None:
        """Test whether libzmq would connect there; nothing is sent.

        Raises:
            EndpointRefused: it would not.
        """
        socket = self._open(zmq.DEALER, endpoint, 1)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise _refused(endpoint, error) from error
        finally:
            socket.close(linger=0)

    def close(self) -> None:
        """Close the context; every socket must be closed before."""
        self._context.term()

    def _open(
        self, kind: int, endpoint: str | None, messages_max: int, server_key: str | None = None
    ) -> zmq.Socket[bytes]:
        endpoint = endpoint or ""
        try:
            socket = self._context.socket(kind)
        except zmq.ZMQError as error:  # out of sockets or file descriptors
            raise _refused(endpoint, error) from error
        options = {
            zmq.LINGER: 0,
            zmq.AFFINITY: next(self._threads),
            zmq.RCVHWM: messages_max,
            zmq.MAXMSGSIZE: self._received * self._limits.message_bytes_max,
            zmq.RECONNECT_IVL: RECONNECT_MS,
            zmq.RECONNECT_IVL_MAX: RECONNECT_MAX_MS,
            zmq.HEARTBEAT_IVL: HEARTBEAT_MS,
            zmq.HEARTBEAT_TIMEOUT: HEARTBEAT_TIMEOUT_MS,
            zmq.TCP_KEEPALIVE: 1,
            zmq.TCP_KEEPALIVE_IDLE: KEEPALIVE_IDLE_S,
            zmq.IPV6: int("[" in endpoint),  # only where needed: names keep resolving to IPv4
        }
        for option, value in options.items():
            socket.setsockopt(option, value)
        if server_key is not None:
            keys = self._keys = self._keys or KeyPair.new()
            socket.setsockopt(zmq.CURVE_SERVERKEY, server_key.encode())
            _set_keys(socket, keys)
        return socket


def _refused(endpoint: str, error: zmq.ZMQError) -> EndpointRefused:
    kind = NoDescriptorLeft if error.errno in {errno.EMFILE, errno.ENFILE} else EndpointRefused
    return kind(endpoint, str(error))


def _set_keys(socket: zmq.Socket[bytes], keys: KeyPair) -> None:
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())


def open_publisher(
    endpoint: str,
    messages_max: int = PUBLISHED_MESSAGES_MAX,
    keys: ReplicaKeys | None = None,
) -> Publisher:
    """Bind a publisher.

    Args:
        endpoint: the address to bind.
        messages_max: queued per slow subscriber before it loses some.
        keys: encrypt with our own pair, and admit only listed keys.

    Raises:
        EndpointRefused: the address is taken or invalid.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.PUB)
    key_check: KeyCheck | None = None
    try:
        options = {
            zmq.LINGER: 0,
            zmq.SNDHWM: messages_max,
            zmq.MAXMSGSIZE: SUBSCRIPTION_BYTES_MAX,
            zmq.HEARTBEAT_IVL: HEARTBEAT_MS,  # a frozen subscriber must not be queued for
            zmq.HEARTBEAT_TIMEOUT: HEARTBEAT_TIMEOUT_MS,
        }
        for option, value in options.items():
            socket.setsockopt(option, value)
        if keys is not None:
            key_check = KeyCheck(context, keys)  # without one libzmq lets any key in
            socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, keys.own.secret.encode())
        bind(socket, endpoint)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        if key_check is not None:
            key_check.close()
        context.term()
        raise EndpointRefused(endpoint, str(error)) from error
    return Publisher(context, socket, key_check)


def bind(socket: zmq.Socket[bytes], endpoint: str) -> None:
    """Bind an endpoint; `tcp://*:port` is of both families, where the system has both.

    Raises:
        zmq.ZMQError: it is taken, or there is no such address.
    """
    address = endpoint.partition("://")[2]
    # an IPv4 address would otherwise be bound, and shown, as one of IPv6
    socket.setsockopt(zmq.IPV6, int(address.startswith(("*", "["))))
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        if error.errno not in _NO_SUCH_FAMILY or not address.startswith("*"):
            raise
        socket.setsockopt(zmq.IPV6, 0)
        socket.bind(endpoint)
