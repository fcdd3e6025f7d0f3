"""Names of blocks: second ones, lost ones, and those that mean something else now."""

from __future__ import annotations

import pytest

from indexer.core.index import KvIndex
from indexer.types import WorkerRank
from tests.indexer.core.indices import CPU, DISK, GPU, A, B, pack, rows


def test_hash_zero_is_a_hash(index: KvIndex) -> None:
    index.store(A, GPU, None, [0, 1], pack(7, 8))
    index.store(A, GPU, 0, [2], pack(9))
    assert rows(index, 7, 9) == {A: (2, 0, 0)}
    index.remove(A, GPU, [0])
    assert rows(index, 7, 9) == {}


def test_a_tail_that_others_do_not_hold_is_cut(index: KvIndex) -> None:
    index.store(A, GPU, None, [1, 2, 3, 4], pack(1, 2, 3, 4))
    index.store(B, GPU, None, [1, 2], pack(1, 2))
    index.remove(A, GPU, [4])
    assert index.stats.blocks == 3
    index.remove(A, GPU, [2])
    index.remove(A, GPU, [3])
    assert index.stats.blocks == 2
    assert rows(index, 1, 2, 3) == {A: (1, 0, 0), B: (2, 0, 0)}


def test_the_group_of_the_first_store_is_the_plain_one(index: KvIndex) -> None:
    """Or every block of a model whose main group is not 0 would need a count of its own."""
    index.store(A, GPU, None, [1], pack(1), group=1)
    index.remove(A, GPU, [1], group=1)
    index.store(A, GPU, None, [1, 2], pack(1, 2), group=0)
    index.store(B, GPU, None, [1, 2], pack(1, 2), group=2)
    assert index.tree.holders[0].counts[GPU] is None  # type: ignore[union-attr]
    assert index.tree.holders[1].counts[GPU] is None  # type: ignore[union-attr]
    index.store(B, GPU, None, [1, 2], pack(1, 2), group=2)
    index.store(B, GPU, None, [1, 2], pack(1, 2), group=0)
    index.store(B, CPU, None, [1, 2], pack(1, 2), group=0)
    index.store(B, CPU, None, [1, 2], pack(1, 2), group=2)
    index.mark_on_tier(B, DISK, [2], group=5)
    assert index.remove(B, GPU, [1, 2, 1, 2, 1, 2], group=2) == 4
    assert index.remove(B, CPU, [1, 2, 1], group=2) == 2
    assert rows(index, 1, 2) == {A: (2, 0, 0), B: (2, 0, 0)}
    assert index.remove(B, GPU, [1, 2], group=0) == 2
    assert rows(index, 1, 2) == {A: (2, 0, 0), B: (0, 2, 0)}
    assert index.remove(B, CPU, [1, 2], group=0) == 2
    assert index.remove(B, DISK, [1, 2], group=5) == 1
    assert rows(index, 1, 2) == {A: (2, 0, 0)}


def test_a_store_that_repeats_a_hash_is_refused(index: KvIndex) -> None:
    assert index.store(A, GPU, None, [1, 2, 1], pack(1, 2, 3)) == 0
    assert index.store(A, GPU, 5, [4, 5], pack(1, 2)) == 0
    assert index.store(A, GPU, None, [], b"") == 0
    assert rows(index, 1, 2, 3) == {}
    assert index.stats.events_refused == 2
    with pytest.raises(ValueError, match="one local hash"):
        index.store(A, GPU, None, [1], b"")
    with pytest.raises(KeyError):
        index.store(WorkerRank(9, 9), GPU, None, [1], pack(1))


def test_a_name_that_straddles_two_others_is_not_mistaken(index: KvIndex) -> None:
    """The bytes of 2 lie across the names 1 << 40 and so on; only whole positions count."""
    straddling = int.from_bytes(pack(1 << 40, 3)[4:12], "little")
    names = [1 << 40, 3, 5, straddling, 6]
    index.store(A, GPU, None, names, pack(1, 2, 3, 4, 5))
    assert index.remove(A, GPU, [straddling]) == 1
    assert rows(index, 1, 2, 3, 4, 5) == {A: (3, 0, 0)}
