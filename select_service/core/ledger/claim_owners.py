"""Whose claims were under a lease, and up to which: one publisher cannot make us forget another's.

Each claim may name predecessors of any owners, whether these exist or not. So what is remembered
is kept by the publisher that told of it: where it is too much, one that told of more than its share
loses the oldest of that. Publishers that have left have one share together: each deployment leaves
some behind, and a lease may outlive many.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


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

    def note(
        self,
        teller: int,
        keys: Iterable[tuple[int, int]],
        owners_max: int,
        is_silent: Callable[[int], bool],
    ) -> None:
        """Note claims that a publisher told of. O(1) each, and O(publishers) where it is too much.

        `keys` are (owner, born); at most `owners_max` are remembered of all publishers
        together.
        """
        for owner, born in keys:
            told = self._by_teller.setdefault(teller, {})
            self._size += owner not in told
            told[owner] = max(born, told.pop(owner, 0))
            if self._size > owners_max:
                self._forget_one(teller, owners_max, is_silent)

    def _forget_one(self, teller: int, owners_max: int, is_silent: Callable[[int], bool]) -> None:
        by_teller = self._by_teller
        left = [one for one in by_teller if is_silent(one)]
        here = [one for one in by_teller if one not in left] if left else list(by_teller)
        parties = len(here) + bool(left)
        if sum(len(by_teller[one]) for one in left) * parties > owners_max:
            teller = max(left, key=lambda one: len(by_teller[one]))
        elif teller in left or len(by_teller[teller]) * parties <= owners_max:
            teller = max(here, key=lambda one: len(by_teller[one]))
        told = by_teller[teller]
        del told[next(iter(told))]
        self._size -= 1
        if not told:
            del by_teller[teller]
