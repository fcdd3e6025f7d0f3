"""Session affinity: requests of one session go where the last one went, while that makes sense.

A session belongs to one partition, so tenants are separate, and is forgotten when it was silent for
`session_ttl_s` or when `sessions_max` others were heard of since. Nothing is told other replicas.
`verbs/placing.py` asks before ranks are priced, and tells who was chosen.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from msgspec import Struct

from select_service.errors import NameRefused

if TYPE_CHECKING:
    from select_service.core.columns import Rows, Slots
    from select_service.core.partition import Partition
    from select_service.types import CoreLimits

__all__ = ["SessionCounters", "Sessions"]

_FORGOTTEN_AT_ONCE: Final = 2
"""For each one that comes: so they never become more, and fewer if there were too many."""


class SessionCounters(Struct):
    """What became of requests with a session; only grows."""

    begun: int = 0  # nobody had it
    kept: int = 0
    moved_busy: int = 0  # its rank had more ahead of it than the whole prompt is long
    moved_ineligible: int = 0  # its rank may not take the request, or drains
    released: int = 0  # its rank is gone, or has gone and come again
    expired: int = 0
    evicted: int = 0  # for later ones


class _Seat(NamedTuple):
    slot: int
    tenure: int  # of its rank, see `Ledger.tenures`
    until: float


class Sessions:
    """Which rank a session is on. Every verb is O(1), and the ranks for a look at their queues."""

    def __init__(self, limits: CoreLimits) -> None:
        self._limits = limits
        self._seats: OrderedDict[tuple[Partition, str], _Seat] = (
            OrderedDict()
        )  # silent longest first
        self.counters = SessionCounters()

    def __len__(self) -> int:
        return len(self._seats)

    @property
    def is_on(self) -> bool:
        """Whether anybody is kept where he was."""
        return self._limits.session_ttl_s > 0.0

    def rows(
        self, partition: Partition, session_id: str, rows: Rows, isl_tokens: int, now: float
    ) -> Slots | None:
        """Return the session's rank alone, if it should have the request; None: as anybody.

        It should unless it is no candidate, or a candidate could have computed all of the prompt by
        the time the rank gets to it: what is queued there is more than what is queued at the least
        loaded one by more than the prompt's whole length.

        Raises:
            NameRefused: the name is too long, or no log could print it.
        """
        most = self._limits.id_length_max
        if len(session_id) > most or not session_id.isprintable():
            raise NameRefused.of("session_id", session_id, most, "id_length_max")
        counters, key = self.counters, (partition, session_id)
        seat = self._seats.get(key)
        if seat is None or seat.until <= now:  # the latter is swept later
            counters.begun += 1
            return None
        slot, ledger = seat.slot, partition.ledger
        if slot >= len(ledger.tenures) or ledger.tenures[slot] != seat.tenure:
            del self._seats[key]
            counters.released += 1
            return None
        if not (slot < rows.stop if isinstance(rows, slice) else bool((rows == slot).any())):
            counters.moved_ineligible += 1
            return None
        prefill = ledger.loads.prefill
        if prefill[slot] - prefill[rows].min() > isl_tokens:
            counters.moved_busy += 1
            return None
        counters.kept += 1
        return np.array([slot], dtype=np.int64)

    def note(self, partition: Partition, session_id: str, slot: int, now: float) -> None:
        """A request of the session went there."""
        if not self.is_on:
            return
        seats, key = self._seats, (partition, session_id)
        seats[key] = _Seat(slot, partition.ledger.tenures[slot], now + self._limits.session_ttl_s)
        seats.move_to_end(key)
        self.forget(now, _FORGOTTEN_AT_ONCE)

    def forget(self, now: float, limit: int) -> bool:
        """Let those go that were silent for long, or are too many; True if more should go.

        Args:
            now: monotonic seconds.
            limit: how many may go in this turn.
        """
        seats = self._seats
        for _ in range(limit):
            if not seats:
                return False
            key, seat = next(iter(seats.items()))
            if seat.until <= now or not self.is_on:
                self.counters.expired += 1
            elif len(seats) > self._limits.sessions_max:
                self.counters.evicted += 1
            else:
                return False
            del seats[key]
        return bool(seats)

    def check(self) -> None:
        """State every promise."""
        untils = [seat.until for seat in self._seats.values()]
        assert untils == sorted(untils), "who was silent for longest is the first to be forgotten"
