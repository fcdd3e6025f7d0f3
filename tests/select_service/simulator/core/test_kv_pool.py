"""The pool against a naive twin: a counter of users, and a list in the order of release."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from select_service.simulator.core.kv_events import KvEvent, Removed, Stored
from select_service.simulator.core.kv_pool import KvPool
from select_service.simulator.core.requests import chain_of
from tests.effort import examples

CAPACITY = 12


class Naive:
    """What a pool is said to do, in lists."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.users: dict[int, int] = {}
        self.idle: list[int] = []  # oldest first
        self.nameless = 0
        self.events: list[KvEvent] = []

    @property
    def available(self) -> int:
        return self.capacity - len(self.users) - self.nameless

    def match(self, chain: tuple[int, ...], most: int) -> tuple[int, int]:
        found = 0
        while found < most and (chain[found] in self.users or chain[found] in self.idle):
            found += 1
        return found, sum(block in self.idle for block in chain[:found])

    def hold(self, block: int) -> None:
        if block in self.idle:
            self.idle.remove(block)
        self.users[block] = self.users.get(block, 0) + 1

    def take(self, count: int) -> None:
        short = count - (self.capacity - len(self.users) - self.nameless - len(self.idle))
        if short > 0:
            self.events.append(Removed(chain_of(self.idle[:short])))
            del self.idle[:short]
        self.nameless += count

    def name(self, chain: tuple[int, ...], start: int, stop: int) -> None:
        run: list[int] = []
        for at in range(start, stop + 1):
            block = chain[at] if at < stop else -1
            if at < stop and block not in self.users and block not in self.idle:
                run.append(block)
            elif run:
                parent = chain[at - len(run) - 1] if at > len(run) else None
                self.events.append(Stored(parent, chain_of(run)))
                run = []
            if at < stop:
                self.hold(block)
                self.nameless -= 1

    def release(self, chain: tuple[int, ...], named: int, nameless: int) -> None:
        for block in reversed(chain[:named]):
            self.users[block] -= 1
            if not self.users[block]:
                del self.users[block]
                self.idle.append(block)
        self.nameless -= nameless


# few names: chains share blocks, and now and then one names a block twice; and some of every kind
_BLOCKS = st.one_of(
    st.integers(0, 9),
    st.integers(0, 9),
    st.integers(0, 3).map(lambda n: n << 61),
    st.integers(0, 3).map(lambda n: 2**64 - 1 - n),
)


@settings(max_examples=examples(300))
@given(
    st.lists(
        st.tuples(
            st.lists(_BLOCKS, min_size=1, max_size=6).map(tuple),
            st.integers(0, 3),  # nameless blocks behind it
            st.integers(0, 6),  # of those not found, so many get their names
            st.integers(0, 4),  # who leaves then
        ),
        max_size=60,
    )
)
def test_a_pool_is_as_its_naive_twin(requests: list[tuple[tuple[int, ...], int, int, int]]) -> None:
    pool, naive = KvPool(CAPACITY), Naive(CAPACITY)
    running: list[tuple[tuple[int, ...], int, int]] = []
    for chain, more, known, leaving in requests:
        packed = chain_of(chain)
        found, unused = pool.match(packed, len(chain))
        assert (found, unused) == naive.match(chain, len(chain))
        assert pool.match(packed, 2) == naive.match(chain, min(2, len(chain)))
        need = len(chain) - found + more
        assert pool.available == naive.available
        if need <= pool.available - unused:
            pool.use(packed, found)
            for block in chain[:found]:
                naive.hold(block)
            pool.take(need)
            naive.take(need)
            named = min(len(chain), found + known)
            pool.name(packed, found, named)
            naive.name(chain, found, named)
            running.append((chain, named, len(chain) - named + more))
        if leaving < len(running):
            gone = running.pop(leaving)
            pool.release(chain_of(gone[0]), *gone[1:])
            naive.release(*gone)
        pool.check()
        assert pool.events == naive.events
        assert pool.available == naive.available
        assert pool.named == len(naive.users) + len(naive.idle)
        assert pool.used == len(naive.users) + naive.nameless
        assert pool.evictions == sum(
            len(event.blocks) for event in naive.events if isinstance(event, Removed)
        )


@pytest.mark.parametrize("step", [1, 3, 1 << 40])
def test_many_blocks_come_and_go(step: int) -> None:
    """Chains share their first half with the one before, as turns do, and caches are short."""
    pool, naive = KvPool(300), Naive(300)
    held: list[tuple[int, ...]] = []
    for turn in range(200):
        chain = tuple(1 + step * (40 * (turn // 3) + at) for at in range(60 + turn % 3 * 20))
        packed = chain_of(chain)
        found, unused = pool.match(packed, len(chain))
        assert (found, unused) == naive.match(chain, len(chain))
        pool.use(packed, found)
        pool.take(len(chain) - found)
        pool.name(packed, found, len(chain))
        for block in chain[:found]:
            naive.hold(block)
        naive.take(len(chain) - found)
        naive.name(chain, found, len(chain))
        held.append(chain)
        if len(held) > 2:
            gone = held.pop(turn % 3)
            pool.release(chain_of(gone), len(gone), 0)
            naive.release(gone, len(gone), 0)
        pool.check()
        assert pool.events == naive.events
        pool.events, naive.events = [], []
    assert pool.evictions > 1_000


def test_what_is_not_here_is_not_used_or_released() -> None:
    pool = KvPool(4)
    with pytest.raises(KeyError):
        pool.use(chain_of([1]), 1)
    with pytest.raises(KeyError):
        pool.release(chain_of([1]), 1, 0)
    with pytest.raises(AssertionError):
        pool.take(5)
    with pytest.raises(ValueError, match="at least one block"):
        KvPool(0)
