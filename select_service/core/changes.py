"""Which parts of the state have changed and are not on disk yet: keys, oldest first.

Rooms that own state mark a key when what belongs to it changes; `state.py` turns the key into its
record when somebody (`edge/journal.py`) comes to write it. A key marked twice is written once, as
it is then, so a backlog never holds more than there is state. Without a state directory nobody
makes one of these, and marking costs a test for None.

What is to stand whole or not at all is held back until it is whole, and written in one commit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

StateKey: TypeAlias = tuple[str, str]
"""(kind, name): one row on disk."""

WORKER = "worker"
LEASE = "lease"
PEER = "peer"
ADMISSION = "admission"
THRESHOLD = "threshold"
CONFIG = "config"
RESERVATION = "reservation"
"""By reservation id, live or freed lately; also freed selection ids."""

Hold: TypeAlias = dict[StateKey, None]
"""Bookings that are made one after another, and go to disk together."""


class Changes:
    """A queue of marked keys; every mark has an ordinal, so that one can wait for it."""

    __slots__ = ("_held", "_hold", "fresh", "marked", "marks", "together")

    def __init__(self) -> None:
        self.marked: OrderedDict[StateKey, int] = OrderedDict()  # → ordinal, ascending
        self.marks = 0  # the last ordinal given
        self.fresh: dict[str, int] = {}  # reservation ids booked here and not yet on disk
        self.together: dict[StateKey, tuple[StateKey, ...]] = {}  # keys of one commit, by each
        self._hold: Hold | None = None  # what is booked now belongs to it
        self._held: dict[StateKey, Hold] = {}

    def mark(self, kind: str, name: str) -> int:
        """Note a change; returns the ordinal under which it will be written."""
        key = (kind, name)
        if key in self._held:
            return self.marks  # it will be written as it is when all of it is there
        ordinal = self.marked.get(key)
        if ordinal is None:
            self.marks = ordinal = self.marks + 1
            self.marked[key] = ordinal
        return ordinal

    def booked(self, reservation_id: str) -> None:
        """Note a new booking: nobody may rely on it before it has been written."""
        if self._hold is not None:
            key = (RESERVATION, reservation_id)
            self._hold[key] = None
            self._held[key] = self._hold
            return
        self.fresh[reservation_id] = self.mark(RESERVATION, reservation_id)

    @contextmanager
    def holding(self, hold: Hold) -> Iterator[None]:
        """Hold back what is booked within; `release` lets it go."""
        self._hold = hold
        try:
            yield
        finally:
            self._hold = None

    def release(self, hold: Hold, *, stands: bool) -> None:
        """Have all of it written in one commit; unless it `stands`, it has been ended again."""
        for key in hold:
            del self._held[key]
            ordinal = self.mark(*key)
            if stands:
                self.fresh[key[1]] = ordinal
        if stands and len(hold) > 1:
            keys = tuple(hold)
            self.together.update(dict.fromkeys(keys, keys))
        hold.clear()

    def written(self, key: StateKey, ordinal: int) -> None:
        """A key is on disk as it was when it was taken from the queue."""
        if self.together:
            self.together.pop(key, None)
        if self.fresh and key[0] == RESERVATION and self.fresh.get(key[1]) == ordinal:
            del self.fresh[key[1]]
