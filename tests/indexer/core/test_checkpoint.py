"""One rank frozen and thawed: the same to its last name, whatever others do meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from indexer.core.checkpoint import BadCheckpoint, CheckpointRun, RankChanged
from indexer.core.dump import DumpBlock, DumpChange, DumpEvent, DumpKvEvent, DumpStored
from indexer.core.dump_reader import load_event
from indexer.core.index import KvIndex
from indexer.core.node import OrphanRoot
from indexer.core.packing import pack_u64
from indexer.types import Namespace, Tier, WorkerRank

MINE, OTHER = WorkerRank(1, 0), WorkerRank(2, 0)


def store(
    index: KvIndex,
    first: int,
    count: int,
    parent: int | None = None,
    *,
    rank: WorkerRank = MINE,
    tier: Tier = Tier.DEVICE,
    content: int | None = None,
    **more: Any,
) -> None:
    """Blocks named `first`… whose contents are counted from `content` on, the same by default."""
    names = [*range(first, first + count)]
    start = first if content is None else content
    local = pack_u64([*range(start, start + count)])
    index.attach(rank)
    index.store(rank, tier, parent, names, local, **more)
    index.check()


def portrait(index: KvIndex, rank: WorkerRank) -> dict[Any, Any]:
    """Everything that decides what the next event does, in no particular shape of the tree."""
    holder = index._ranks[rank]
    picture: dict[Any, Any] = {"home": holder.home, "blocks": holder.blocks}
    for node in holder.runs:
        edges, top = b"", node
        while top.parent is not None:
            edges, top = top.edge + edges, top.parent
        behind = top.parent_hash if isinstance(top, OrphanRoot) else None
        for position in range(node.size):
            end = len(edges) - len(node.edge) + 8 * (position + 1)
            several = node.names_at(holder.holder_id) or {}
            tiers = [node.held_on(holder.holder_id, tier) >> position & 1 for tier in Tier]
            name = holder.last_name(node, position)
            if any(tiers) or name:
                names = sorted(several.get(position, {name: 0}).items())
                picture[behind, edges[:end]] = (tiers, names, node.namespace)
    for tier, counts in enumerate(holder.counts):
        if counts is not None and (counts.copies or counts.foreign):
            picture["counts", tier] = (counts.copies, counts.foreign)
    if holder.hearsay is not None and any(holder.hearsay):
        picture["hearsay"] = holder.hearsay
    picture["where"] = set(holder.where)
    return picture


def frozen(index: KvIndex, between: Callable[[int], None] = lambda _: None) -> bytes:
    runs: list[CheckpointRun] = []
    for run in index.freeze(MINE):
        runs.append(run)
        between(len(runs))
        index.check()
    return msgspec.msgpack.encode(runs)


def thawed(index: KvIndex, runs: bytes, home: int | None) -> None:
    thaw = index.thaw(MINE, home)
    for run in msgspec.msgpack.decode(runs, type=list[CheckpointRun]):
        thaw.add(run)
        index.check()
        assert not index.find_matches(pack_u64([*range(100)])).rows().get(thaw.holder.slot)
    index.credit(MINE)
    index.check()


def survives(index: KvIndex, between: Callable[[int], None] = lambda _: None) -> KvIndex:
    """Freeze, thaw into an empty index and into a busy one; return the first."""
    before = portrait(index, MINE)
    runs = frozen(index, between)
    assert portrait(index, MINE) == before, "freezing changes nothing"
    home = index.holder(MINE).home
    empty, busy = KvIndex(16), KvIndex(16)
    for start in (1, 3, 50):
        store(busy, start, 9, rank=OTHER)
    for one in (empty, busy):
        thawed(one, runs, home)
        assert portrait(one, MINE) == before
    return empty


def test_chains_branches_and_tiers() -> None:
    index = KvIndex(16)
    store(index, 1, 20)
    store(index, 100, 5, 10)
    store(index, 200, 3, 20, tier=Tier.HOST_PINNED)
    store(index, 3, 4, 2, tier=Tier.DISK)
    store(index, 300, 2, namespace=Namespace("adapter", "salt"))
    copy = survives(index)
    assert copy.find_matches(pack_u64([*range(1, 21), *range(200, 203)])).rows() == {0: (20, 3, 0)}
    assert copy.namespace_of(MINE, 301) == Namespace("adapter", "salt")


def test_references_groups_and_second_names() -> None:
    index = KvIndex(16)
    store(index, 1, 6)
    store(index, 2, 3, 1)
    store(index, 5, 2, 4, group=1)
    store(index, 70, 2, 2, content=3)  # other names for the contents of 3 and 4
    store(index, 71, 1, 70, tier=Tier.DISK, content=4)
    copy = survives(index)
    assert copy.remove(MINE, Tier.DEVICE, [2]) == 1
    assert copy.find_matches(pack_u64([1, 2])).rows() == {0: (2, 0, 0)}, "stored twice"


def test_what_only_a_dump_has_told() -> None:
    index = KvIndex(16)
    blocks = [DumpBlock(block_hash=name, tokens_hash=name) for name in (1, 2, 3)]
    load_event(index, DumpEvent(1, DumpKvEvent(DumpChange(DumpStored(blocks)))))
    copy = survives(index)
    store(copy, 1, 3)
    copy.remove(MINE, Tier.DEVICE, [3])
    assert copy.find_matches(pack_u64([1, 2, 3])).rows() == {0: (2, 0, 0)}, "told twice, held once"


@pytest.mark.parametrize("when", [1, 2, 3])
def test_others_split_nodes_meanwhile(when: int) -> None:
    """Nodes that are frozen, and nodes that are not yet, lose their lower parts to new ones."""
    index = KvIndex(16)
    for start in (1, 100, 200, 300):
        store(index, start, 12)
    store(index, 500, 3, 12)  # a child of the first
    store(index, 600, 3, 211)

    def between(number: int) -> None:
        if number == when:
            for start in (1, 100, 200, 300):
                for depth in (9, 6, 3):  # again and again, from below
                    store(index, start, depth, rank=OTHER)
                    store(index, 1000 + start + depth, 1, start + depth - 1, rank=OTHER)

    survives(index, between)


def test_a_long_chain_of_nodes_told_from_its_end() -> None:
    index = KvIndex(16)
    for first in range(2000, 0, -10):
        store(index, first, 10, first - 1 if first > 10 else None)
    survives(index)


def test_a_rank_that_goes_ends_the_walk() -> None:
    index = KvIndex(16)
    for start in (1, 100, 200):
        store(index, start, 4)
    walk = index.freeze(MINE)
    next(walk)
    index.clear(MINE)
    with pytest.raises(RankChanged):
        next(walk)
    store(index, 1, 4)
    while index.sweep(100):
        pass
    index.check()


@pytest.mark.parametrize("has_blocks", [True, False])
def test_a_rank_that_is_cleared_before_the_proof_begins_anew(has_blocks: bool) -> None:
    index = KvIndex(16)
    store(index, 1, 4)
    runs = frozen(index)
    other = KvIndex(16)
    thaw = other.thaw(MINE, 0)
    if has_blocks:
        for run in msgspec.msgpack.decode(runs, type=list[CheckpointRun]):
            thaw.add(run)
    other.clear(MINE)
    assert not other.is_filled_by(thaw)
    other.credit(MINE)
    assert not other.find_matches(pack_u64([1])).rows()
    store(other, 1, 2)
    assert other.find_matches(pack_u64([1, 2, 3])).rows() == {0: (2, 0, 0)}


@pytest.mark.parametrize(
    "run",
    [
        CheckpointRun(1, -1, pack_u64([1]), pack_u64([1])),
        CheckpointRun(0, 0, pack_u64([1]), pack_u64([1])),
        CheckpointRun(0, -2, pack_u64([1]), pack_u64([1])),
        CheckpointRun(0, -1, pack_u64([1]), b""),
        CheckpointRun(0, -1, pack_u64([1]), pack_u64([1]), device=b"\x03"),
    ],
)
def test_runs_that_make_no_sense(run: CheckpointRun) -> None:
    index = KvIndex(16)
    with pytest.raises(BadCheckpoint):
        index.thaw(MINE, 0).add(run)
    index.clear(MINE)
    index.check()
