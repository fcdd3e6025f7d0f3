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
    touched: float  # its deadline is `ttl_s` later


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


def deadline_of(one: Expiring) -> float:
    """Return when an entry expires that can."""
    return one.touched + one.ttl_s


class _Queues(dict[float, "OrderedDict[T, None]"]):
    """Entries by time to live, those touched last at the end."""

    def __init__(self) -> None:
        self.heads: list[tuple[float, float]] = []  # heap of (not before, time to live)

    def __missing__(self, ttl_s: float) -> OrderedDict[T, None]:
        heappush(self.heads, (-inf, ttl_s))
        queue = self[ttl_s] = OrderedDict[T, None]()
        return queue


class Deadlines(Generic[T]):
    """Entries that can expire, by deadline; the times of their last touch must not run backwards.

    Moves are O(1), except for the first entry of a time to live: O(log of the times to live in
    use).

    Attributes:
        queues: one for each time to live. An entry is put into the one of its `ttl_s`, touched now.
    """

    def __init__(self) -> None:
        self.queues: _Queues[T] = _Queues()
        self._heads = self.queues.heads

    def __len__(self) -> int:
        return sum(map(len, self.queues.values()))

    def add(self, one: T, ttl_s: float) -> None:
        """Let an entry that is in no queue, and is touched now, expire in `ttl_s` > 0."""
        one.ttl_s = ttl_s
        self.queues[ttl_s][one] = None

    def touch(self, one: T) -> None:
        """Restart the time to live of an entry that is touched now."""
        if one.ttl_s:
            self.queues[one.ttl_s].move_to_end(one)

    def restart(self, one: T, ttl_s: float) -> None:
        """Let an entry that is touched now expire in `ttl_s`, whatever it was before; 0: never."""
        if ttl_s == one.ttl_s:
            self.touch(one)
        else:
            self.remove(one)
            if ttl_s:
                self.add(one, ttl_s)

    def remove(self, one: T) -> None:
        """Remove an entry, so that it cannot expire any more."""
        if one.ttl_s:
            del self.queues[one.ttl_s][one]  # an empty queue is removed when its turn comes
            one.ttl_s = 0.0

    def due(self, now: float, limit: int) -> list[T]:
        """Return up to `limit` expired entries, earliest first, looking at no more than `limit`.

        `next() <= now` shows that there are more to look at.
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
                    walk = iter(self.queues[opened[-1][1]])
                    heappush(walks, (*opened[-1], next(walk), walk))
                continue
            if not walks:
                break
            _, ttl_s, one, walk = walks[0]
            found.append(one)
            following = next(walk, None)
            if following is None or deadline_of(following) > now:
                heappop(walks)
            else:
                heapreplace(walks, (deadline_of(following), ttl_s, following, walk))
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

    def earliest(self) -> float:
        """Return the earliest deadline; infinity if there is none.

        O(log n) for each time to live in use, at most: for what callers are answered.
        """
        while self._heads and not self._settle_first():
            pass
        return self._heads[0][0] if self._heads else inf

    def _settle_first(self) -> bool:
        """Correct the first entry of the heap; True if it was correct already."""
        not_before, ttl_s = self._heads[0]
        first = next(iter(self.queues[ttl_s]), None)
        if first is None:
            heappop(self._heads)
            del self.queues[ttl_s]
            return False
        if deadline_of(first) > not_before:
            heapreplace(self._heads, (deadline_of(first), ttl_s))
            return False
        return True

    def __iter__(self) -> Iterator[T]:
        return (one for queue in self.queues.values() for one in queue)

    def check(self, members: Iterable[T]) -> None:
        """Assert all invariants, given everything that can expire; O(everything)."""
        assert set(self) == set(members), "all that can expire are in a queue"
        assert len(set(self)) == len(self), "and only once"
        assert sorted(ttl_s for _, ttl_s in self._heads) == sorted(self.queues), "an entry each"
        not_before = {ttl_s: at for at, ttl_s in self._heads}
        for ttl_s, queue in self.queues.items():
            deadlines = [deadline_of(one) for one in queue]
            assert deadlines == sorted(deadlines), "the head is the next to expire"
            assert not deadlines or not_before[ttl_s] <= deadlines[0], "never too late"
            assert all(one.ttl_s == ttl_s for one in queue)
