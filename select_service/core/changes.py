"""Which parts of the state have changed and are not on disk yet: keys, oldest first.

Rooms that own state mark a key when what belongs to it changes; `state.py` turns the key into its
record when somebody (`edge/state/journal.py`) comes to write it. A key marked twice is written
once, as it is then, so a backlog never holds more than there is state. Without a state directory
nobody makes one of these, and marking costs a test for None.

What is to stand whole or not at all is held back until it is whole, and written in one commit.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

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

WHOLE = "whole"
"""Bookings that stand together; no row, but one can wait for it."""


class Hold:
    """Bookings that are made one after another, and of which nobody is told before all are made.

    Args:
        is_whole: they go to disk together, too, or not at all.
    """

    __slots__ = ("is_open", "is_whole", "keys", "ordinal")

    def __init__(self, *, is_whole: bool) -> None:
        self.is_whole = is_whole
        self.is_open = True  # they may yet be taken back
        self.keys: dict[StateKey, None] = {}  # not yet on disk, where there is one
        self.ordinal = 0  # under which they are written


class Changes:
    """A queue of marked keys; every mark has an ordinal, so that one can wait for it."""

    __slots__ = ("_standing", "_wholes", "fresh", "marked", "marks")

    def __init__(self) -> None:
        self.marked: OrderedDict[StateKey, int] = OrderedDict()  # → ordinal, ascending
        self.marks = 0  # the last ordinal given
        self.fresh: dict[str, int] = {}  # reservation ids booked here and not yet on disk
        self._wholes: dict[StateKey, Hold] = {}  # by each of their keys
        self._standing: dict[int, Hold] = {}  # by ordinal: released, and not yet on disk

    def mark(self, kind: str, name: str) -> int:
        """Note a change; returns the ordinal under which it will be written."""
        key = (kind, name)
        if self._wholes:
            hold = self._wholes.get(key)
            if hold is not None and hold.is_open:
                return self.marks  # it will be written as it is when all of it is there
        ordinal = self.marked.get(key)
        if ordinal is None:
            self.marks = ordinal = self.marks + 1
            self.marked[key] = ordinal
        return ordinal

    def booked(self, reservation_id: str, hold: Hold | None = None) -> None:
        """Note a new booking: nobody may rely on it before it has been written."""
        key = (RESERVATION, reservation_id)
        if self._wholes:
            self._part(key)  # of a wave that is being written it is no more
        if hold is not None and hold.is_whole:
            hold.keys[key] = None
            self._wholes[key] = hold
        else:
            self.fresh[reservation_id] = self.mark(*key)

    def ended(self, reservation_id: str) -> None:
        """Note the end of a booking; one of a wave that is under way is none of it any more.

        Whoever books the id from now on is told of another booking, which is durable by itself.
        And what has ended is not taken back: a booking of its id may stand by then.
        """
        self.fresh.pop(reservation_id, None)
        if self._wholes:
            hold = self._wholes.get((RESERVATION, reservation_id))
            if hold is not None and hold.is_open:
                self._part((RESERVATION, reservation_id))
        self.mark(RESERVATION, reservation_id)

    def _part(self, key: StateKey) -> None:
        hold = self._wholes.pop(key, None)
        if hold is not None:
            del hold.keys[key]
            self._forget_if_done(hold)

    def release(self, hold: Hold) -> None:
        """Have all that is left of it written in one commit, as it is then. O(1)."""
        hold.is_open = False
        if hold.keys:
            whole = (WHOLE, str(self.marks + 1))
            hold.ordinal = self.mark(*whole)
            self._wholes[whole] = self._standing[hold.ordinal] = hold

    # -- for who writes ------------------------------------------------------------------------

    def take(
        self, rest: list[StateKey], flying: Container[StateKey]
    ) -> tuple[StateKey, int] | None:
        """Return the next key to be written, with its ordinal; None: there is none.

        Keys of a commit are not taken while another is on its way.

        Args:
            rest: keys of the same commit that come first; filled here.
            flying: keys that have been taken and are not written yet.
        """
        while rest or self.marked:
            if rest:
                key = rest.pop()
                if key in flying:
                    continue
                ordinal = self.marked.pop(key, 0)
                hold = self._wholes.get(key)
                if hold is None and not ordinal:
                    continue  # it has left meanwhile, and was written since
            else:
                key, ordinal = self.marked.popitem(last=False)
                hold = self._wholes.get(key)
                if hold is not None and not hold.is_open:
                    rest.append((WHOLE, str(hold.ordinal)))  # the last of them
                    rest.extend(reversed(hold.keys))
            is_whole = hold is not None and not hold.is_open
            return key, max(ordinal, hold.ordinal) if is_whole and hold is not None else ordinal
        return None

    def written(self, key: StateKey, ordinal: int) -> None:
        """A key is on disk as it was when it was taken from the queue."""
        if self._wholes and key[0] != WHOLE:
            hold = self._wholes.get(key)
            # one taken before the whole of it was there is on disk as it was before
            if hold is not None and not hold.is_open and ordinal >= hold.ordinal:
                self._part(key)
        if self.fresh and key[0] == RESERVATION and self.fresh.get(key[1]) == ordinal:
            del self.fresh[key[1]]

    def _forget_if_done(self, hold: Hold) -> None:
        if not hold.keys and not hold.is_open:
            self._standing.pop(hold.ordinal, None)
            self._wholes.pop((WHOLE, str(hold.ordinal)), None)

    def take_fresh(self) -> Iterator[str]:
        """Yield the ids booked and not yet on disk, those too that are booked meanwhile; once."""
        while self.fresh or self._standing:
            while self.fresh:
                yield self.fresh.popitem()[0]
            if self._standing:
                _, hold = self._standing.popitem()
                for _, name in list(hold.keys):
                    yield name

    def trust(self, told: int) -> None:
        """Take nothing back that was marked up to this ordinal: who booked it may have been told.

        O(what is not on disk); done when a disk begins to refuse.
        """
        self.fresh = {name: at for name, at in self.fresh.items() if at > told}
        self._standing = {at: hold for at, hold in self._standing.items() if at > told}
