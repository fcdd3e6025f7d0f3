"""Keeps a subscriber connected to an allowed address that its endpoint's name resolves to.

An established connection is left alone. A lost one is retried by libzmq at its old address;
meanwhile the name is looked up again, because the engine may have moved, or the owner of the name
may have pointed it elsewhere, and its other addresses are tried first. `listener` and the service's
replica plane create one per endpoint with a name; `addresses` resolves, judges and tries.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from indexer.edge.backoff import Backoff
from indexer.errors import EndpointRefused

if TYPE_CHECKING:
    from collections.abc import Callable

    from indexer.edge.addresses import Addresses, Answer
    from indexer.edge.sockets import Subscriber

ASK_AFTER_S: Final = 1.0
ASK_AFTER_MAX_S: Final = 30.0
"""Waits before a failed lookup is repeated; they double up to the maximum."""


class EndpointFollower:
    """Follows one name for one subscriber; lives on the event loop it is used from."""

    def __init__(
        self,
        addresses: Addresses,
        endpoint: str,
        subscriber: Subscriber,
        place: str | None,
        *,
        moved: Callable[[], None],
        refused: Callable[[EndpointRefused], None],
    ) -> None:
        """Look up the endpoint's name, unless its place is known.

        Args:
            addresses: resolves and judges.
            endpoint: contains a name.
            subscriber: the one to connect.
            place: the endpoint it is connected to; None: not connected yet.
            moved: called after it was connected somewhere.
            refused: called if the name's first result must not be connected to. Later refusals
                leave the subscriber unconnected until the name resolves to something else.
        """
        self._addresses = addresses
        self._endpoint = endpoint
        self._subscriber = subscriber
        self._moved = moved
        self._refused = refused
        self._place = place
        self._was_placed = place is not None
        self._is_asking = False
        self._is_closed = False
        self._is_connected = False
        self._timer: asyncio.TimerHandle | None = None
        self._backoff = Backoff(ASK_AFTER_S, ASK_AFTER_MAX_S)
        if place is None:
            self._ask()

    def connected(self) -> None:
        """Note that the connection is established."""
        self._is_connected = True
        self._backoff.begin_anew()
        self._stop_timer()

    def lost(self) -> None:
        """Note that the connection is lost, or was never made."""
        self._is_connected = False
        if not (self._is_asking or self._is_closed) and self._timer is None:
            self._ask_later()

    def close(self) -> None:
        """Stop following the name. Idempotent."""
        self._is_closed = True
        self._stop_timer()

    def _ask(self) -> None:
        self._timer = None
        self._is_asking = True
        self._addresses.find(self._endpoint, self._hear, last=self._place)

    def _ask_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._backoff.next_s(), self._ask)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _hear(self, answer: Answer) -> None:
        self._is_asking = False
        if self._is_closed or self._is_connected:  # the connection came meanwhile
            return
        if isinstance(answer, str):
            self._was_placed = True
            self._move_to(answer)
            return
        if isinstance(answer, EndpointRefused):
            self._move_to(None)
            if not self._was_placed:
                self._refused(answer)
        if not self._is_closed:  # the callback may have closed us
            self._ask_later()

    def _move_to(self, place: str | None) -> None:
        if place != self._place:
            self._place = place
            self._subscriber.move_to(place)
            self._moved()
