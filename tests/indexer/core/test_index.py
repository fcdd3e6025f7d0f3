"""What the index promises, one scenario at a time."""

from __future__ import annotations

from indexer.core.index import KvIndex
from indexer.types import Namespace, Tier, WorkerRank
from tests.indexer.core.indices import CPU, DISK, FAR, GPU, A, B, C, pack, rows, swept

# ---- tiers


def test_many_ranks_on_all_tiers() -> None:
    index = KvIndex(16)
    ranks = [WorkerRank(worker, rank) for worker in range(128) for rank in range(8)]
    for number, rank in enumerate(ranks):
        index.attach(rank)
        at = 0
        for tier, size in zip(Tier, (number % 5, number % 3, number % 4, 1), strict=True):
            names = list(range(number * 100 + at, number * 100 + at + size))
            parent = number * 100 + at - 1 if at else None
            index.store(rank, tier, parent, names, pack(*range(at + 1, at + size + 1)))
            at += size
    found = rows(index, *range(1, 20))
    for number, rank in enumerate(ranks):
        assert found[rank] == (number % 5, number % 3, number % 4 + 1)


def test_columns_say_the_same_as_rows(index: KvIndex) -> None:
    index.store(A, GPU, None, [1, 2], pack(1, 2))
    index.store(A, CPU, 2, [3], pack(3))
    index.store(A, DISK, 3, [4], pack(4))
    index.store(A, FAR, 4, [5], pack(5))
    index.store(C, GPU, None, [1, 2], pack(1, 2))
    matches = index.find_matches(pack(1, 2, 3, 4, 5))
    columns = [[(n, slots.tolist()) for n, slots in one] for one in matches.by_slot()]
    assert columns == [[(2, [0, 2])], [(1, [0])], [(1, [0]), (1, [0])]]
    assert matches.rows() == {0: (2, 1, 2), 2: (2, 0, 0)}
    assert matches.groups == [(2, 0b101)]
    columns = [
        [(n, slots.tolist()) for n, slots in one] for one in index.find_matches(pack(1)).by_slot()
    ]
    assert columns == [[(1, [0, 2])], [], []]
    assert matches.slots(0b101).tolist() == [0, 2]
    assert index.find_matches(pack(9)).empty
    assert index.find_matches(b"").empty


# ---- namespaces


def test_children_inherit_the_namespace(index: KvIndex) -> None:
    salted = Namespace(cache_salt="tenant-a")
    index.store(A, GPU, None, [1], pack(1), namespace=salted)
    index.store(A, GPU, 1, [2], pack(2))
    index.store(A, CPU, 77, [3], pack(3), namespace=salted)
    assert index.namespace_of(A, 2) == index.namespace_of(A, 3) == salted
    assert index.namespace_of(B, 2) is None
    assert index.namespace_of(WorkerRank(9, 9), 2) is None


# ---- ranks


def test_slots_are_dense_and_used_again(index: KvIndex) -> None:
    assert [index.attach(rank) for rank in (A, B, C, B)] == [0, 1, 2, 1]
    index.detach(B)
    index.detach(B)
    assert index.slot_of(B) is None
    assert index.rank_of(1) is None
    assert index.attach(WorkerRank(5, 0)) == 1
    assert index.capacity == 3


def test_a_late_rank_does_not_inherit_the_past(index: KvIndex) -> None:
    """Holder ids are used again only when no mask names them any more."""
    index.store(A, GPU, None, [1, 2, 3], pack(1, 2, 3))
    for round_ in range(20):
        index.detach(B)
        index.attach(B)
        assert B not in rows(index, 1, 2, 3)
        index.store(B, GPU, None, [1, 2], pack(1, 2))
        index.sweep(round_ % 9)
    swept(index)
    assert rows(index, 1, 2, 3) == {A: (3, 0, 0), B: (2, 0, 0)}
    assert len(index.tree.holders) < 10


def test_slots_of_many_different_masks(index: KvIndex) -> None:
    """More masks than are remembered."""
    ranks = [WorkerRank(worker, 0) for worker in range(100, 110)]
    for rank in ranks:
        index.attach(rank)
    for number in range(1, 1024):
        for bit, rank in enumerate(ranks):
            if number >> bit & 1:
                index.store(rank, GPU, None, [number], pack(number))
        found = index.find_matches(pack(number)).rows()
        holders = {index.rank_of(slot) for slot in found}
        assert holders == {rank for bit, rank in enumerate(ranks) if number >> bit & 1}


def test_unknown_ranks_have_nothing(index: KvIndex) -> None:
    stranger = WorkerRank(9, 9)
    assert index.remove(stranger, GPU, [1]) == 0
    index.clear(stranger)
    index.detach(stranger)
    assert index.slot_of(stranger) is None
