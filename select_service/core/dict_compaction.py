"""Shrinks the tables of dicts that were once large: Python keeps them until many entries are added.

A few dicts are checked in every turn of housekeeping, in rounds over all of them. Their content
does not matter here; owners of such dicts list them in a method `tables`.
"""

from __future__ import annotations

from itertools import islice
from math import inf
from typing import TYPE_CHECKING, Final, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sized

    from indexer.core.registry import StreamRegistry
    from indexer.types import Scope
    from select_service.core.partition import Partition
    from select_service.core.reservations.lifecycle import Lifecycle

LOOKS_PER_TURN_MAX: Final = 64
"""Dicts checked in one turn, a µs each: usually they are in no cache of the processor."""

TABLE_BYTES_MIN: Final = 32 * 1024
"""Smaller tables may stay."""

MOVED_MAX: Final = 4096
"""Entries of a table that is rebuilt in one go, 25 ns each; a table with more stays."""

ROUND_EVERY_S: Final = 1.0
"""Shortest time between two rounds: with few tables a round takes one turn, and turns follow one
another as fast as there is work."""

_SPARE: Final = 8
_ENTRY_BYTES: Final = 36
"""Bytes per entry of a full table; a table with eight times that per entry is too large."""


def slim(sized: Sized) -> bool:
    """Rebuild a dict's table if it is far larger than necessary; return whether it was."""
    table = cast("dict[object, object]", sized)
    size = table.__sizeof__()
    if size < TABLE_BYTES_MIN:
        return False
    held = len(table)
    if held > MOVED_MAX or held * _ENTRY_BYTES * _SPARE > size:
        return False
    entries = table.copy()
    table.clear()
    table.update(entries)
    return True


class DictCompaction:
    """Visits all tables, a few per turn.

    Attributes:
        slimmed: tables rebuilt so far.
    """

    def __init__(self, tables: Callable[[], Iterator[Sized]]) -> None:
        self.slimmed = 0
        self._tables = tables
        self._round: Iterator[Sized] = iter(())
        self._resting_until = -inf

    def go_on(self, now: float) -> None:
        """Check the next few; after a whole round, rest until it is time for another."""
        if now < self._resting_until:
            return
        looked = 0
        for table in islice(self._round, LOOKS_PER_TURN_MAX):
            looked += 1
            self.slimmed += slim(table)
        if looked < LOOKS_PER_TURN_MAX:
            self._round = self._tables()
            self._resting_until = now + ROUND_EVERY_S


def all_tables(
    registry: StreamRegistry, lifecycle: Lifecycle, partitions: Mapping[Scope, Partition]
) -> Iterator[Sized]:
    """Yield the dicts that grow with reservations and blocks; partitions may come and go meanwhile.

    An idle round of a thousand scopes lasts for minutes, so it keeps their names rather than the
    scopes, which could otherwise not be freed before its end.
    """
    yield from lifecycle.bookings.tables()
    yield from lifecycle.leases.tables()
    yield from lifecycle.announcer.claims.tables()
    for scope in list(partitions):
        if (partition := partitions.get(scope)) is not None:
            yield from partition.ledger.tables()
    for scope in [scope for scope, _ in registry.indexes()]:
        if (index := registry.index(scope)) is not None:
            yield from index.tables()
