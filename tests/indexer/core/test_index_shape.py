"""How a tree grows and shrinks, and that it gives its memory back."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from indexer.core.index import KvIndex
from indexer.core.node import EDGE_BLOCKS_MAX
from indexer.types import Tier, WorkerRank
from tests.indexer.core.indices import CPU, GPU, A, B, pack, rows, swept


def test_long_sequences_are_cut_into_edges(index: KvIndex) -> None:
    count = 3 * EDGE_BLOCKS_MAX + 7
    index.store(A, GPU, None, list(range(count)), pack(*range(count)))
    assert rows(index, *range(count)) == {A: (count, 0, 0)}
    assert index.stats.nodes == 4
    for name in range(count, count + EDGE_BLOCKS_MAX):
        index.store(A, GPU, name - 1, [name], pack(name))
    assert index.stats.nodes == 5


def test_a_growing_sequence_stays_one_node(index: KvIndex) -> None:
    for name in range(100):
        index.store(A, GPU, name - 1 if name else None, [name], pack(name))
    assert index.stats.nodes == 1
    index.store(B, GPU, None, list(range(50)), pack(*range(50)))
    assert rows(index, *range(100)) == {A: (100, 0, 0), B: (50, 0, 0)}
    assert index.stats.nodes == 1


def test_what_branches_fell_off_grows_together_again(index: KvIndex) -> None:
    for rank in (A, B):
        index.store(rank, GPU, None, list(range(64)), pack(*range(64)))
    for at in range(0, 64, 4):
        index.store(A, GPU, at, [1000 + at], pack(5000))
    assert index.stats.nodes > 30
    index.remove(A, GPU, [1000 + at for at in range(0, 64, 4)])
    swept(index)
    assert index.stats.nodes == 1
    assert rows(index, *range(64)) == {A: (64, 0, 0), B: (64, 0, 0)}


@pytest.mark.parametrize("own", range(3))
def test_equal_names_of_equal_blocks_are_kept_once(index: KvIndex, own: int) -> None:
    """Engines that hash alike: whole, after a split, and when the pieces have merged again."""
    ranks = [A, B, WorkerRank(9, 0)]
    index.attach(ranks[2])
    for rank in ranks:  # one has names of its own
        first = 500 if rank == ranks[own] else 0
        index.store(rank, GPU, None, list(range(first, first + 64)), pack(*range(64)))
    other = ranks.pop(own)

    def kept() -> list[set[int]]:
        mine, same, theirs = (index.holder(one).runs for one in (*ranks, other))
        assert mine.keys() == theirs.keys()
        assert all(mine[node] is same[node] for node in mine)
        return [{*map(id, one.values())} for one in (mine, theirs)]

    assert [len(one) for one in kept()] == [1, 1]
    for name in (16, 40):
        index.store(ranks[0], GPU, name, [1000 + name], pack(5000))
        index.remove(ranks[0], GPU, [1000 + name])
        assert not set.intersection(*kept())
    assert index.stats.nodes == 3
    swept(index)
    assert index.stats.nodes == 1
    assert [len(one) for one in kept()] == [1, 1]


@pytest.mark.parametrize("seed", range(4))
def test_churn_leaves_no_dust(seed: int) -> None:
    """A block pool under pressure: whatever order, in the end nothing is left."""
    rng = random.Random(seed)
    index = KvIndex(16)
    ranks = [WorkerRank(worker, 0) for worker in range(4)]
    held: dict[tuple[WorkerRank, Tier], list[int]] = {}
    for rank in ranks:
        index.attach(rank)
    for step in range(1500):
        rank, tier = rng.choice(ranks), rng.choice([GPU, GPU, CPU])
        mine = held.setdefault((rank, tier), [])
        start = rng.choice([None, *mine[-20:]])
        names: list[int] = []
        for _ in range(rng.randint(1, 9)):
            before = names[-1] if names else (start or 0)
            names.append(before * 31 % 1_000_003 + rng.randint(1, 3))
        if len(set(names)) == len(names) and start not in names:
            index.store(rank, tier, start, names, pack(*names))
            mine.extend(names)
        while len(mine) > 100:
            index.remove(rank, tier, [mine.pop(rng.randrange(len(mine)))])
        index.sweep(rng.randint(0, 3))
        if step % 100 == 0:
            index.check()
    for (rank, tier), names in held.items():
        index.remove(rank, tier, names)
    swept(index)
    empty = index.stats
    # a name that moved took its old references along, so nothing can be left over
    assert (empty.nodes, empty.blocks, empty.orphan_blocks, empty.unswept) == (0, 0, 0, 0)
    assert empty.holdings == (0, 0, 0, 0)
    for rank in ranks:
        index.detach(rank)
    swept(index)
    assert not any(index.tree.holders)
    assert index.stats.bytes == 0


def test_a_swept_clear_gives_everything_back(index: KvIndex) -> None:
    def fill(rank: WorkerRank, seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(50):
            names = [rng.getrandbits(64) for _ in range(20)]
            index.store(
                rank, rng.choice([*Tier]), None, names, pack(*range(rng.randint(0, 3), 23)[:20])
            )

    fill(A, 1)
    before = index.stats
    fill(B, 2)
    index.store(B, CPU, 12345, [1, 2], pack(1, 2))
    index.clear(B)
    swept(index)
    after = index.stats
    assert after[:3] == before[:3]
    assert after.orphan_blocks == after.unswept == 0


def test_equal_parts_are_one_pattern(index: KvIndex) -> None:
    """A thousand ranks that hold a system prompt up to the same block cost one look, not 1,000."""
    long, short = list(range(100)), list(range(60))
    index.store(A, GPU, None, long, pack(*long))
    ranks: Sequence[WorkerRank] = [WorkerRank(worker, 0) for worker in range(10, 1010)]
    for rank in ranks:
        index.attach(rank)
        index.store(rank, GPU, None, short, pack(*short))
    (node,) = index.tree.root.children.values()
    assert node.patterns is not None
    assert len(node.patterns) == 1
    found = rows(index, *long)
    assert found[A] == (100, 0, 0)
    assert all(found[rank] == (60, 0, 0) for rank in ranks)
