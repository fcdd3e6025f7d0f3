"""Memories whose oldest entries make room for new ones, with a row of its own for each tenant.

One tenant's flood makes it forget what was its own. `reservation_ids.py`, `leases.py` and others
keep their entries in such rows; `shares.py` says whose oldest entry has to go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sized
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from select_service.core.tenancy.shares import Bound, Party, Shares

Row = TypeVar("Row", bound=Sized)


class TenantParts(Generic[Row]):
    """One row for each holder that has a part of a bound, and one for the others together.

    Callers that put an entry into a row or take one out report it: `took`, `left`. All operations
    are O(1), except where a tenant with a row is no longer in the token file: O(rows).

    Attributes:
        common: the row of the others.
    """

    def __init__(self, shares: Shares, bound: Bound, row: Callable[[], Row]) -> None:
        """Start empty.

        `bound` is of the entries of all rows together.
        """
        self._shares, self._bound, self._row = shares, bound, row
        self.common = row()
        self._rows: dict[Party, Row] = {None: self.common}  # the next to be served is first

    def __len__(self) -> int:
        return sum(map(len, self._rows.values()))

    @property
    def bound(self) -> Bound:
        """The bound of all entries."""
        return self._bound

    @property
    def rows(self) -> list[Row]:
        """All rows. O(rows)."""
        return list(self._rows.values())

    def place(self, holder: Party) -> tuple[Party, Row]:
        """Return where a new entry of a holder belongs: (party, row)."""
        if not self._bound.names(holder):
            return None, self.common
        row = self._rows.get(holder)
        if row is None:
            row = self._rows[holder] = self._row()
        return holder, row

    def where(self, holder: Party) -> Iterator[tuple[Party, Row]]:
        """Yield the one or two rows in which an entry of a holder may be."""
        if holder is not None and len(self._rows) > 1 and holder in self._rows:
            yield holder, self._rows[holder]
        yield None, self.common

    def took(self, holder: Party, count: int = 1) -> None:
        """Note a new entry in a holder's row, and what it counts for."""
        self._bound.take(holder, count)

    def left(self, holder: Party, count: int = 1) -> None:
        """Note that an entry has left a holder's row."""
        self._bound.give(holder, count)
        if holder is not None and not len(self._rows[holder]):
            del self._rows[holder]

    def crowded(self, holder: Party) -> tuple[Party, Row] | None:
        """Return the row whose oldest entry must go after a holder's came; None: there is room."""
        bound = self._bound
        if bound.total <= bound.most:
            return None
        found = bound.crowding(holder)
        if found is not None:
            return found, self._rows[found]
        if len(self.common):
            return None, self.common
        return next((one, row) for one, row in self._rows.items() if not bound.names(one) and row)

    def turns(self, limit: int) -> Iterator[tuple[Party, Row]]:
        """Yield up to so many rows, each time others, to forget what is too old."""
        for _ in range(min(limit, len(self._rows))):
            holder, row = next(iter(self._rows.items()))
            if len(self._rows) > 1:
                self._rows[holder] = self._rows.pop(holder)
            yield holder, row

    def check(self, size_of: Callable[[Row], int] = len) -> None:
        """Assert all invariants; `size_of` returns what the entries of a row count for."""
        held = {one: size_of(row) for one, row in self._rows.items()}
        self._bound.check(+Counter(held))
        assert all(row or holder is None for holder, row in self._rows.items())
