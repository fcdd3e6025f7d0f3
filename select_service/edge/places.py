"""Streams that have an end before their end: how many of a kind are under way, and what cuts one.

A place is taken when a stream is asked for, not when its first piece is: many may be asked for in
one turn of the loop. `dumping.py` and `replicas/plane.py` count theirs here.
"""

from __future__ import annotations

__all__ = ["Place", "Places", "StreamCut"]


class StreamCut(Exception):
    """A stream is not gone on with, for a reason that was counted; the client sees no end of it."""


class Places:
    """Attributes: `taken`, how many are."""

    __slots__ = ("taken",)

    def __init__(self) -> None:
        self.taken = 0

    def take(self) -> Place:
        """Take one; who asks has looked whether there is one left."""
        return Place(self)


class Place:
    """Left at the end of its stream, or with a stream that nobody has begun to read."""

    __slots__ = ("_places",)

    def __init__(self, places: Places) -> None:
        self._places: Places | None = places
        places.taken += 1

    def leave(self) -> None:
        """Let somebody else in. Idempotent."""
        if self._places is not None:
            self._places.taken -= 1
            self._places = None

    __del__ = leave  # HEAD asks for no pieces
