"""Blocks whose parents have not been told of yet."""

from __future__ import annotations

import pytest

from indexer.core.dump import DumpBlock, DumpChange, DumpEvent, DumpKvEvent, DumpStored
from indexer.core.dump_reader import load_event
from indexer.core.index import KvIndex
from indexer.types import StreamLimits
from tests.indexer.core.indices import CPU, GPU, A, B, pack, rows, swept


def test_dropped_orphans_forget_their_counts() -> None:
    index = KvIndex(16, limits=StreamLimits(orphan_blocks_max=3))
    index.attach(A)
    for _ in range(2):
        index.store(A, GPU, 99, [1, 2], pack(1, 2))
        index.store(A, GPU, 99, [11, 12], pack(1, 2))
    index.store(A, GPU, 98, [3, 4], pack(3, 4))
    assert index.stats.orphan_blocks_dropped == 2
    index.store(A, GPU, None, [1], pack(1))
    index.remove(A, GPU, [1])
    assert rows(index, 1) == {}


def told(index: KvIndex, *names: int, parent: int | None = None) -> None:
    """A dump says that rank A holds these blocks, each with its name as content."""
    blocks = [DumpBlock(block_hash=name, tokens_hash=name) for name in names]
    stored = DumpStored(blocks, parent_hash=parent)
    load_event(index, DumpEvent(A.worker_id, DumpKvEvent(DumpChange(stored), dp_rank=A.dp_rank)))


def test_a_name_that_moves_is_no_hearsay_any_more(index: KvIndex) -> None:
    told(index, 1)
    for _ in range(2):  # the engine's own, with other content
        index.store(A, GPU, None, [1], pack(5))
    index.remove(A, GPU, [1])
    assert rows(index, 5) == {A: (1, 0, 0)}, "stored twice, removed once"
    index.remove(A, GPU, [1])
    assert rows(index, 5) == {}


def test_dropped_orphans_are_no_hearsay_any_more() -> None:
    index = KvIndex(16, limits=StreamLimits(orphan_blocks_max=1))
    index.attach(A)
    told(index, 1, parent=99)
    index.store(A, GPU, 98, [2], pack(2))
    assert index.stats.orphan_blocks_dropped == 1
    for _ in range(2):
        index.store(A, GPU, None, [1], pack(1))
    index.remove(A, GPU, [1])
    assert rows(index, 1) == {A: (1, 0, 0)}, "stored twice, removed once"


def test_orphans_that_are_still_to_be_moved_are_told_again(index: KvIndex) -> None:
    """A long event comes in pieces, and healing waits for the last of them."""
    index.store(A, GPU, 11, [12, 13], pack(2, 3))
    index.store(A, GPU, None, [11], pack(1), heals=False)
    index.store(A, GPU, 11, [12, 13], pack(2, 3), heals=False)
    while index.heal(A):
        index.check()
    index.remove(A, GPU, [12, 13])
    assert rows(index, 1, 2, 3) == {A: (3, 0, 0)}


def test_the_oldest_orphans_give_way() -> None:
    index = KvIndex(16, limits=StreamLimits(orphan_blocks_max=10))
    for rank in (A, B):
        index.attach(rank)
    for number in range(6):
        names = [number * 10 + i for i in range(3)]
        index.store(A if number % 2 else B, GPU, 1000 + number, names, pack(*names))
        index.check()
    assert index.stats.orphan_blocks == 9
    assert index.stats.orphan_blocks_dropped == 9
    index.store(B, GPU, None, [1000], pack(500))
    assert rows(index, 500, 0) == {B: (1, 0, 0)}  # was dropped
    index.store(A, GPU, None, [1005], pack(500))
    assert rows(index, 500, 50) == {A: (2, 0, 0), B: (1, 0, 0)}
    index.store(A, GPU, 7, [7000 + i for i in range(11)], pack(*range(11)))
    index.check()
    assert index.stats.orphan_blocks <= 10
    assert index.stats.orphan_blocks_dropped >= 20, "more than the limit at once: not kept"


def test_who_announces_many_orphans_does_not_push_out_those_of_others() -> None:
    index = KvIndex(16, limits=StreamLimits(orphan_blocks_max=10))
    for rank in (A, B):
        index.attach(rank)
    index.store(A, GPU, 1000, [1, 2], pack(1, 2))
    for number in range(100):
        index.store(B, GPU, 2000 + number, [100 + number], pack(number))
    index.check()
    assert index.stats.orphan_blocks == 10
    index.store(A, GPU, None, [1000], pack(9))
    assert rows(index, 9, 1, 2) == {A: (3, 0, 0)}


