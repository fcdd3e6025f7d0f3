"""Reservations that ended because nobody spoke of them, and which of them were alive after all.

A call for one that has ended by silence is the proof that its request outlived its time to live:
its load went while it ran, and its worker was given more. Callers that never free leave no such
proof. Stands beside `bookings.py`, which answers such calls as it does those for any ended id.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from select_service.core.books.bookings import key_of

if TYPE_CHECKING:
    from select_service.core.books.reservation import Reservation

LAPSED_MAX: Final = 4096
"""Names remembered, the last ones: enough to tell, and not meant to count every one."""


class Lapsed:
    """Names of reservations that ended by silence, until they are called once more."""

    __slots__ = ("_names",)

    def __init__(self) -> None:
        self._names: dict[str, tuple[str, ...]] = {}  # to all of the reservation, oldest first

    def note(self, reservation: Reservation) -> None:
        """Nobody spoke of it for its time to live, or for that of its lease."""
        given = reservation.reservation_id, reservation.selection_id, reservation.pair
        names = tuple({key_of(name): None for name in given if name is not None})
        for name in names:
            self._names.pop(name, None)
            self._names[name] = names
        while len(self._names) > LAPSED_MAX:
            del self._names[next(iter(self._names))]

    def hear(self, name: str) -> bool:
        """Tell whether a call is the first one for a reservation that has ended by silence."""
        if not self._names:  # as a rule
            return False
        names = self._names.get(key_of(name))
        if names is None:
            return False
        for one in names:
            self._names.pop(one, None)
        return True

    def __len__(self) -> int:
        return len(self._names)
