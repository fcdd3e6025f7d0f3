"""Selections that may still be reserved, each once: the selection cache of Dynamo 1.4 and later.

`select` with a `selection_id` leaves an entry, `create_reservation` with that id alone books it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from indexer.types import Scope
    from select_service.types import ReservationRequest

TTL_S: Final = 120.0
ENTRIES_MAX: Final = 10_000
BYTES_MAX: Final = 64 << 20
_ENTRY_BYTES: Final = 1_024  # besides the prompt


class SelectionCacheConfig:
    """Bounds of the selection cache; what is None has its default."""

    def __init__(
        self,
        *,
        ttl_secs: float | None = None,
        max_entries: int | None = None,
        max_bytes: int | None = None,
    ) -> None:
        """Set bounds.

        Args:
            ttl_secs: how long a selection may be reserved; None: 120 s.
            max_entries: kept at a time, the oldest goes first; None: 10,000.
            max_bytes: of all prompts kept, likewise; None: 64 MiB.
        """
        self.ttl_s = TTL_S if ttl_secs is None else float(ttl_secs)
        self.entries_max = ENTRIES_MAX if max_entries is None else max_entries
        self.bytes_max = BYTES_MAX if max_bytes is None else max_bytes


class _Entry(NamedTuple):
    booking: ReservationRequest
    ends: float
    bytes: int


class SelectionCache:
    """The pending selections of one service, oldest first. Takes the time, reads no clock."""

    def __init__(self, config: SelectionCacheConfig) -> None:
        self._config = config
        self._entries: OrderedDict[tuple[Scope, str], _Entry] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def keep(self, booking: ReservationRequest, now: float) -> None:
        """Keep a selection under its id, in the place of an older one; make room for it."""
        key = booking.scope, booking.reservation_id
        self.drop(*key)
        size = _ENTRY_BYTES + sum(
            len(part)
            for part in (booking.token_ids, booking.block_hashes, booking.sequence_hashes)
            if isinstance(part, bytes)
        )
        self._entries[key] = _Entry(booking, now + self._config.ttl_s, size)
        self._bytes += size
        while self._entries and (
            len(self._entries) > self._config.entries_max
            or self._bytes > self._config.bytes_max
            or next(iter(self._entries.values())).ends <= now
        ):
            self.drop(*next(iter(self._entries)))

    def find(self, scope: Scope, selection_id: str, now: float) -> ReservationRequest | None:
        """Return the booking of a selection that may still be reserved."""
        entry = self._entries.get((scope, selection_id))
        return None if entry is None or entry.ends <= now else entry.booking

    def drop(self, scope: Scope, selection_id: str) -> None:
        """Forget a selection, as it is reserved now."""
        entry = self._entries.pop((scope, selection_id), None)
        if entry is not None:
            self._bytes -= entry.bytes
