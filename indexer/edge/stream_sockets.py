"""One stream and its sockets, as far as they are connected.

Plain state of `listener.py`, which reads the sockets and gives each feed its turn.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from indexer.edge.backoff import Backoff
from indexer.edge.sockets import Link
from indexer.types import LinkState

if TYPE_CHECKING:
    from indexer.core.replay import ReplayRequest
    from indexer.core.stream import EventStream
    from indexer.edge.endpoint_follower import EndpointFollower
    from indexer.edge.receiver import Receiver
    from indexer.edge.sockets import Subscriber

RECONNECT_AFTER_S: Final = 1.0
RECONNECT_AFTER_MAX_S: Final = 30.0
"""Waits before a connection that libzmq has given up is made anew; they double up to the
maximum."""


class StreamSockets:
    """One stream and its sockets."""

    def __init__(
        self,
        stream: EventStream,
        subscriber: Subscriber,
        replay_endpoint: str | None,
        now: float,
        server_key: str | None = None,
    ) -> None:
        self.stream = stream
        self.subscriber = subscriber
        self.replay_endpoint = replay_endpoint
        self.mute_replay_place: str | None = None  # where the last replay was asked for in vain
        self.server_key = server_key
        self.inbox: deque[list[bytes]] = deque()  # read but not yet taken
        self.follower: EndpointFollower | None = None  # only if the endpoint contains a name
        self.dealer: Receiver | None = None
        self.request: ReplayRequest | None = None  # the one `dealer` was opened for
        self.is_queued = False
        self.is_watched = False
        self.vain_looks = 0  # consecutive ones
        self.is_held = False
        self.is_connected = False
        self.is_faulty = False  # its sockets failed; the next tick tries again
        self.was_connected = False
        self.has_broken = False  # a connection that was up, and nothing has been told of it since
        self.changed_at = now  # time of the last connect or disconnect
        self.connections = 0
        self.load_reports = 0
        self.reconnect_at: float | None = None
        self.backoff = Backoff(RECONNECT_AFTER_S, RECONNECT_AFTER_MAX_S)

    def link(self, now: float) -> LinkState:
        """Return the state of the connection to the stream's publisher."""
        since = now if self.is_held else self.changed_at  # nothing was heard meanwhile
        return LinkState(
            self.is_connected,
            since,
            self.connections,
            self.load_reports,
            is_refused=self.subscriber.is_refused,
        )

    def follow(self, link: Link, now: float) -> None:
        """Handle a change of the connection; schedule a reconnect where libzmq will not retry.

        libzmq says right behind a loss that it retries, and its events keep their order, because a
        socket has one thread of libzmq (`sockets`). So a connection is known to have been given up
        once the event that follows is of another attempt, which is ours; how late that is, on a
        busy machine, says nothing.
        """
        if self.has_broken and link in {Link.CONNECTED, Link.CONNECTING}:
            self.stream.on_breach()
        self.has_broken = link is Link.BROKEN and (self.is_connected or self.has_broken)
        if self.is_connected is not (link is Link.CONNECTED):
            self.is_connected, self.changed_at = not self.is_connected, now
            self.stream.unreachable_since = None if self.is_connected else now
            self.connections += self.is_connected
        if self.follower is not None:
            (self.follower.connected if self.is_connected else self.follower.lost)()
        if link is Link.BROKEN:
            self.backoff.broke(now)
            self.reconnect_at = now + self.backoff.next_s()
            return
        self.reconnect_at = None
        if link is Link.CONNECTED:
            if self.was_connected:
                self.stream.on_reconnect(now)
            else:
                self.stream.on_connect()
            self.was_connected = True
            self.backoff.holds(now)

    def connect_again(self, now: float) -> None:
        """Reconnect, and schedule the next attempt."""
        self.reconnect_at = now + self.backoff.next_s()
        self.subscriber.connect_again()
