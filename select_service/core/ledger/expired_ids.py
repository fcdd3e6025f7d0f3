"""Reservations that ended by silence, and which of them turned out to be alive.

A call for a reservation that has ended by silence proves that its request outlived its time to
live: its load was removed while it ran, and its worker was given more. Callers that never free
leave no such proof. It works beside `reservation_ids.py`, which answers such calls like those for
any ended id.
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Final

from select_service.core.ledger.freed_ids import key_of
from select_service.core.tenancy.shares import Shares, prefix_in
from select_service.core.tenancy.tenant_memory import TenantMemory, with_places

if TYPE_CHECKING:
    from select_service.core.ledger.reservation import LedgerReservation

LAPSED_MAX: Final = 4096
"""Reservations remembered, newest first: enough to detect the problem, not to count every case."""


class ExpiredIds:
    """Names of reservations that ended by silence, until they are called once more."""

    __slots__ = ("_names",)

    def __init__(self, shares: Shares | None = None) -> None:
        shares = shares or Shares()
        self._names: TenantMemory[str, tuple[tuple[str, ...], int]] = TenantMemory(
            shares, "lapsed_ids", lambda: LAPSED_MAX, by_prefix=True, size_of=itemgetter(1)
        )
        """By the key of a name: all names of its reservation, which takes one place."""

    def note(self, reservation: LedgerReservation) -> None:
        """Note a reservation that was silent for its time to live, or that of its lease."""
        given = reservation.reservation_id, reservation.selection_id, reservation.pair
        names = with_places(*given)
        called = tuple(name for name, _ in names)
        for name, places in names:
            self.hear(name)  # of a predecessor, all names go: some take no place of the bound
            self._names.put(prefix_in(name), key_of(name), (called, places))

    def hear(self, name: str) -> bool:
        """Tell whether a call is the first one for a reservation that has ended by silence."""
        if not self._names:  # the usual case
            return False
        called = self._forget(name)
        if called is None:
            return False
        for one in called:
            self._forget(one)
        return True

    def _forget(self, name: str) -> tuple[str, ...] | None:
        return (self._names.pop(prefix_in(name), key_of(name)) or (None, 0))[0]

    def __len__(self) -> int:
        return len(self._names)
