"""Reservations that ended by silence, and which of them turned out to be alive.

A call for a reservation that has ended by silence proves that its request outlived its time to
live: its load was removed while it ran, and its worker was given more. Callers that never free
leave no such proof. It works beside `bookings.py`, which answers such calls like those for any
ended id.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from select_service.core.books.bookings import key_of

if TYPE_CHECKING:
    from select_service.core.books.reservation import Reservation

LAPSED_MAX: Final = 4096
"""Names remembered, newest first: enough to detect the problem, not to count every case."""


class Lapsed:
    """Names of reservations that ended by silence, until they are called once more."""

    __slots__ = ("_names",)

    def __init__(self) -> None:
        self._names: dict[str, tuple[str, ...]] = {}  # name → all its names, oldest first

    def note(self, reservation: Reservation) -> None:
        """Note a reservation that was silent for its time to live, or that of its lease."""
        given = reservation.reservation_id, reservation.selection_id, reservation.pair
        names = tuple({key_of(name): None for name in given if name is not None})
        for name in names:
            self._names.pop(name, None)
            self._names[name] = names
        while len(self._names) > LAPSED_MAX:
            del self._names[next(iter(self._names))]

    def hear(self, name: str) -> bool:
        """Tell whether a call is the first one for a reservation that has ended by silence."""
        if not self._names:  # the usual case
            return False
        names = self._names.get(key_of(name))
        if names is None:
            return False
        for one in names:
            self._names.pop(one, None)
        return True

    def __len__(self) -> int:
        return len(self._names)
