"""Which claims are over, who says so, and which claim took each one over.

What has ended has ended for good, so ends are remembered, for a while and in bounds: whatever else
is said of such a claim comes too late. Only `claims.py` writes here.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from select_service.core.bookings import key_of
from select_service.core.replica_messages import Ended

if TYPE_CHECKING:
    from collections.abc import Iterator

Key: TypeAlias = tuple[int, int]
"""(owner, born): names one claim for ever."""

ANCESTORS_MAX: Final = 8
"""Owners in a row that may go while a reservation lives on, each adopted by the next."""


class _End(NamedTuple):
    """That a claim is over, as we know it."""

    name: str  # the id it was on
    by_owner: bool  # its owner itself says so
    since: float  # when we first heard it
    noted: float  # when we last did
    heir: Key | None  # the claim that took it over
    freed: bool  # as somebody has freed the reservation


class Ends:
    """Ends by the name of the claim, oldest word first. All moves O(1).

    Attributes:
        lost: forgotten before their time, for their number.
    """

    def __init__(self, ends_max: int) -> None:
        self.lost = 0
        self._ends_max = ends_max
        self._ends: OrderedDict[Key, _End] = OrderedDict()
        self._on: dict[str, dict[int, int]] = {}  # `key_of` the id: each owner's last one

    def __len__(self) -> int:
        return len(self._ends)

    def __contains__(self, key: Key) -> bool:
        return key in self._ends

    def is_word_of_owner(self, key: Key) -> bool:
        """Tell whether its owner itself said so."""
        entry = self._ends.get(key)
        return entry is not None and entry.by_owner

    def was_freed(self, key: Key) -> bool:
        """Tell whether somebody freed the reservation: then all that took it over is over too."""
        entry = self._ends.get(key)
        return entry is not None and entry.freed

    def since(self, key: Key) -> float | None:
        """Return when that was heard first, None: it is not over, as far as we know."""
        entry = self._ends.get(key)
        return None if entry is None else entry.since

    def on(self, freed_key: str) -> list[Key]:
        """Return the names of the claims that ended on a freed id, the last of each owner."""
        return list(self._on.get(freed_key, {}).items())

    # -- heirs ---------------------------------------------------------------------------------

    def heir_of(self, key: Key) -> Key | None:
        """Return the claim that lives on in place of one that has ended; None: none we know of."""
        return None if key not in self._ends else self.living(key)

    def living(self, key: Key) -> Key | None:
        """Return that claim, or the last in the row of those that took it over one after another.

        None when that one is over too.
        """
        for _ in range(ANCESTORS_MAX):
            entry = self._ends.get(key)
            if entry is None:
                return key
            if entry.heir is None or entry.freed:
                return None
            key = entry.heir
        return None

    # -- words ---------------------------------------------------------------------------------

    def told(self, reservation_id: str, key: Key) -> Ended:
        """Put into words that a claim is over."""
        return Ended(reservation_id, *key, self.heir_of(key), self.was_freed(key))

    def retold(self) -> Iterator[Ended]:
        """Yield what is remembered now; it may change meanwhile."""
        for key, entry in list(self._ends.items()):
            yield self.told(entry.name, key)

    # -- changes -------------------------------------------------------------------------------

    def note(
        self,
        reservation_id: str,
        key: Key,
        now: float,
        *,
        by_owner: bool,
        heir: Key | None,
        freed: bool,
    ) -> None:
        """Remember an end, whether we ever heard of the claim or not."""
        before = self._ends.pop(key, None)
        if before is None:
            self._ends[key] = _End(reservation_id, by_owner, now, now, heir, freed)
            lasts = self._on.setdefault(key_of(reservation_id), {})
            lasts[key[0]] = max(key[1], lasts.get(key[0], 0))
        else:
            self._ends[key] = before._replace(
                by_owner=by_owner or before.by_owner,
                noted=now,
                heir=before.heir or heir,
                freed=freed or before.freed,
            )
        if len(self._ends) > self._ends_max:
            self._forget_oldest()
            self.lost += 1

    def purge(self, horizon: float, limit: int) -> None:
        """Forget up to `limit` of which nobody has spoken since then."""
        for _ in range(limit):
            if not self._ends or next(iter(self._ends.values())).noted > horizon:
                break
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        (owner, born), entry = self._ends.popitem(last=False)
        freed_key = key_of(entry.name)
        lasts = self._on.get(freed_key, {})
        if lasts.get(owner) == born:
            del lasts[owner]
            if not lasts:
                del self._on[freed_key]

    def check(self) -> None:
        """State every promise."""
        assert len(self._ends) <= self._ends_max
        for lasts in self._on.values():
            assert lasts
            assert self._ends.keys() >= set(lasts.items()), "of what is forgotten nothing is kept"
