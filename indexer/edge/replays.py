"""Asks for replays: a short-lived dealer for each stream that has missed something.

`listener.py` says when a stream wishes another replay, or none, and reads what comes.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from indexer.errors import EndpointRefused

if TYPE_CHECKING:
    from collections.abc import Callable

    from indexer.core.replay import ReplayRequest
    from indexer.edge.addresses import Addresses, Answer
    from indexer.edge.feed import Feed
    from indexer.edge.sockets import Sockets

__all__ = ["Replays"]


class Replays:
    """The dealers of all feeds; its length is how many are open."""

    def __init__(
        self, sockets: Sockets, addresses: Addresses, queue: Callable[[Feed], None]
    ) -> None:
        """Ask nobody yet.

        Args:
            sockets: opens dealers.
            addresses: where they may lead.
            queue: gives a feed its turn, which reads what its dealer has.
        """
        self._sockets = sockets
        self._addresses = addresses
        self._queue = queue
        self._open = 0

    def __len__(self) -> int:
        return self._open

    def sync(self, feed: Feed) -> None:
        """Open or close the dealer as the stream wishes; a new request gets a new socket."""
        self.close(feed)
        request = feed.request = feed.stream.request
        if request is None or feed.replay_endpoint is None:
            return
        try:
            place = self._addresses.place(feed.replay_endpoint)
        except EndpointRefused:  # its name leads elsewhere by now: taken for a mute endpoint
            return
        if place is None:
            self._addresses.find(
                feed.replay_endpoint, lambda found: self._ask_there(feed, request, found)
            )
        else:
            self._ask_there(feed, request, place)

    def watch(self, feed: Feed) -> None:
        """Have the loop tell when the dealer has something to read."""
        if feed.dealer is not None:
            asyncio.get_running_loop().add_reader(feed.dealer.fd, self._on_reply, feed)

    def close(self, feed: Feed) -> None:
        """Close the dealer, if there is one, and let go of its request. Idempotent."""
        feed.request = None
        if feed.dealer is not None:
            asyncio.get_running_loop().remove_reader(feed.dealer.fd)
            feed.dealer.close()
            feed.dealer = None
            self._open -= 1

    def _ask_there(self, feed: Feed, request: ReplayRequest, place: Answer) -> None:
        if not isinstance(place, str) or feed.request is not request or feed.dealer is not None:
            return  # it leads nowhere, as above, or nobody wants to know any more
        try:
            feed.dealer = self._sockets.ask_replay(place, request.start, feed.server_key)
        except EndpointRefused:  # no descriptors left: the same
            return
        self._open += 1
        self.watch(feed)
        self._queue(feed)

    def _on_reply(self, feed: Feed) -> None:
        if feed.is_held and feed.dealer is not None:
            # the descriptor stays readable until the socket is read: the loop would not rest
            asyncio.get_running_loop().remove_reader(feed.dealer.fd)
        else:
            self._queue(feed)
