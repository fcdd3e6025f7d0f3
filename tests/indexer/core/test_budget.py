"""How much one source may fill: its cap, its share, and that neighbours keep what they have."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import pytest

from indexer.core.budget import UNLIMITED, BlockBudget
from indexer.core.registry import StreamRegistry
from indexer.core.stream import EventStream
from indexer.types import Scope, StreamLimits, WorkerRank
from tests.indexer.encoding import encode_batch, removed, stored

SCOPE = Scope("m", "t")


def follow(registry: StreamRegistry, worker: int, scope: Scope = SCOPE) -> EventStream:
    registry.open_index(scope, 16)
    rank = WorkerRank(worker, 0)
    return registry.open_stream(scope, rank, worker_ranks=range(1), has_replay=False)


def tell(stream: EventStream, *events: dict[str, Any]) -> None:
    last = stream.cursor.last
    seq = 0 if last is None else last + 1
    frames = [b"", seq.to_bytes(8, "big"), encode_batch(list(events), ts=float(seq))]
    stream.take(deque([frames]), 0.0)
    while stream.is_busy:
        stream.resume(0.0)


def run(first: int, count: int, parent: int | None = None) -> dict[str, Any]:
    names = list(range(first, first + count))
    return stored(names, [name * 16 + at for name in names for at in range(16)], parent)


def held(stream: EventStream) -> int:
    return sum(stream._index._ranks[stream.rank].blocks)


@pytest.mark.parametrize("batch", [1, 3, 700])
def test_a_source_holds_as_many_blocks_as_it_may_and_not_one_more(batch: int) -> None:
    registry = StreamRegistry(limits=StreamLimits(source_blocks_max=10 * batch))
    stream, neighbour = follow(registry, 1), follow(registry, 2)
    parent = None
    for number in range(9):
        tell(stream, run(1 + number * batch, batch, parent))
        parent = (number + 1) * batch
    assert held(stream) == 9 * batch
    tell(stream, run(1 + 9 * batch, batch, parent))
    assert held(stream) == 10 * batch
    tell(stream, run(100_000, 1))
    assert held(stream) == 10 * batch
    assert registry.budget.refused == 1
    left_out = [key for key in stream.tallies.events if "no_room" in key]
    assert [stream.tallies.events[key] for key in left_out] == [1]
    tell(neighbour, run(1, 5 * batch))
    assert held(neighbour) == 5 * batch, "the others store on"
    tell(stream, removed([10 * batch]))
    tell(stream, run(100_000, 1))
    assert held(stream) == 10 * batch, "and it does as well once it has room"
    registry.check()


def test_a_limit_may_change_while_it_holds() -> None:
    limits = StreamLimits(source_blocks_max=2)
    registry = StreamRegistry(limits=limits)
    stream = follow(registry, 1)
    tell(stream, run(1, 2))
    tell(stream, run(10, 1))
    assert held(stream) == 2
    limits.source_blocks_max = 3
    tell(stream, run(10, 1))
    assert held(stream) == 3


def weigh(registry: StreamRegistry) -> None:
    for _ in range(100):
        registry.weigh(2)


def test_who_has_more_than_its_share_stores_no_more_when_all_is_full() -> None:
    limits = StreamLimits()
    registry = StreamRegistry(limits=limits)
    streams = [follow(registry, worker, Scope("m", str(worker % 2))) for worker in range(4)]
    hog, *others = streams
    tell(hog, run(1, 2000))
    for stream in others:
        tell(stream, run(1, 10))
    weigh(registry)
    assert registry.budget.share == UNLIMITED
    total = registry.budget.bytes
    measured = sum(index.stats.bytes for _, index in registry.indexes())
    assert total == pytest.approx(measured, rel=0.1)
    limits.index_bytes_max = total + 1
    weigh(registry)
    assert registry.budget.share == UNLIMITED
    limits.index_bytes_max = total
    weigh(registry)
    share = registry.budget.share
    assert 10 < share < 2000
    tell(hog, run(5000, 1))
    tell(others[0], run(5000, 100))
    assert [held(stream) for stream in streams] == [2000, 110, 10, 10]
    limits.index_bytes_max = total * 2 // 3
    weigh(registry)
    assert registry.budget.forgotten == 1
    assert [held(stream) for stream in streams] == [0, 110, 10, 10], "the largest makes room"
    for _ in range(10):
        registry.sweep(10_000)
    weigh(registry)
    assert registry.budget.share == UNLIMITED
    assert registry.budget.forgotten == 1
    tell(hog, run(1, 50))
    assert held(hog) == 50
    registry.check()


def test_those_that_are_alike_are_not_forgotten_for_being_many() -> None:
    budget = BlockBudget(StreamLimits(index_bytes_max=1000))
    sources = [((SCOPE, WorkerRank(number, 0)), 10, 200) for number in range(10)]
    assert budget.weigh(iter(sources), 20)
    assert budget.conclude() == sources[0][0], "twice as much as may be: one must go"
    assert budget.share == 5
    assert budget.weigh(iter(sources[:5]), 20)
    assert budget.conclude() is None
    assert budget.share == 10
    assert budget.weigh(iter(()), 20)
    assert budget.conclude() is None
    assert (budget.bytes, budget.share) == (0, UNLIMITED)


class TwoTenants:
    """Half of everything is promised to two tenants."""

    parties: Mapping[str | None, None] = {"acme": None, "rival": None}
    by_tenant: Mapping[str | None, str] = {"acme": "acme", "rival": "rival"}

    @staticmethod
    def part(most: int) -> int:
        return most // 4


def test_a_tenant_with_many_sources_leaves_the_others_their_part() -> None:
    limits = StreamLimits()
    registry = StreamRegistry(limits=limits)
    registry.budget.parts = TwoTenants()
    many = [follow(registry, worker, Scope("m", "acme")) for worker in range(20)]
    few = [follow(registry, 50, Scope("m", "rival")), follow(registry, 51, Scope("m", "rival"))]
    other = follow(registry, 60, Scope("m", "nobody"))
    for stream in many:
        tell(stream, run(1, 200))
    weigh(registry)
    total = limits.index_bytes_max = registry.budget.bytes
    weigh(registry)
    # a quarter of it all is there for whoever has none of it yet
    tell(few[0], run(1, 900))
    assert held(few[0]) == 900
    tell(other, run(1, 900))
    assert held(other) == 0
    for stream in many:
        tell(stream, run(5000, 150))
    assert all(held(stream) == 200 for stream in many), "they have more than their share"
    weigh(registry)
    tell(few[1], run(1, 300))
    assert held(few[1]) == 300
    for _ in range(20):  # what is beyond the total goes, and is of whoever has more than its part
        weigh(registry)
        for _sweep in range(10):
            registry.sweep(10_000)
    assert registry.budget.bytes <= total * 9 / 8
    assert registry.budget.forgotten > 0
    assert [held(stream) for stream in few] == [900, 300]
    registry.check()
