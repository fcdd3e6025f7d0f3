"""Asks for replays: a short-lived dealer for each stream that has missed something.

`listener.py` reports when a stream wants a new replay, or none, and reads the replies.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from indexer.errors import EndpointRefused

if TYPE_CHECKING:
    from collections.abc import Callable

    from indexer.core.replay import ReplayRequest
    from indexer.edge.addresses import Addresses, Answer
    from indexer.edge.sockets import Sockets
    from indexer.edge.stream_sockets import StreamSockets


class Replays:
    """The dealers of all feeds; its length is the number of open ones."""

    def __init__(
        self, sockets: Sockets, addresses: Addresses, queue: Callable[[StreamSockets], None]
    ) -> None:
        """Ask none yet; `queue` gives a feed its turn, which reads its dealer."""
        self._sockets = sockets
        self._addresses = addresses
        self._queue = queue
        self._open = 0

    def __len__(self) -> int:
        return self._open

    def sync(self, feed: StreamSockets) -> None:
        """Open or close the dealer as the stream requests; a new request gets a new socket."""
        self.close(feed)
        request = feed.request = feed.stream.request
        if request is None or feed.replay_endpoint is None:
            return
        try:
            place = self._addresses.place(feed.replay_endpoint)
        except EndpointRefused:  # its name resolves elsewhere by now: treated as a mute endpoint
            return
        if place is None:
            self._addresses.find(
                feed.replay_endpoint,
                lambda found: self._ask_there(feed, request, found),
                last=feed.mute_replay_place,
            )
        else:
            self._ask_there(feed, request, place)

    def watch(self, feed: StreamSockets) -> None:
        """Have the loop report when the dealer is readable."""
        if feed.dealer is not None:
            asyncio.get_running_loop().add_reader(feed.dealer.fd, self._on_reply, feed)

    def close(self, feed: StreamSockets) -> None:
        """Close the dealer, if there is one, and drop its request. Idempotent."""
        feed.request = None
        if feed.dealer is not None:
            asyncio.get_running_loop().remove_reader(feed.dealer.fd)
            feed.dealer.close()
            feed.dealer = None
            self._open -= 1

    def _ask_there(self, feed: StreamSockets, request: ReplayRequest, place: Answer) -> None:
        if not isinstance(place, str) or feed.request is not request or feed.dealer is not None:
            return  # refused or not found, as above, or the request is obsolete
        try:
            feed.dealer = self._sockets.ask_replay(place, request.start, feed.server_key)
        except EndpointRefused:  # no descriptors left: the same
            return
        feed.mute_replay_place = place  # until it answers
        self._open += 1
        self.watch(feed)
        self._queue(feed)

    def _on_reply(self, feed: StreamSockets) -> None:
        if feed.is_held and feed.dealer is not None:
            # the descriptor stays readable until the socket is read: the loop would spin
            asyncio.get_running_loop().remove_reader(feed.dealer.fd)
        else:
            self._queue(feed)
