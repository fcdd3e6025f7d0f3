"""Deadlines: one queue per time to live, in the order of the last sign of life.

`ledger.py` keeps reservations here, `leases.py` leases. A touched entry moves to the end of its
queue, so the head of a queue expires first. One heap of all entries would keep those of freed
reservations, and clear them out in one long turn.

Clients choose times to live, so there may be many queues; a small heap knows which one is next. It
has one entry per queue, which may be too early but never too late: touching does not move it.
"""

from __future__ import annotations

from collections import OrderedDict
from heapq import heappop, heappush, heapreplace
from math import inf
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_LOOK_MAX: Final = 64
"""Heap entries corrected in one call of `next`; 0.3 µs each."""


class Expiring(Protocol):
    """Something that ends unless touched: a reservation, a lease. Hashed by identity."""

    ttl_s: float  # 0: never expires
    deadline: float  # when it expires, if it can
    touched: float


T = TypeVar("T", bound=Expiring)


def rounded_up(ttl_s: float) -> float:
    """Round a time to live up to three significant digits.

    This bounds the number of queues; odd values live at most a percent longer than requested.
    """
    text = f"{ttl_s:.2e}"
    if float(text) >= ttl_s:
        return float(text)
    step = 10.0 ** (int(text[5:]) - 2)
    return float(f"{float(text) + step:.2e}")


class Deadlines(Generic[T]):
    """Entries that can expire, by deadline; `now` must not run backwards.

    Moves are O(1), except for the first entry of a time to live: O(log of the times to live in
    use).
    """

    def __init__(self) -> None:
        self._queues: dict[float, OrderedDict[T, None]] = {}  # by time to live
        self._heads: list[tuple[float, float]] = []  # heap of (not before, time to live)

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def add(self, one: T, ttl_s: float, now: float) -> None:
        """Let an entry that is in no queue expire `ttl_s` > 0 after now."""
        one.ttl_s = ttl_s
        one.deadline = now + ttl_s
        queue = self._queues.get(ttl_s)
        if queue is None:
            queue = self._queues[ttl_s] = OrderedDict()
            heappush(self._heads, (one.deadline, ttl_s))
        queue[one] = None

    def touch(self, one: T, now: float) -> None:
        """Restart an entry's time to live."""
        if one.ttl_s:
            one.deadline = now + one.ttl_s
            self._queues[one.ttl_s].move_to_end(one)

    def remove(self, one: T) -> None:
        """Remove an entry, so that it cannot expire any more."""
        if one.ttl_s:
            del self._queues[one.ttl_s][one]  # an empty queue is removed when its turn comes
            one.ttl_s = 0.0

    def due(self, now: float, limit: int) -> list[T]:
        """Return up to `limit` expired entries, earliest first, looking at no more than `limit`.

        `next() <= now` tells that there are more to look at.
        """
        found: list[T] = []
        opened: list[tuple[float, float]] = []  # entries taken out of the heap
        # heap of queues, by the next entry in each
        walks: list[tuple[float, float, T, Iterator[T]]] = []
        looks = limit
        while len(found) < limit:
            if self._is_next(walks, now):
                looks -= 1
                if looks < 0:
                    break
                if self._settle_first():
                    opened.append(heappop(self._heads))
                    walk = iter(self._queues[opened[-1][1]])
                    heappush(walks, (*opened[-1], next(walk), walk))
                continue
            if not walks:
                break
            _, ttl_s, one, walk = walks[0]
            found.append(one)
            following = next(walk, None)
            if following is None or following.deadline > now:
                heappop(walks)
            else:
                heapreplace(walks, (following.deadline, ttl_s, following, walk))
        for entry in opened:
            heappush(self._heads, entry)
        return found

    def _is_next(self, walks: list[tuple[float, float, T, Iterator[T]]], now: float) -> bool:
        """Whether an unopened queue may have an earlier deadline than the opened ones."""
        if not self._heads or self._heads[0][0] > now:
            return False
        return not walks or self._heads[0][0] < walks[0][0]

    def next(self) -> float:
        """Return the earliest deadline (or, rarely, an earlier time); infinity if there is none."""
        for _ in range(_LOOK_MAX):
            if not self._heads or self._settle_first():
                break
        return self._heads[0][0] if self._heads else inf

    def _settle_first(self) -> bool:
        """Correct the first entry of the heap; True if it was correct already."""
        not_before, ttl_s = self._heads[0]
        first = next(iter(self._queues[ttl_s]), None)
        if first is None:
            heappop(self._heads)
            del self._queues[ttl_s]
            return False
        if first.deadline > not_before:
            heapreplace(self._heads, (first.deadline, ttl_s))
            return False
        return True

    def __iter__(self) -> Iterator[T]:
        return (one for queue in self._queues.values() for one in queue)

    def check(self, members: Iterable[T]) -> None:
        """Assert all invariants, given everything that can expire; O(everything)."""
        assert set(self) == set(members), "who can expire is in a queue"
        assert len(set(self)) == len(self), "and only once"
        assert sorted(ttl_s for _, ttl_s in self._heads) == sorted(self._queues), "an entry each"
        not_before = {ttl_s: at for at, ttl_s in self._heads}
        for ttl_s, queue in self._queues.items():
            deadlines = [one.deadline for one in queue]
            assert deadlines == sorted(deadlines), "the head is the next to expire"
            assert not deadlines or not_before[ttl_s] <= deadlines[0], "never too late"
            assert all(one.ttl_s == ttl_s for one in queue)
            assert all(one.deadline == one.touched + ttl_s for one in queue)