@pytest.mark.parametrize("shape", ["bush", "chain"])
def test_few_orphans_behind_one_parent_give_way_at_a_time(shape: str) -> None:
    index = KvIndex(16, limits=StreamLimits(orphan_blocks_max=1000))
    index.attach(A)
    for name in range(1001, 1, -1):  # a chain told backwards is one node per block
        parent = name - 1 if shape == "chain" and name > 2 else 10**9
        index.store(A, GPU, parent, [name], pack(name))
    assert index.stats.orphan_blocks_dropped == 0
    index.store(A, GPU, 10**10, [10**11], pack(7))
    assert 1 <= index.stats.orphan_blocks_dropped <= 64
    index.check()
    for name in range(2_000, 4_000):
        index.store(A, GPU, 10**10, [name], pack(name))
    index.check()
    assert index.stats.orphan_blocks <= 1000
    index.store(A, GPU, None, [10**9], pack(7))
    assert rows(index, 7, 2) == {A: (1, 0, 0)}
    index.clear(A)
    swept(index)
    assert index.stats.nodes == index.stats.orphan_blocks == 0


def test_orphans_of_a_cleared_rank_give_way_first() -> None:
    index = KvIndex(16, limits=StreamLimits(orphan_blocks_max=10))
    for rank in (A, B):
        index.attach(rank)
    index.store(A, GPU, 1000, [1, 2, 3], pack(1, 2, 3))
    index.store(A, CPU, 2, [4, 5, 6], pack(4, 5, 6))
    index.clear(A)
    index.sweep(1)
    index.store(B, GPU, 1000, list(range(1, 9)), pack(*range(1, 9)))
    index.check()
    assert index.stats.orphan_blocks == 8
    index.store(B, GPU, None, [1000], pack(9))
    swept(index)
    assert rows(index, 9, 1, 2) == {B: (3, 0, 0)}


def test_orphans_join_content_that_is_there_already(index: KvIndex) -> None:
    for name, parent in ((52, 51), (53, 52), (54, 53), (61, 51)):
        index.store(A, GPU, parent, [name], pack(name))
    index.store(B, GPU, None, [1, 2, 3, 4], pack(50, 51, 52, 53))
    index.store(B, GPU, 3, [9], pack(70))
    index.store(A, GPU, None, [50, 51], pack(50, 51))
    assert rows(index, 50, 51, 52, 53, 54) == {A: (5, 0, 0), B: (4, 0, 0)}
    assert rows(index, 50, 51, 61) == {A: (3, 0, 0), B: (2, 0, 0)}


def test_orphans_told_again_that_come_before_themselves(index: KvIndex) -> None:
    index.store(A, GPU, 12, [13, 11], pack(3, 1))  # 11 waits for 12
    index.store(A, GPU, 11, [12, 13], pack(2, 3))  # and 12 for 11
    assert rows(index, 1, 2, 3) == {}
    index.store(A, GPU, None, [11, 12], pack(1, 2))
    assert rows(index, 1, 2, 3)[A] >= (2, 0, 0)


def test_orphans_with_holes_and_second_names_join_what_is_there(index: KvIndex) -> None:
    index.store(B, GPU, None, [1, 2, 3, 4, 5], pack(1, 2, 3, 4, 5))
    index.store(A, GPU, 11, [12, 13, 14, 15], pack(2, 3, 4, 5))
    index.store(A, CPU, 11, [22, 23, 24, 25], pack(2, 3, 4, 5))
    index.remove(A, GPU, [12, 13])
    index.remove(A, CPU, [23])
    assert index.stats.orphan_blocks == 4
    index.store(A, GPU, None, [11], pack(1))
    assert index.stats.orphan_blocks == 0
    assert rows(index, 1, 2, 3, 4, 5) == {A: (1, 1, 0), B: (5, 0, 0)}
    index.store(A, CPU, 23, [24], pack(4))  # 3 is lost, but known by the block behind it
    index.store(A, CPU, 22, [23], pack(3))
    assert rows(index, 1, 2, 3, 4, 5) == {A: (1, 4, 0), B: (5, 0, 0)}
    assert index.remove(A, CPU, [24]) == 1
    assert index.remove(A, CPU, [24]) == 1
    assert index.remove(A, GPU, [14, 15]) == 2
    assert rows(index, 1, 2, 3, 4, 5) == {A: (1, 2, 0), B: (5, 0, 0)}


def test_more_than_are_placed_at_once_are_all_placed() -> None:
    index = KvIndex(16, limits=StreamLimits(orphan_blocks_max=300))
    index.attach(A)
    for name in range(300):
        index.store(A, GPU, 1, [1_000 + name], pack(1_000 + name))
    index.store(A, GPU, None, [1], pack(1))
    assert index.stats.orphan_blocks == 0
    assert rows(index, 1, 1_299) == {A: (2, 0, 0)}
