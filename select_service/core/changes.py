"""Which parts of the state have changed and are not on disk yet: keys, oldest first.

Modules that own state mark a key when its state changes; `state.py` turns the key into its record
when `edge/state/journal.py` comes to write it. A key marked twice is written once, as it is then,
so the backlog is never larger than the state itself. Without a state directory there is no
instance, and marking costs a test for None.

Bookings that must be stored all or none are held back until they are complete, and written in one
commit.
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
END = "end"
"""By `key_of` an id: which claims of replicas on it are over; only with replicas."""
CLAIM = "claim"
"""By id: claims of replicas that our callers sent us and that have no booking of ours."""
LEASE_TERMS = "lease_terms"
"""By lease id: the time to live that our callers gave a lease of other replicas."""
CLOSING = "closing"
"""By lease id: closed at any replica."""
SESSION = "session"
"""By model, tenant and session id, as JSON: where the session is."""
RESERVATION = "reservation"
"""By reservation id, live or freed lately; also freed selection ids."""

WHOLE = "whole"
"""A group of bookings stored together; not a row, but something to wait for."""


class Hold:
    """Bookings made one after another, and announced only when all are made.

    If it `is_whole`, they must also be written to disk all or none.
    """

    __slots__ = ("is_open", "is_whole", "keys", "ordinal")

    def __init__(self, *, is_whole: bool) -> None:
        self.is_whole = is_whole
        self.is_open = True  # they may yet be taken back
        self.keys: dict[StateKey, None] = {}  # not yet on disk, if there is one
        self.ordinal = 0  # under which they are written


class Changes:
    """A queue of marked keys; every mark has an ordinal, so that callers can wait for it."""

    __slots__ = ("_standing", "_wholes", "durable", "fresh", "marked", "marks")

    def __init__(self) -> None:
        self.marked: OrderedDict[StateKey, int] = OrderedDict()  # → ordinal, ascending
        self.marks = 0  # the last ordinal given
        self.durable = 0  # up to this ordinal everything is on disk
        self.fresh: dict[str, int] = {}  # reservation ids booked here and not yet on disk
        self._wholes: dict[StateKey, Hold] = {}  # by each of their keys
        self._standing: dict[int, Hold] = {}  # by ordinal: released, and not yet on disk

    def mark(self, kind: str, name: str) -> int:
        """Note a change; return the ordinal under which it will be written."""
        key = (kind, name)
        if self._wholes:
            hold = self._wholes.get(key)
            if hold is not None and hold.is_open:
                return self.marks  # it will be written once the group is complete
        ordinal = self.marked.get(key)
        if ordinal is None:
            self.marks = ordinal = self.marks + 1
            self.marked[key] = ordinal
        return ordinal

    def booked(self, reservation_id: str, hold: Hold | None = None) -> None:
        """Note a new booking; it must not be relied on before it is written."""
        key = (RESERVATION, reservation_id)
        if self._wholes:
            self._part(key)  # it no longer belongs to a batch that is being written
        if hold is not None and hold.is_whole:
            hold.keys[key] = None
            self._wholes[key] = hold
        else:
            self.fresh[reservation_id] = self.mark(*key)

    def ended(self, reservation_id: str) -> None:
        """Note the end of a booking; it no longer belongs to a batch in progress.

        A later booking of the id is another booking, durable by itself. And an ended booking is not
        taken back, because its id may have been booked again by then.
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
        """Have what is left of a group written in one commit, as it is then. O(1)."""
        hold.is_open = False
        if hold.keys:
            whole = (WHOLE, str(self.marks + 1))
            hold.ordinal = self.mark(*whole)
            self._wholes[whole] = self._standing[hold.ordinal] = hold

    # -- for the writer ------------------------------------------------------------------------

    def take(
        self, rest: list[StateKey], flying: Container[StateKey]
    ) -> tuple[StateKey, int] | None:
        """Return the next key to be written, with its ordinal; None if there is none.

        Keys of a group are not taken while another write is in flight.

        `rest` are keys of the same commit, to be taken first, and filled here; `flying`
        ones have been taken and are not written yet.
        """
        while rest or self.marked:
            if rest:
                key = rest.pop()
                if key in flying:
                    continue
                ordinal = self.marked.pop(key, 0)
                hold = self._wholes.get(key)
                if hold is None and not ordinal:
                    continue  # it has left the group meanwhile, and was written since
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
        """Note that a key is on disk as it was when it was taken from the queue."""
        if self._wholes and key[0] != WHOLE:
            hold = self._wholes.get(key)
            # a key taken before the group was complete is on disk in its earlier state
            if hold is not None and not hold.is_open and ordinal >= hold.ordinal:
                self._part(key)
        if self.fresh and key[0] == RESERVATION and self.fresh.get(key[1]) == ordinal:
            del self.fresh[key[1]]

    def _forget_if_done(self, hold: Hold) -> None:
        if not hold.keys and not hold.is_open:
            self._standing.pop(hold.ordinal, None)
            self._wholes.pop((WHOLE, str(hold.ordinal)), None)

    def take_fresh(self) -> Iterator[str]:
        """Yield once each id booked and not yet on disk, including those booked meanwhile."""
        while self.fresh or self._standing:
            while self.fresh:
                yield self.fresh.popitem()[0]
            if self._standing:
                _, hold = self._standing.popitem()
                for _, name in list(hold.keys):
                    yield name

    def trust(self, answered: int) -> None:
        """Stop taking back bookings marked up to this ordinal: their clients may have the answer.

        O(what is not on disk); called when a disk begins to refuse.
        """
        self.fresh = {name: at for name, at in self.fresh.items() if at > answered}
        self._standing = {at: hold for at, hold in self._standing.items() if at > answered}
