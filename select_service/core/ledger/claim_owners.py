"""Whose claims were under a lease, and up to which: one publisher cannot make us forget another's.

Each claim may name predecessors of any owners, whether these exist or not. So what is remembered
is kept by the publisher that sent it: where it is too much, one that sent more than its share
loses the oldest of that. Publishers that have left have one share together: each deployment leaves
some behind, and a lease may outlive many.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


class ClaimOwners:
    """By publisher and owner the last claim sent, most recently sent last."""

    __slots__ = ("_by_publisher", "_size")

    def __init__(self) -> None:
        self._by_publisher: dict[int, dict[int, int]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def items(self) -> Iterator[tuple[int, int]]:
        """Yield (owner, born): an owner more than once if several publishers sent it."""
        for sent in self._by_publisher.values():
            yield from sent.items()

    def note(
        self,
        publisher: int,
        keys: Iterable[tuple[int, int]],
        owners_max: int,
        is_silent: Callable[[int], bool],
    ) -> None:
        """Note claims that a publisher sent. O(1) each, and O(publishers) where it is too much.

        `keys` are (owner, born); at most `owners_max` are remembered of all publishers
        together.
        """
        for owner, born in keys:
            sent = self._by_publisher.setdefault(publisher, {})
            self._size += owner not in sent
            sent[owner] = max(born, sent.pop(owner, 0))
            if self._size > owners_max:
                self._forget_one(publisher, owners_max, is_silent)

    def _forget_one(
        self, publisher: int, owners_max: int, is_silent: Callable[[int], bool]
    ) -> None:
        by_publisher = self._by_publisher
        left = [one for one in by_publisher if is_silent(one)]
        here = [one for one in by_publisher if one not in left] if left else list(by_publisher)
        parties = len(here) + bool(left)
        if sum(len(by_publisher[one]) for one in left) * parties > owners_max:
            publisher = max(left, key=lambda one: len(by_publisher[one]))
        elif publisher in left or len(by_publisher[publisher]) * parties <= owners_max:
            publisher = max(here, key=lambda one: len(by_publisher[one]))
        sent = by_publisher[publisher]
        del sent[next(iter(sent))]
        self._size -= 1
        if not sent:
            del by_publisher[publisher]
