"""The KV cache of one simulated engine: blocks in use, blocks kept for later, what to announce.

A block is *named* once its content is whole and may be found again, else it is only counted. Named
blocks nobody uses stay until their room is needed; the one unused for longest goes first, and of
one request the last of its chain. `events` gathers what an engine would publish, in order.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["KvEvent", "KvPool", "Removed", "Stored"]


class Stored(NamedTuple):
    """Consecutive blocks can be found from now on, behind `parent`; None: at the root."""

    parent: int | None
    blocks: tuple[int, ...]


class Removed(NamedTuple):
    """Blocks cannot be found any more."""

    blocks: tuple[int, ...]


KvEvent = Stored | Removed


class KvPool:
    """Blocks of one engine; every verb is O(blocks it is about)."""

    __slots__ = ("_idle", "_nameless", "_used", "capacity", "events", "evictions")

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError("a pool needs at least one block")
        self.capacity = capacity
        self.evictions = 0
        self.events: list[KvEvent] = []
        self._used: dict[int, int] = {}  # named block → requests that use it
        self._idle: OrderedDict[int, None] = OrderedDict()  # named, unused; oldest first
        self._nameless = 0  # in use

    @property
    def used(self) -> int:
        """Blocks that running requests hold."""
        return len(self._used) + self._nameless

    @property
    def available(self) -> int:
        """Blocks that could be taken, if need be by forgetting what is kept."""
        return self.capacity - len(self._used) - self._nameless

    @property
    def named(self) -> int:
        """Blocks that can be found."""
        return len(self._used) + len(self._idle)

    def match(self, chain: Sequence[int], most: int) -> int:
        """Return how many of the first `most` blocks of a chain are here, up to the first gap."""
        used, idle = self._used, self._idle
        found = 0
        for block in chain[:most]:
            if block not in used and block not in idle:
                break
            found += 1
        return found

    def room_beside(self, chain: Sequence[int], count: int) -> int:
        """Return what could be taken once the first blocks of a chain are in use."""
        used = self._used
        return self.available - sum(block not in used for block in chain[:count])

    def use(self, chain: Sequence[int], count: int) -> None:
        """Hold the first blocks of a chain, which are here."""
        used, idle = self._used, self._idle
        for block in chain[:count]:
            if block in used:
                used[block] += 1
            else:
                del idle[block]
                used[block] = 1

    def take(self, count: int) -> None:
        """Hold so many more blocks without a name; there must be as many `available`."""
        assert count <= self.available, "asked before it is taken"
        idle = self._idle
        short = count - (self.capacity - len(self._used) - self._nameless - len(idle))
        if short > 0:
            gone = tuple(idle.popitem(last=False)[0] for _ in range(short))
            self.events.append(Removed(gone))
            self.evictions += short
        self._nameless += count

    def name(self, chain: Sequence[int], start: int, stop: int) -> None:
        """Let nameless blocks be found as these of the chain from now on.

        What somebody else has computed meanwhile is shared, and the own copy is given back.
        """
        used, idle = self._used, self._idle
        begin = start  # of the run of new ones
        for at in range(start, stop):
            block = chain[at]
            if block in used:
                used[block] += 1
            elif block in idle:
                del idle[block]
                used[block] = 1
            else:
                used[block] = 1
                continue
            self._announce(chain, begin, at)
            begin = at + 1
        self._announce(chain, begin, stop)
        self._nameless -= stop - start

    def _announce(self, chain: Sequence[int], start: int, stop: int) -> None:
        if start < stop:
            parent = chain[start - 1] if start else None
            self.events.append(Stored(parent, tuple(chain[start:stop])))

    def release(self, chain: Sequence[int], named: int, nameless: int) -> None:
        """Give back what a request held: the first `named` of its chain, and some without."""
        used, idle = self._used, self._idle
        for block in reversed(chain[:named]):  # the end of a prompt is needed least
            users = used[block] - 1
            if users:
                used[block] = users
            else:
                del used[block]
                idle[block] = None
        self._nameless -= nameless

    def check(self) -> None:
        """State every promise of the pool."""
        assert self._nameless >= 0
        assert all(users > 0 for users in self._used.values())
        assert not self._used.keys() & self._idle.keys(), "used or kept, not both"
        assert self.used + len(self._idle) <= self.capacity
