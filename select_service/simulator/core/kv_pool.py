"""The KV cache of one simulated engine: used blocks, kept blocks, and events to announce.

A block is *named* once its content is complete and may be found again, otherwise it is only
counted. Unused named blocks stay until their room is needed; the least recently used goes first,
and of one request the last of its chain. `events` collects what an engine would publish, in order.
"""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Final, NamedTuple

from typing_extensions import override

from select_service.simulator.core.kv_events import Removed, Stored

if TYPE_CHECKING:
    from collections.abc import Sequence

    from indexer.types import Tier
    from select_service.simulator.core.kv_events import KvEvent

_NOTED_PER_BLOCK: Final = 3
"""Limit of release notes, as a multiple of the capacity in blocks; beyond it, stale ones go."""


class KvPool:
    """Blocks of one engine; every method is amortised O(blocks concerned)."""

    __slots__ = (
        "_busy",
        "_held",
        "_kept",
        "_nameless",
        "_noted",
        "capacity",
        "events",
        "evictions",
    )

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError("a pool needs at least one block")
        self.capacity = capacity
        self.evictions = 0
        self.events: list[KvEvent] = []
        # named block → number of requests using it, or if unused, the mark of its release
        self._held: dict[int, int] = {}
        self._busy = 0  # used named blocks
        # releases, oldest first: mark (below 0) and blocks, the next to go at the end. A block used
        # again since has another mark, and is skipped.
        self._kept: deque[tuple[int, list[int]]] = deque()
        self._noted = 0  # blocks in `_kept`, including skipped ones
        self._nameless = 0  # in use

    @property
    def used(self) -> int:
        """Blocks held by running requests."""
        return self._busy + self._nameless

    @property
    def available(self) -> int:
        """Blocks that could be taken, if necessary by evicting kept ones."""
        return self.capacity - self._busy - self._nameless

    @property
    def named(self) -> int:
        """Blocks that can be found."""
        return len(self._held)

    def match(self, chain: array[int], most: int) -> tuple[int, int]:
        """Look up the first `most` blocks of a chain, up to the first that is missing.

        Returns the number found, and how many of them are unused.
        """
        held = self._held.get
        found = unused = 0
        for block in chain[:most]:
            users = held(block)
            if users is None:
                break
            found += 1
            unused += users < 0
        return found, unused

    def use(self, chain: array[int], count: int) -> None:
        """Hold the first blocks of a chain, which must be present."""
        held = self._held
        for block in chain[:count]:
            users = held[block]
            if users > 0:
                held[block] = users + 1
            else:
                held[block] = 1
                self._busy += 1

    def take(self, count: int) -> None:
        """Hold this many more unnamed blocks; they must be `available`."""
        assert count <= self.available, "asked before it is taken"
        short = count - (self.capacity - len(self._held) - self._nameless)
        if short > 0:
            gone = self._evict(short)
            self.events.append(Removed(array("Q", gone)))
            self.evictions += short
        self._nameless += count

    def _evict(self, count: int) -> list[int]:
        """Evict this many unused blocks; there must be enough."""
        held, kept = self._held, self._kept
        gone: list[int] = []
        while len(gone) < count:
            mark, blocks = kept[0]
            while blocks and len(gone) < count:
                block = blocks.pop()
                self._noted -= 1
                if held.get(block) == mark:
                    del held[block]
                    gone.append(block)
            if not blocks:
                kept.popleft()
        return gone

    def name(self, chain: array[int], start: int, stop: int) -> None:
        """Name held blocks as these blocks of the chain, so that they can be found.

        Blocks that another request has named meanwhile are shared, and the own copies released.
        """
        held = self._held
        run = chain[start:stop]
        self._nameless -= stop - start
        if held.keys().isdisjoint(run):
            new = dict.fromkeys(run, 1)
            if len(new) == len(run):  # otherwise a chain names one block twice
                held.update(new)
                self._busy += len(new)
                self._announce(chain, start, stop)
                return
        begin = start  # of the run of new ones
        for at in range(start, stop):
            block = chain[at]
            users = held.get(block)
            if users is None or users < 0:
                held[block] = 1
                self._busy += 1
            else:
                held[block] = users + 1
            if users is not None:
                self._announce(chain, begin, at)
                begin = at + 1
        self._announce(chain, begin, stop)

    def _announce(self, chain: array[int], start: int, stop: int) -> None:
        if start < stop:
            parent = chain[start - 1] if start else None
            self.events.append(Stored(parent, chain[start:stop]))

    def release(self, chain: array[int], named: int, nameless: int) -> None:
        """Release a request's blocks: the first `named` of its chain, and some unnamed ones."""
        held = self._held
        mark = self._kept[-1][0] - 1 if self._kept else -1
        kept: list[int] = []
        for block in chain[named - 1 :: -1] if named else ():  # the end is the least useful
            users = held[block]
            if users > 1:
                held[block] = users - 1
            else:
                held[block] = mark
                kept.append(block)
        self._busy -= len(kept)
        self._nameless -= nameless
        if kept:
            kept.reverse()
            self._kept.append((mark, kept))
            self._noted += len(kept)
            if self._noted > _NOTED_PER_BLOCK * self.capacity:
                self._forget_old_notes()

    def _forget_old_notes(self) -> None:
        """Drop notes that would be skipped."""
        held, kept = self._held, self._kept
        self._kept, self._noted = deque(), 0
        for mark, blocks in kept:
            rest = [block for block in blocks if held.get(block) == mark]
            if rest:
                self._kept.append((mark, rest))
                self._noted += len(rest)

    def reading_s(self, chain: array[int], start: int, stop: int) -> float:
        """Return the time to read blocks for another engine that are not on the device."""
        return 0.0

    def loading_s(self) -> float:
        """Return the time it takes to load what `use` was given since the last call."""
        return 0.0

    def check(self) -> None:
        """Assert all invariants of the pool."""
        assert self._nameless >= 0
        assert self._busy == sum(users > 0 for users in self._held.values()), "users are counted"
        assert self._nameless + len(self._held) <= self.capacity
        assert self._noted == sum(len(blocks) for _, blocks in self._kept), "notes are counted"
        kept = [
            block
            for mark, blocks in self._kept
            for block in blocks
            if self._held.get(block) == mark
        ]
        unused = [block for block, users in self._held.items() if users <= 0]
        assert sorted(kept) == sorted(unused), "unused blocks can go, once"


