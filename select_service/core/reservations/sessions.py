"""Session affinity: requests of a session follow its last one to the same rank, while that pays.

A session belongs to one partition, so tenants stay separate. It is forgotten after `session_ttl_s`
of silence, or once `sessions_max` others have been active since. Other replicas are not told.
`routing/place.py` asks for the session's rank before pricing, and notes the rank chosen.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import numpy as np
from msgspec import Struct

from select_service.core.tenancy.shares import Shares
from select_service.core.tenancy.tenant_parts import TenantParts
from select_service.errors import NameRefused

if TYPE_CHECKING:
    from select_service.core.columns import Rows, Slots
    from select_service.core.partition import Partition
    from select_service.core.tenancy.shares import Party
    from select_service.types import CoreLimits

__all__ = ["SessionCounters", "Sessions"]

_FORGOTTEN_AT_ONCE: Final = 2
"""Sessions forgotten at most for each one noted: their number never grows past the maximum, and
shrinks if that was lowered."""


class SessionCounters(Struct):
    """Outcomes of requests with a session; they only grow."""

    begun: int = 0  # the session was unknown
    kept: int = 0
    # its rank's queue exceeded the shortest by more than the whole prompt
    moved_busy: int = 0
    moved_ineligible: int = 0  # its rank may not take the request, or drains
    released: int = 0  # its rank has gone, or has gone and come back
    expired: int = 0
    evicted: int = 0  # to make room for later sessions


class _SessionRank(NamedTuple):
    slot: int
    tenure: int  # of its rank, see `Ledger.previous_ranks`
    until: float


_SessionRanks: TypeAlias = "OrderedDict[tuple[Partition, str], _SessionRank]"


class Sessions:
    """The rank of each session. Every method is O(1), plus O(ranks) to compare their queues."""

    def __init__(self, limits: CoreLimits, shares: Shares | None = None) -> None:
        self._limits = limits
        shares = shares or Shares(limits)
        bound = shares.bound("sessions_max", lambda: limits.sessions_max)
        self._rows: TenantParts[_SessionRanks] = TenantParts(
            shares, bound, OrderedDict
        )  # longest silent first
        self.counters = SessionCounters()

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def is_on(self) -> bool:
        """Whether sessions are kept at all."""
        return self._limits.session_ttl_s > 0.0

    def rows(
        self, partition: Partition, session_id: str, rows: Rows, isl_tokens: int, now: float
    ) -> Slots | None:
        """Return the session's rank alone if it should take the request; None: choose freely.

        It should unless it is no candidate, or another candidate could have computed the whole
        prompt by the time the rank gets to it: its queue exceeds that of the least loaded candidate
        by more than the prompt's length.

        Raises:
            NameRefused: the name is too long, or no log could print it.
        """
        most = self._limits.id_length_max
        if len(session_id) > most or not session_id.isprintable():
            raise NameRefused.of("session_id", session_id, most, "id_length_max")
        counters, key = self.counters, (partition, session_id)
        found = self._rows.where(partition.scope.tenant_id)
        holder, ranks = next((one for one in found if key in one[1]), (None, self._rows.common))
        rank = ranks.get(key)
        if rank is None or rank.until <= now:  # swept later, if expired
            counters.begun += 1
            return None
        slot, ledger = rank.slot, partition.ledger
        if slot >= len(ledger.previous_ranks) or ledger.previous_ranks[slot] != rank.tenure:
            del ranks[key]
            self._rows.left(holder)
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
        """Record that a request of the session went to this slot."""
        if not self.is_on:
            return
        key = partition, session_id
        for holder, ranks in self._rows.where(partition.scope.tenant_id):
            if ranks.pop(key, None) is not None:
                self._rows.left(holder)
        holder, ranks = self._rows.place(partition.scope.tenant_id)
        ranks[key] = _SessionRank(
            slot, partition.ledger.previous_ranks[slot], now + self._limits.session_ttl_s
        )
        self._rows.took(holder)
        for _ in range(_FORGOTTEN_AT_ONCE):
            if not self._forget_expired(holder, ranks, now) and not self._make_room(holder, now):
                break

    def _forget_expired(self, holder: Party, ranks: _SessionRanks, now: float) -> bool:
        """Forget the oldest session of a row if it is expired; whether it was."""
        rank = next(iter(ranks.values()), None)
        if rank is None or (rank.until > now and self.is_on):
            return False
        ranks.popitem(last=False)
        self._rows.left(holder)
        self.counters.expired += 1
        return True

    def _make_room(self, holder: Party, now: float) -> bool:
        """Forget the oldest session of the row that has to make room; False if none has to."""
        crowded = self._rows.crowded(holder)
        if crowded is None:
            return False
        whose, ranks = crowded
        if not self._forget_expired(whose, ranks, now):
            ranks.popitem(last=False)
            self._rows.left(whose)
            self.counters.evicted += 1
        return True

    def forget(self, now: float, limit: int) -> bool:
        """Forget sessions that are expired or too many; True if more should go.

        Args:
            now: monotonic seconds.
            limit: how many may go in this turn.
        """
        left = limit
        for holder, ranks in self._rows.turns(limit):
            while left and self._forget_expired(holder, ranks, now):
                left -= 1
        while left and self._make_room(None, now):
            left -= 1
        return not left

    def check(self) -> None:
        """Assert all invariants."""
        self._rows.check()
        for ranks in self._rows.rows:
            untils = [rank.until for rank in ranks.values()]
            assert untils == sorted(untils), "silent for longest, forgotten first"
