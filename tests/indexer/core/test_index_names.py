"""Names of blocks: second ones, lost ones, and those that mean something else now."""

from __future__ import annotations

import pytest

from indexer.core.index import KvIndex
from indexer.types import WorkerRank
from tests.indexer.core.indices import CPU, DISK, GPU, A, B, pack, rows, swept


def test_hash_zero_is_a_hash(index: KvIndex) -> None:
    index.store(A, GPU, None, [0, 1], pack(7, 8))
    index.store(A, GPU, 0, [2], pack(9))
    assert rows(index, 7, 9) == {A: (2, 0, 0)}
    index.remove(A, GPU, [0])
    assert rows(index, 7, 9) == {}


def test_counts_are_kept_per_group(index: KvIndex) -> None:
    for group in (0, 1, 1):
        index.store(A, GPU, None, [1], pack(1), group=group)
    assert index.remove(A, GPU, [1], group=2) == 0
    index.store(B, GPU, None, [1], pack(1))
    index.store(B, GPU, None, [1], pack(1), group=1)
    assert index.remove(B, GPU, [1, 1], group=1) == 1
    assert index.remove(B, GPU, [1, 1]) == 1
    assert index.remove(A, GPU, [1, 1], group=0) == 1
    assert rows(index, 1) == {A: (1, 0, 0)}
    assert index.remove(A, GPU, [1, 1, 1], group=1) == 2
    assert rows(index, 1) == {}


def test_what_follows_a_lost_block_is_known_by_its_own_name(index: KvIndex) -> None:
    """An engine offloads what it still has behind a block it evicted: nothing moves."""
    index.store(A, GPU, None, [1, 2, 3, 4], pack(1, 2, 3, 4))
    index.remove(A, GPU, [2])
    index.store(A, CPU, 2, [3, 4], pack(3, 4))
    assert index.stats.orphan_blocks == 0
    index.store(A, GPU, 1, [2], pack(2))
    assert rows(index, 1, 2, 3, 4) == {A: (4, 0, 0)}
    index.remove(A, GPU, [3, 4])
    assert rows(index, 1, 2, 3, 4) == {A: (2, 2, 0)}


def test_a_lost_block_does_not_vouch_for_other_content(index: KvIndex) -> None:
    index.store(A, GPU, None, [1, 2, 3], pack(1, 2, 3))
    index.remove(A, GPU, [2])
    index.store(A, CPU, 2, [3], pack(9))  # another block under this name
    assert index.stats.orphan_blocks == 1
    index.store(A, GPU, 1, [2], pack(2))
    assert rows(index, 1, 2, 3) == {A: (2, 0, 0)}
    assert rows(index, 1, 2, 9) == {A: (2, 1, 0)}
    index.store(A, CPU, 77, [1], pack(1))  # the first block of all has nothing before it
    assert rows(index, 1, 2) == {}


def test_three_names_for_one_block(index: KvIndex) -> None:
    for first in (10, 20, 30):
        index.store(A, GPU, None, [first, first + 1, first + 2], pack(1, 2, 3))
    index.remove(A, GPU, [11])  # still written in the run, but no name of a held block
    index.store(A, GPU, 12, [11], pack(4))
    assert index.namespace_of(A, 11) is not None
    index.remove(A, GPU, [21, 31])
    assert rows(index, 1, 2, 3, 4) == {A: (1, 0, 0)}
    index.store(A, GPU, 10, [41], pack(2))
    assert rows(index, 1, 2, 3, 4) == {A: (4, 0, 0)}


def test_aliases_stay_right_through_split_and_merge(index: KvIndex) -> None:
    index.store(A, GPU, None, [10, 11, 12, 13], pack(1, 2, 3, 4))
    index.store(A, CPU, None, [20, 21, 22, 23], pack(1, 2, 3, 4))
    index.store(A, GPU, None, [30, 31, 32, 33], pack(1, 2, 3, 4))
    index.store(A, GPU, 31, [34], pack(9))
    assert index.stats.nodes == 3
    index.remove(A, GPU, [34])
    assert swept(index).stats.nodes == 1
    index.remove(A, GPU, [10, 11, 12, 13])
    assert rows(index, 1, 2, 3, 4) == {A: (4, 0, 0)}
    index.remove(A, GPU, [30, 33])
    assert rows(index, 1, 2, 3, 4) == {A: (0, 4, 0)}
    index.clear(A)
    assert swept(index).stats.nodes == 0


def test_a_held_block_is_not_taken_for_a_lost_one(index: KvIndex) -> None:
    index.store(A, GPU, None, [1, 2, 3], pack(1, 2, 3))
    index.store(A, CPU, None, [11, 12], pack(1, 2))
    index.store(A, CPU, 99, [3], pack(3))
    assert index.stats.orphan_blocks == 1
    assert rows(index, 1, 2, 3) == {A: (2, 0, 0)}


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


def test_a_name_means_what_was_announced_last(index: KvIndex) -> None:
    index.store(A, GPU, None, [1, 2, 3], pack(1, 2, 3))
    index.store(A, GPU, None, [1, 2, 3], pack(1, 2, 3))
    index.store(A, CPU, 1, [2], pack(2))
    index.store(A, GPU, None, [2], pack(9))
    assert rows(index, 1, 2, 3) == {A: (1, 0, 0)}
    assert rows(index, 9) == {A: (1, 0, 0)}
    assert index.remove(A, GPU, [2]) == 1  # the two references of old are gone
    assert rows(index, 9) == {}


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
