"""Counts concurrent streams of a kind, so that they can be limited; also the error that cuts one.

A place is taken when a stream is requested, not when its first piece is read: many may be requested
in one turn of the loop. `dump_stream.py` and `replication/plane.py` use this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class StreamCut(Exception):
    """A stream is cut short, for a reason already counted; the client sees it end incomplete."""


class StreamLimit:
    """The places of one kind of stream.

    Attributes:
        taken: how many are in use.
    """

    __slots__ = ("taken",)

    def __init__(self) -> None:
        self.taken = 0

    def take(self, released: Callable[[], None] | None = None) -> StreamSlot:
        """Take one, and have `released` called at its end; the caller has checked for room."""
        return StreamSlot(self, released)


class StreamSlot:
    """One place; released when its stream ends, or is discarded unread."""

    __slots__ = ("_places", "_released")

    def __init__(self, places: StreamLimit, released: Callable[[], None] | None = None) -> None:
        self._places: StreamLimit | None = places
        self._released = released
        places.taken += 1

    def leave(self) -> None:
        """Release the place. Idempotent."""
        if self._places is not None:
            self._places.taken -= 1
            self._places = None
            if self._released is not None:
                self._released()

    __del__ = leave  # for HEAD, which reads no pieces
