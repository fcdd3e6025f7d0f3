"""The pool against a naive twin: a counter of users, and a list in the order of release."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from select_service.simulator.core.kv_pool import KvEvent, KvPool, Removed, Stored

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
            self.events.append(Removed(tuple(self.idle[:short])))
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
                self.events.append(Stored(parent, tuple(run)))
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


@given(
    st.lists(
        st.tuples(
            # few names: chains share blocks, and now and then one names a block twice
            st.lists(st.integers(0, 9), min_size=1, max_size=6).map(tuple),
            st.integers(0, 3),  # nameless blocks behind it
            st.integers(0, 6),  # of those not found, so many get their names
            st.integers(0, 4),  # who leaves then
        ),
        max_size=60,
    )
)
def test_a_pool_is_as_its_naive_twin(
    requests: list[tuple[tuple[int, ...], int, int, int]],
) -> None:
    pool, twin = KvPool(CAPACITY), Naive(CAPACITY)
    running: list[tuple[tuple[int, ...], int, int]] = []
    for chain, more, known, leaving in requests:
        found, unused = pool.match(chain, len(chain))
        assert (found, unused) == twin.match(chain, len(chain))
        need = len(chain) - found + more
        assert pool.available == twin.available
        if need <= pool.available - unused:
            pool.use(chain, found)
            for block in chain[:found]:
                twin.hold(block)
            pool.take(need)
            twin.take(need)
            named = min(len(chain), found + known)
            pool.name(chain, found, named)
            twin.name(chain, found, named)
            running.append((chain, named, len(chain) - named + more))
        if leaving < len(running):
            gone = running.pop(leaving)
            pool.release(*gone)
            twin.release(*gone)
        pool.check()
        assert pool.events == twin.events
        assert pool.available == twin.available
        assert pool.named == len(twin.users) + len(twin.idle)
        assert pool.used == len(twin.users) + twin.nameless
