"""What the index promises, one scenario at a time."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from indexer.core.dump import DumpBlock, DumpChange, DumpEvent, DumpKvEvent, DumpStored
from indexer.core.hashing import block_hashes
from indexer.core.index import KvIndex
from indexer.core.node import EDGE_BLOCKS_MAX
from indexer.types import Namespace, StreamLimits, Tier, WorkerRank
from tests.indexer.golden import golden

A, B, C = WorkerRank(0, 0), WorkerRank(0, 1), WorkerRank(1, 0)
GPU, CPU, DISK, FAR = Tier


def pack(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


@pytest.fixture
def index() -> KvIndex:
    index = KvIndex(16)
    for rank in (A, B, C):
        index.attach(rank)
    return index


def rows(index: KvIndex, *prompt: int) -> dict[WorkerRank | None, tuple[int, int, int]]:
    index.check()
    found = index.find_matches(pack(*prompt)).rows()
    return {index.rank_of(slot): row for slot, row in found.items()}


def swept(index: KvIndex) -> KvIndex:
    while index.sweep(10):
        index.check()
    index.check()
    return index


# ---- the scripted cases of the specification, without the wire

TIER_OF = {None: GPU, "GPU": GPU, "CPU": CPU, "CPU_TIER1": CPU, "STORAGE": DISK}
CASES = [
    case
    for case in golden("events/tier_semantics.json")["cases"]
    if case["group"] in {"tiers", "interior", "refcount", "dp", "placeholder"}
]


def stream(name: str) -> WorkerRank:
    worker, rank = name.split("/")
    return WorkerRank(int(worker), int(rank))


def apply(index: KvIndex, rank: WorkerRank, event: dict[str, Any]) -> None:
    index.attach(rank)
    tier, names = TIER_OF[event["medium"]], event["block_hashes"]
    if event["type"] == "BlockRemoved":
        index.remove(rank, tier, names)
    elif not event["token_ids"]:
        index.mark_on_tier(rank, tier, names)
    else:
        local = block_hashes(event["token_ids"], event["block_size"])
        index.store(rank, tier, event["parent_block_hash"], names, local)


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_scripted_case(case: dict[str, Any]) -> None:
    index = KvIndex(16)
    for step in case["steps"]:
        for event in step["events"]:
            apply(index, stream(step["stream"]), event)
            index.check()
    for check in case["checks"]:
        found = index.find_matches(block_hashes(check["query"]["token_ids"], 16)).rows()
        for name, (device, host, disk) in check["expect"].items():
            row = found.get(index.attach(stream(name)), (0, 0, 0))
            assert row == (device, host - device, disk - host)


# ---- tiers


def test_a_tier_never_goes_back_to_an_earlier_one(index: KvIndex) -> None:
    index.store(A, CPU, None, [1, 2], pack(1, 2))
    index.store(A, DISK, 2, [3], pack(3))
    index.store(A, CPU, 3, [4], pack(4))
    assert rows(index, 1, 2, 3, 4) == {A: (0, 2, 1)}


def test_external_goes_on_after_disk_and_counts_with_it(index: KvIndex) -> None:
    index.store(A, GPU, None, [1], pack(1))
    index.store(A, DISK, 1, [2, 3], pack(2, 3))
    index.store(A, FAR, 3, [4], pack(4))
    index.store(A, DISK, 4, [5], pack(5))
    assert rows(index, 1, 2, 3, 4, 5) == {A: (1, 0, 3)}


def test_host_blocks_wait_for_device_blocks_that_come_back(index: KvIndex) -> None:
    index.store(A, GPU, None, [1, 2], pack(1, 2))
    index.remove(A, GPU, [1, 2])
    index.store(A, CPU, 2, [3, 4], pack(3, 4))
    assert rows(index, 1, 2, 3, 4) == {}
    index.store(A, GPU, None, [1, 2], pack(1, 2))
    assert rows(index, 1, 2, 3, 4) == {A: (2, 2, 0)}


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
    columns = np.zeros((3, index.capacity))
    matches = index.find_matches(pack(1, 2, 3, 4, 5))
    assert matches.fill(*columns)
    assert columns.T.tolist() == [[2, 1, 2], [0, 0, 0], [2, 0, 0]]
    assert matches.groups == [(2, 0b101)]
    columns = np.zeros((3, index.capacity))
    assert not index.find_matches(pack(1)).fill(*columns)
    assert columns.T.tolist() == [[1, 0, 0], [0, 0, 0], [1, 0, 0]]
    assert matches.slots(0b101).tolist() == [0, 2]
    assert index.find_matches(pack(9)).empty
    assert index.find_matches(b"").empty


# ---- names and counts


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


# ---- orphans


def test_an_orphan_is_no_root(index: KvIndex) -> None:
    index.store(A, GPU, 99, [1, 2], pack(1, 2))
    assert rows(index, 1, 2) == {}
    assert index.stats.orphan_blocks == 2
    index.store(A, GPU, 2, [3], pack(3))  # behind an orphan: an orphan
    index.store(A, GPU, None, [99], pack(7))
    assert rows(index, 7, 1, 2, 3) == {A: (4, 0, 0)}
    assert index.stats.orphan_blocks == 0


def test_a_block_cannot_follow_itself(index: KvIndex) -> None:
    index.store(A, GPU, 99, [1], pack(1))
    assert index.store(A, GPU, 99, [98, 99], pack(2, 3)) == 0
    assert index.store(A, GPU, None, [5, 1, 5], pack(5, 6, 7)) == 0
    index.store(A, GPU, None, [99], pack(7))
    assert rows(index, 7, 1) == {A: (2, 0, 0)}


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
    index.load(DumpEvent(A.worker_id, DumpKvEvent(DumpChange(stored), dp_rank=A.dp_rank)))


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


def test_orphans_of_one_rank_do_not_wait_for_another(index: KvIndex) -> None:
    index.store(A, GPU, 99, [1], pack(1))
    index.store(B, GPU, None, [99], pack(7))
    assert rows(index, 7, 1) == {B: (1, 0, 0)}


def test_orphans_arrive_in_any_order(index: KvIndex) -> None:
    chain = list(range(100, 160))
    order = chain[1:]
    random.Random(3).shuffle(order)
    for name in [*order, chain[0]]:
        parent = name - 1 if name > chain[0] else None
        index.store(A, random.Random(name).choice([GPU, CPU]), parent, [name], pack(name))
        index.check()
    assert index.stats.orphan_blocks == 0
    index.store(A, GPU, None, chain, pack(*chain))
    assert rows(index, *chain) == {A: (60, 0, 0)}


def test_a_chain_told_backwards(index: KvIndex) -> None:
    salted = Namespace(cache_salt="salt")
    for name in range(400, 0, -1):
        index.store(A, GPU, name, [name + 1], pack(name + 1))
    index.store(A, CPU, None, [1], pack(1), namespace=salted)
    assert rows(index, *range(1, 402)) == {A: (0, 1, 0)}
    assert index.namespace_of(A, 401) == salted
    assert index.stats.orphan_blocks == 0
    index.store(A, GPU, None, [1], pack(1))
    assert rows(swept(index), *range(1, 402)) == {A: (401, 0, 0)}
    assert index.stats.nodes == 2  # block 1 is on the host as well


def test_orphans_join_content_that_is_there_already(index: KvIndex) -> None:
    for name, parent in ((52, 51), (53, 52), (54, 53), (61, 51)):
        index.store(A, GPU, parent, [name], pack(name))
    index.store(B, GPU, None, [1, 2, 3, 4], pack(50, 51, 52, 53))
    index.store(B, GPU, 3, [9], pack(70))
    index.store(A, GPU, None, [50, 51], pack(50, 51))
    assert rows(index, 50, 51, 52, 53, 54) == {A: (5, 0, 0), B: (4, 0, 0)}
    assert rows(index, 50, 51, 61) == {A: (3, 0, 0), B: (2, 0, 0)}


def test_reference_counts_survive_the_wait(index: KvIndex) -> None:
    for _ in range(2):
        index.store(A, GPU, 99, [1], pack(1))
    index.store(A, GPU, None, [99], pack(7))
    index.remove(A, GPU, [1])
    assert rows(index, 7, 1) == {A: (2, 0, 0)}
    index.remove(A, GPU, [1])
    assert rows(index, 7, 1) == {A: (1, 0, 0)}


def test_a_store_that_brings_parent_and_orphans_is_their_second(index: KvIndex) -> None:
    """An engine that recomputes a prompt stores what was lost, and again what it still held."""
    index.store(A, GPU, 11, [12, 13], pack(2, 3))  # whose parent nobody has heard of
    index.store(A, GPU, None, [11, 12, 13], pack(1, 2, 3))
    index.remove(A, GPU, [13])  # of two
    assert rows(index, 1, 2, 3) == {A: (3, 0, 0)}
    index.remove(A, GPU, [13, 12])
    assert rows(index, 1, 2, 3) == {A: (2, 0, 0)}
    index.remove(A, GPU, [12])
    assert rows(index, 1, 2, 3) == {A: (1, 0, 0)}


def test_what_waits_behind_a_hole_is_told_again(index: KvIndex) -> None:
    index.store(A, DISK, 11, [12, 13], pack(2, 3))
    index.remove(A, DISK, [12])
    index.store(A, GPU, None, [11, 12, 13], pack(1, 2, 3))
    index.remove(A, GPU, [13])
    assert rows(index, 1, 2, 3) == {A: (2, 0, 1)}


def test_orphans_that_are_still_to_be_moved_are_told_again(index: KvIndex) -> None:
    """A long event comes in pieces, and healing waits for the last of them."""
    index.store(A, GPU, 11, [12, 13], pack(2, 3))
    index.store(A, GPU, None, [11], pack(1), heals=False)
    index.store(A, GPU, 11, [12, 13], pack(2, 3), heals=False)
    while index.heal(A):
        index.check()
    index.remove(A, GPU, [12, 13])
    assert rows(index, 1, 2, 3) == {A: (3, 0, 0)}


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


def test_a_circle_of_parents_has_no_beginning(index: KvIndex) -> None:
    index.store(A, GPU, 1, [2], pack(2))
    index.store(A, GPU, 2, [1], pack(1))
    assert rows(index, 1, 2) == rows(index, 2, 1) == {}
    index.store(A, GPU, None, [1], pack(5))
    assert rows(index, 5, 2) == {A: (2, 0, 0)}


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


def test_clear_is_of_one_rank_and_of_all_tiers(index: KvIndex) -> None:
    for rank in (A, B, C):
        index.store(rank, GPU, None, [1, 2], pack(1, 2))
        index.store(rank, CPU, 2, [3], pack(3))
        index.store(rank, DISK, 9, [4], pack(3))
    index.clear(A)
    assert set(rows(index, 1, 2, 3)) == {B, C}
    index.store(A, GPU, None, [1], pack(1))  # before anything was swept
    assert rows(index, 1, 2, 3)[A] == (1, 0, 0)
    index.detach(B)
    assert set(rows(index, 1, 2, 3)) == {A, C}
    swept(index)
    assert rows(index, 1, 2, 3) == {A: (1, 0, 0), C: (2, 1, 0)}


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


# ---- shape and memory


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
