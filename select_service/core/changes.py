"""Which parts of the state have changed and are not on disk yet: keys, oldest first.

Rooms that own state mark a key when what belongs to it changes; `state.py` turns the key into its
record when somebody (`edge/journal.py`) comes to write it. A key marked twice is written once, as
it is then, so a backlog never holds more than there is state. Without a state directory nobody
makes one of these, and marking costs a test for None.
"""

from __future__ import annotations

from collections import OrderedDict
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


class Changes:
    """A queue of marked keys; every mark has an ordinal, so that one can wait for it."""

    __slots__ = ("fresh", "marked", "marks")

    def __init__(self) -> None:
        self.marked: OrderedDict[StateKey, int] = OrderedDict()  # → ordinal, ascending
        self.marks = 0  # the last ordinal given
        self.fresh: dict[str, int] = {}  # reservation ids booked here and not yet on disk

    def mark(self, kind: str, name: str) -> int:
        """Note a change; returns the ordinal under which it will be written."""
        key = (kind, name)
        ordinal = self.marked.get(key)
        if ordinal is None:
            self.marks = ordinal = self.marks + 1
            self.marked[key] = ordinal
        return ordinal

    def booked(self, reservation_id: str) -> None:
        """Note a new booking: nobody may rely on it before it has been written."""
        self.fresh[reservation_id] = self.mark(RESERVATION, reservation_id)

    def written(self, key: StateKey, ordinal: int) -> None:
        """A key is on disk as it was when it was taken from the queue."""
        if self.fresh and key[0] == RESERVATION and self.fresh.get(key[1]) == ordinal:
            del self.fresh[key[1]]
