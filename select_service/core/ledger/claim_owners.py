"""Whose claims were under a lease, and up to which: one publisher cannot make us forget another's.

Each claim may name predecessors of any owners, whether these exist or not. So what is remembered
is kept by the publisher that told of it: where it is too much, whoever told of more than its share
loses the oldest of that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class ClaimOwners:
    """By publisher and owner the last claim told of, most recently told last."""

    __slots__ = ("_by_teller", "_size")

    def __init__(self) -> None:
        self._by_teller: dict[int, dict[int, int]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def items(self) -> Iterator[tuple[int, int]]:
        """Yield (owner, born): an owner more than once if several publishers told of it."""
        for told in self._by_teller.values():
            yield from told.items()

    def note(self, teller: int, keys: Iterable[tuple[int, int]], owners_max: int) -> None:
        """Note claims that a publisher told of. O(1) each while it has more than its share.

        Args:
            teller: the publisher.
            keys: (owner, born).
            owners_max: remembered of all publishers together, 1 or more.
        """
        for owner, born in keys:
            told = self._by_teller.setdefault(teller, {})
            self._size += owner not in told
            told[owner] = max(born, told.pop(owner, 0))
            if self._size > owners_max:
                self._forget_one(teller, owners_max)

    def _forget_one(self, teller: int, owners_max: int) -> None:
        if len(self._by_teller[teller]) * len(self._by_teller) <= owners_max:
            teller = max(self._by_teller, key=lambda one: len(self._by_teller[one]))
        told = self._by_teller[teller]
        del told[next(iter(told))]
        self._size -= 1
        if not told:
            del self._by_teller[teller]
