"""Gives back the tables of dicts that were large once: Python keeps them, until many are added.

A few dicts are looked at in every turn of housekeeping, all of them one after another. What they
hold is none of this room's business; who has such dicts names them in a method `tables`.
"""

from __future__ import annotations

from itertools import islice
from math import inf
from typing import TYPE_CHECKING, Final, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sized

    from indexer.core.registry import Registry
    from indexer.types import Scope
    from select_service.core.booking.desk import Desk
    from select_service.core.partition import Partition

LOOKS_PER_TURN_MAX: Final = 64
"""Dicts looked at in one turn, a µs each: as a rule they are in no cache of the processor."""

TABLE_BYTES_MIN: Final = 32 * 1024
"""Smaller tables may stay."""

MOVED_MAX: Final = 4096
"""Entries of a table that is made anew at once, 25 ns each; one that holds more stays."""

ROUND_EVERY_S: Final = 1.0
"""Few tables are gone round in a turn, and turns follow one another as fast as there is work."""

_SPARE: Final = 8
_ENTRY_BYTES: Final = 36
"""An entry of a full table takes as much; one with eight times that for each is too large."""


def slim(sized: Sized) -> bool:
    """Make a dict's table anew if it is far larger than it need be; tells whether it was."""
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


class Slimming:
    """Goes round all tables, a few a turn.

    Attributes:
        slimmed: tables made anew so far.
    """

    def __init__(self, tables: Callable[[], Iterator[Sized]]) -> None:
        self.slimmed = 0
        self._tables = tables
        self._round: Iterator[Sized] = iter(())
        self._resting_until = -inf

    def go_on(self, now: float) -> None:
        """Look at the next few; after a whole round, rest until it is time for another."""
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
    registry: Registry, desk: Desk, partitions: Mapping[Scope, Partition]
) -> Iterator[Sized]:
    """Yield what grows with reservations and blocks; partitions may come and go meanwhile.

    A round of a thousand scopes lasts for minutes where nobody asks: it keeps their names, not the
    scopes, or none could go before its end.
    """
    yield from desk.bookings.tables()
    yield from desk.leases.tables()
    yield from desk.announcer.claims.tables()
    for scope in list(partitions):
        if (partition := partitions.get(scope)) is not None:
            yield from partition.ledger.tables()
    for scope in [scope for scope, _ in registry.indexes()]:
        if (index := registry.index(scope)) is not None:
            yield from index.tables()
