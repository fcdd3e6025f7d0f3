"""Counts concurrent streams of a kind, so that they can be limited; also the error that cuts one.

A place is taken when a stream is requested, not when its first piece is read: many may be requested
in one turn of the loop. `dumping.py` and `replicas/plane.py` use this.
"""

from __future__ import annotations

__all__ = ["Place", "Places", "StreamCut"]


class StreamCut(Exception):
    """A stream is cut short, for a reason already counted; the client sees it end incomplete."""


class Places:
    """The places of one kind of stream.

    Attributes:
        taken: how many are in use.
    """

    __slots__ = ("taken",)

    def __init__(self) -> None:
        self.taken = 0

    def take(self) -> Place:
        """Take one; the caller has checked that one is left."""
        return Place(self)


class Place:
    """One place; released when its stream ends, or is discarded unread."""

    __slots__ = ("_places",)

    def __init__(self, places: Places) -> None:
        self._places: Places | None = places
        places.taken += 1

    def leave(self) -> None:
        """Release the place. Idempotent."""
        if self._places is not None:
            self._places.taken -= 1
            self._places = None

    __del__ = leave  # for HEAD, which reads no pieces