class CommonCache:
    """Blocks that any engine of a fleet has computed, the least recently used of which go.

    As large as the pools that share it, which it grows with.
    """

    def __init__(self, capacity: int = 0) -> None:
        self.capacity = capacity
        self._held: OrderedDict[int, None] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, block: int) -> bool:
        return block in self._held

    def add(self, blocks: array[int]) -> array[int]:
        """Add consecutive blocks, or note that they were used; the last is the oldest.

        Returns those that go for it, the oldest first.
        """
        gone = array("Q")
        held = self._held
        for block in reversed(blocks):
            held[block] = None
            held.move_to_end(block)
        while len(held) > self.capacity:
            gone.append(held.popitem(last=False)[0])
        return gone


class _BackedKvPool(KvPool):
    """A pool that also finds what is held elsewhere, where it has room for it."""

    __slots__ = ()

    @override
    def match(self, chain: array[int], most: int) -> tuple[int, int]:
        own, unused = super().match(chain, most)
        found = own
        while found < most and (chain[found] in self._held or self._is_elsewhere(chain[found])):
            found += 1
        # what comes from elsewhere needs room, which unused blocks of one's own would give
        return found, unused + found - own

    @abstractmethod
    def _is_elsewhere(self, block: int) -> bool: ...


class SharingKvPool(_BackedKvPool):
    """A pool that finds what any other has computed, and has it at once, where there is room."""

    __slots__ = ("_common",)

    def __init__(self, capacity: int, common: CommonCache) -> None:
        super().__init__(capacity)
        self._common = common
        common.capacity += capacity

    @override
    def _is_elsewhere(self, block: int) -> bool:
        return block in self._common

    @override
    def use(self, chain: array[int], count: int) -> None:
        own, _ = KvPool.match(self, chain, count)
        super().use(chain, own)
        if own < count:
            self.take(count - own)
            self.name(chain, own, count)
        self._common.add(chain[:count])

    @override
    def name(self, chain: array[int], start: int, stop: int) -> None:
        super().name(chain, start, stop)
        self._common.add(chain[start:stop])


class LowerTier(NamedTuple):
    """Blocks below an engine's device, and the time to load one of them."""

    tier: Tier
    blocks: CommonCache
    block_s: float


class TieredKvPool(_BackedKvPool):
    """A pool above slower memories of the same engine, which are tried in order.

    What is computed is written to all of them at once. Blocks found there are loaded into the pool
    before their request is scheduled, in the time that `loading_s` gives.
    """

    __slots__ = ("_loading_s", "lower")

    def __init__(self, capacity: int, lower: Sequence[LowerTier]) -> None:
        super().__init__(capacity)
        self.lower = lower
        self._loading_s = 0.0

    def _block_s(self, block: int) -> float | None:
        """Return the time to load a block; None: no tier has it."""
        times = (one.block_s for one in self.lower if block in one.blocks)
        return next(times, None)

    @override
    def _is_elsewhere(self, block: int) -> bool:
        return self._block_s(block) is not None

    @override
    def use(self, chain: array[int], count: int) -> None:
        own, _ = KvPool.match(self, chain, count)
        super().use(chain, own)
        if own < count:
            loaded = (block for block in chain[own:count] if block not in self._held)
            self._loading_s += sum(self._block_s(block) or 0.0 for block in loaded)
            self.take(count - own)
            super().name(chain, own, count)
        self._write(chain, 0, count)

    @override
    def name(self, chain: array[int], start: int, stop: int) -> None:
        super().name(chain, start, stop)
        self._write(chain, start, stop)

    def _write(self, chain: array[int], start: int, stop: int) -> None:
        """Write blocks to every tier, or note there that they were used."""
        for one in self.lower:
            begin = start  # of a run of new ones
            for at in range(start, stop + 1):
                if at == stop or chain[at] in one.blocks:
                    if begin < at:
                        parent = chain[begin - 1] if begin else None
                        self.events.append(Stored(parent, chain[begin:at], one.tier))
                    begin = at + 1
            gone = one.blocks.add(chain[start:stop])
            if gone:
                self.events.append(Removed(gone, one.tier))

    @override
    def reading_s(self, chain: array[int], start: int, stop: int) -> float:
        below = (block for block in chain[start:stop] if block not in self._held)
        return sum(self._block_s(block) or 0.0 for block in below)

    @override
    def loading_s(self) -> float:
        seconds, self._loading_s = self._loading_s, 0.0
        return seconds
