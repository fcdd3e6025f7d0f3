"""The rings of decisions: one for each tenant of the token file, and one for all others.

A flood of one tenant's decisions replaces its own. `--tenant-share` of the ring belongs to the
tenants of the file in equal parts, the rest to all others. A ring's size is fixed, so parts are
those of the next power of two: rings begin anew only when the number of tenants passes one.
"""

from __future__ import annotations

from heapq import merge
from typing import TYPE_CHECKING, Final

from select_service.core.decisions.record import DecisionRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from select_service.core.decisions.plain_record_ring import RecordRing
    from select_service.core.tenancy.shares import Shares

_APART: Final = 10**16
"""Between the first numbers of two rings: above the microseconds of any wall clock, by which
numbers of later lives of the process begin."""

RINGS_MAX: Final = 900
"""Tenants with rings of their own, so that numbers have 64 bits; more share that of the others."""


class TenantRings:
    """The records of all tenants. O(1), except for what is read of all: O(rings)."""

    def __init__(
        self,
        make: Callable[[int, int, int], RecordRing],
        shares: Shares,
        *,
        count_max: int,
        bytes_max: int,
        first: int,
    ) -> None:
        """Start with one ring for all tenants.

        `make` makes a ring: records, bytes, number of the first. The maxima are of all
        together.
        """
        self._make, self._shares = make, shares
        self._count_max, self._bytes_max = count_max, bytes_max
        self.common = make(count_max, bytes_max, first)
        """The ring of those without one of their own."""
        self._of: dict[str, RecordRing] = {}
        self._first = first
        self._firsts: dict[str, int] = {}  # of the next ring of a tenant that had one
        self._sizes = self._wanted()
        self._made: list[tuple[RecordRing, int]] = [(self.common, first)]  # with its first number
        self._gone = 0  # records of rings that are no more
        self.is_parted = False

    def __len__(self) -> int:
        return sum(len(ring) for ring, _ in self._made)

    def __iter__(self) -> Iterator[RecordRing]:
        return (ring for ring, _ in self._made)

    @property
    def bytes(self) -> int:
        """The bytes of all records."""
        return sum(ring.bytes for ring in self)

    @property
    def evicted(self) -> int:
        """Records that made room for later ones."""
        made = self._made
        return self._gone + sum(ring.next - first - len(ring) for ring, first in made)

    def of(self, tenant_id: str) -> RecordRing:
        """Return the ring of a tenant."""
        ring = self._of.get(tenant_id)
        if ring is None:
            ring = self.common
            if self.is_parted and tenant_id in self._shares.by_tenant:
                ring = self._of[tenant_id] = self._begin(tenant_id)
        return ring

    def _begin(self, tenant_id: str) -> RecordRing:
        _, (count, size) = self._sizes
        first = self._firsts.get(tenant_id)
        if first is None:
            first = self._first_for_newcomer()
            if first is None:
                return self.common
            self._firsts[tenant_id] = first
        ring = self._make(count, size, first)
        self._made.append((ring, first))
        return ring

    def _first_for_newcomer(self) -> int | None:
        """Return a number for the first record of a new ring; None: there are too many rings.

        Tenants come and go: one that has left the token file hands its numbers on.
        """
        if len(self._firsts) < RINGS_MAX:
            return self._first + (len(self._firsts) + 1) * _APART
        named = self._shares.by_tenant
        gone = next((one for one in self._firsts if one not in named and one not in self._of), None)
        return None if gone is None else self._firsts.pop(gone)

    def follow_tenants(self) -> None:
        """Give rings to the tenants of the token file as it is now. O(rings)."""
        sizes = self._wanted()
        if sizes[0] != self._sizes[0]:
            next_one = self.common.next
            self._end(self.common)
            self.common = self._make(*sizes[0], next_one)
            self._made.append((self.common, next_one))
        for tenant, ring in list(self._of.items()):
            if sizes[1] != self._sizes[1] or tenant not in self._shares.by_tenant:
                del self._of[tenant]
                if ring is not self.common:
                    self._firsts[tenant] = ring.next
                    self._end(ring)
        self._sizes, self.is_parted = sizes, sizes[1][0] > 0

    def _end(self, ring: RecordRing) -> None:
        first = next(first for one, first in self._made if one is ring)
        self._made.remove((ring, first))
        self._gone += ring.next - first

    def _wanted(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return (records, bytes) of the common ring and of a tenant's; the latter 0: it has none.

        Together they are no more than all rings may be.
        """
        whole, none = (self._count_max, self._bytes_max), (0, 0)
        names, share = len(self._shares.by_tenant), self._shares.share
        if not names:
            return whole, none
        kept = [min(int(one * share), one - 1) for one in whole]
        count, size = (one >> (names - 1).bit_length() for one in kept)
        if not (count and size):
            return whole, none
        left, bytes_left = (one - part for one, part in zip(whole, kept, strict=True))
        return (left, bytes_left), (count, size)

    # -- reading -------------------------------------------------------------------------------

    def numbered(self, number: int) -> DecisionRecord | None:
        """Return the record of a number, if it is still kept."""
        found = (ring.numbered(number) for ring in self)
        kept = next((one for one in found if one is not None), None)
        return None if kept is None else DecisionRecord._make(kept)

    def named(self, names: frozenset[str]) -> Iterator[DecisionRecord]:
        """Yield the records with any of these ids, newest first."""
        found = [
            DecisionRecord._make(kept)
            for ring in self
            for number in ring.numbers_of(names)
            if (kept := ring.numbered(number)) is not None
        ]
        return iter(sorted(found, key=_age))

    def newest_first(self) -> Iterator[DecisionRecord]:
        """Yield the records present now, except those evicted in the meantime."""
        rings = [_newest_of(ring, ring.next - 1, len(ring)) for ring in self]
        return rings[0] if len(rings) == 1 else merge(*rings, key=_age)


def _newest_of(ring: RecordRing, newest: int, count: int) -> Iterator[DecisionRecord]:
    for number in range(newest, newest - count, -1):
        record = ring.numbered(number)
        if record is not None:
            yield DecisionRecord._make(record)


def _age(record: DecisionRecord) -> tuple[float, int]:
    return -record.at, -record.number
