"""Leads a subscriber to where the name in its endpoint leads, and there only if it may.

A connection that stands is left alone. One that is lost is libzmq's to make again, at the address
it had; meanwhile the name is asked for anew, for the engine may have moved, and whoever owns the
name may have turned it elsewhere.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from indexer.edge.patience import Patience
from indexer.errors import EndpointRefused

if TYPE_CHECKING:
    from collections.abc import Callable

    from indexer.edge.addresses import Addresses, Answer
    from indexer.edge.sockets import Subscriber

ASK_AFTER_S: Final = 1.0
ASK_AFTER_MAX_S: Final = 30.0
"""Waits before a name is asked for again, doubled up to the second while it leads nowhere."""


class Guide:
    """Follows one name for one subscriber; lives on the loop it is used from."""

    __slots__ = (
        "_addresses",
        "_endpoint",
        "_is_asking",
        "_is_closed",
        "_moved",
        "_patience",
        "_place",
        "_refused",
        "_subscriber",
        "_timer",
        "_was_placed",
    )

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
        """Ask where the endpoint leads, unless that is known.

        Args:
            addresses: resolves and judges.
            endpoint: with a name in it.
            subscriber: to be led.
            place: what it is connected to; None: to nothing yet.
            moved: called when it was connected somewhere.
            refused: called when the name leads where it must not before it ever led anywhere.
                Later it is left unconnected until the name leads somewhere else.
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
        self._timer: asyncio.TimerHandle | None = None
        self._patience = Patience(ASK_AFTER_S, ASK_AFTER_MAX_S)
        if place is None:
            self._ask()

    def connected(self) -> None:
        """The connection stands."""
        self._patience.begin_anew()
        self._stop_timer()

    def lost(self) -> None:
        """It does not, or no more."""
        if not (self._is_asking or self._is_closed) and self._timer is None:
            self._ask_later()

    def close(self) -> None:
        """Follow the name no longer. Idempotent."""
        self._is_closed = True
        self._stop_timer()

    def _ask(self) -> None:
        self._timer = None
        self._is_asking = True
        self._addresses.find(self._endpoint, self._hear)

    def _ask_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._patience.next_s(), self._ask)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _hear(self, answer: Answer) -> None:
        self._is_asking = False
        if self._is_closed:
            return
        if isinstance(answer, str):
            self._was_placed = True
            self._move_to(answer)
            return
        if isinstance(answer, EndpointRefused):
            self._move_to(None)
            if not self._was_placed:
                self._refused(answer)
        if not self._is_closed:  # whoever was told may have closed us
            self._ask_later()

    def _move_to(self, place: str | None) -> None:
        if place != self._place:
            self._place = place
            self._subscriber.move_to(place)
            self._moved()
