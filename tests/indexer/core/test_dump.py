"""The index as a list of events: the reference's shape out, the reference's dialects in."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

import indexer.core.dump as dump_module
from indexer.core.dump import DumpEvent
from indexer.core.dump_reader import load_event
from indexer.core.index import KvIndex
from indexer.types import Namespace, Tier, WorkerRank
from tests.indexer.core.indices import CPU, DISK, FAR, GPU, pack

A, B = WorkerRank(1, 0), WorkerRank(2, 3)


@pytest.fixture
def index() -> KvIndex:
    index = KvIndex(16)
    index.attach(A)
    index.attach(B)
    return index


def dumped(index: KvIndex) -> list[dict[str, Any]]:
    index.check()
    return [msgspec.json.decode(msgspec.json.encode(event)) for event in index.dump()]


def row(
    tier: str, event_id: int, parent: int | None, *blocks: tuple[int, int], rank: WorkerRank = A
) -> dict[str, Any]:
    stored = {
        "parent_hash": parent,
        "start_position": None,
        "blocks": [
            {"block_hash": name, "tokens_hash": local, "mm_extra_info": None}
            for name, local in blocks
        ],
    }
    return {
        "worker_id": rank.worker_id,
        "storage_tier": tier,
        "event": {"event_id": event_id, "data": {"stored": stored}, "dp_rank": rank.dp_rank},
    }


def decoded(events: list[dict[str, Any]]) -> list[DumpEvent]:
    return msgspec.json.decode(msgspec.json.encode(events), type=list[DumpEvent])


def loaded(events: list[dict[str, Any]]) -> KvIndex:
    index = KvIndex(16)
    for event in decoded(events):
        load_event(index, event)
    index.check()
    return index


def found(index: KvIndex, *prompt: int) -> dict[WorkerRank | None, tuple[int, int, int]]:
    rows = index.find_matches(pack(*prompt)).rows()
    return {index.rank_of(slot): row for slot, row in rows.items()}


def test_what_the_reference_dumps_after_holes(index: KvIndex) -> None:
    """Transcript 13: device 0-2, host 3-4, disk 5; then host 4 and device 1 go."""
    index.store(A, GPU, None, [1000, 1001, 1002], pack(1, 2, 3))
    index.store(A, CPU, 1002, [1003, 1004], pack(4, 5))
    index.store(A, DISK, 1004, [1005], pack(6))
    index.store(A, GPU, 1002, [1003], pack(4))
    index.remove(A, CPU, [1004])
    index.remove(A, GPU, [1003])
    index.remove(A, GPU, [1001])
    assert dumped(index) == [
        row("device", 0, None, (1000, 1)),
        row("host_pinned", 0, 1002, (1003, 4)),
        row("disk", 0, 1004, (1005, 6)),
    ]


def test_shared_runs_are_dumped_per_rank(index: KvIndex) -> None:
    index.store(A, GPU, None, [1000, 1001, 1002], pack(1, 2, 3))
    index.store(B, GPU, None, [2000, 2001], pack(1, 2))
    index.store(B, GPU, 2001, [2002], pack(9))
    index.store(B, FAR, 2002, [2003], pack(10))
    assert dumped(index) == [
        row("device", 0, None, (1000, 1), (1001, 2)),
        row("device", 1, None, (2000, 1), (2001, 2), rank=B),
        row("device", 2, 2001, (2002, 9), rank=B),
        row("device", 3, 1001, (1002, 3)),
        row("external", 0, 2002, (2003, 10), rank=B),
    ]


def test_two_names_for_one_block_are_both_dumped(index: KvIndex) -> None:
    index.store(A, GPU, None, [1, 2], pack(1, 2))
    index.store(A, GPU, None, [11, 12], pack(1, 2))
    copy = loaded(dumped(index))
    assert copy.remove(A, GPU, [1, 2]) == 2
    assert found(copy, 1, 2) == {A: (2, 0, 0)}
    assert copy.remove(A, GPU, [11, 12]) == 2
    assert found(copy, 1, 2) == {}


def test_orphans_travel_on_lower_tiers(index: KvIndex) -> None:
    index.store(A, CPU, 7, [8, 9], pack(8, 9))
    assert dumped(index) == [
        row("host_pinned", 0, 7, (8, 8)),
        row("host_pinned", 1, 8, (9, 9)),
    ]
    copy = loaded(dumped(index))
    copy.store(A, GPU, None, [7], pack(7))
    assert found(copy, 7, 8, 9) == {A: (1, 2, 0)}


def test_a_namespace_travels(index: KvIndex) -> None:
    namespace = Namespace("adapter", "salt")
    index.store(A, GPU, None, [1], pack(1), namespace=namespace)
    index.store(A, CPU, 1, [2], pack(2))
    (event, _) = events = dumped(index)
    assert event["event"]["data"]["stored"]["lora_name"] == "adapter"
    assert event["event"]["data"]["stored"]["cache_salt"] == "salt"
    assert loaded(events).namespace_of(A, 2) == namespace


def test_the_first_live_event_names_the_group_of_loaded_blocks(index: KvIndex) -> None:
    index.store(A, GPU, None, [1, 2], pack(1, 2), group=3)
    events = dumped(index)
    copy = loaded(events)
    assert copy.remove(A, GPU, [2], group=3) == 1
    copy.check()
    assert found(copy, 1, 2) == {A: (1, 0, 0)}
    copy = loaded(events)
    copy.store(A, GPU, 2, [5], pack(5), group=3)
    assert copy.remove(A, GPU, [2], group=0) == 0
    assert copy.remove(A, GPU, [2], group=3) == 1
    for event in decoded(events):
        load_event(copy, event)  # told twice is held once
    assert copy.remove(A, GPU, [1, 1], group=3) == 1
    copy.check()


@pytest.mark.parametrize("tier", [GPU, CPU])
def test_a_dump_stops_where_it_has_nothing_to_tell_for_long(
    index: KvIndex, tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tree is gone through once for each tier, most of which nobody uses."""
    for name in range(500):
        index.store(A, tier, None, [name], pack(name))
    visited, visits, views = 0, dump_module._views_of, dump_module._view

    def counted(*args: Any) -> Any:
        nonlocal visited
        visited += 1
        return visits(*args)

    def viewed(*args: Any) -> Any:
        nonlocal visited
        visited += 1
        return views(*args)

    monkeypatch.setattr(dump_module, "_views_of", counted)
    monkeypatch.setattr(dump_module, "_view", viewed)
    told, most = 0, 0
    for event in index.dump_in_steps():
        most, visited = max(most, visited), 0
        told += event is not None
    assert told == 500
    assert most <= 2 * dump_module.NODES_PER_STEP


def test_nobody_gets_the_id_of_a_rank_that_left_during_a_dump(index: KvIndex) -> None:
    index.store(A, GPU, None, [1, 2], pack(1, 2))
    index.store(B, GPU, None, [1], pack(1))
    index.store(A, GPU, 1, [3], pack(3))
    dump = index.dump()
    next(dump)
    before = len(index.tree.holders)
    index.detach(A)
    while index.sweep(10):
        pass
    index.attach(WorkerRank(7, 7))
    assert len(index.tree.holders) == before + 1
    assert {event.worker_id for event in dump} <= {B.worker_id}
    index.attach(WorkerRank(7, 8))
    assert len(index.tree.holders) == before + 1
    index.check()


def test_a_moved_name_is_no_parent(index: KvIndex) -> None:
    """What followed the old block must not be told behind the new one."""
    index.store(A, CPU, None, [1, 2, 3], pack(1, 2, 3))
    index.store(A, CPU, None, [2], pack(9))
    copy = loaded(dumped(index))
    assert found(copy, 9, 3) == {A: (0, 1, 0)}
    assert found(copy, 1, 2, 3) == {A: (0, 1, 0)}
    index.store(A, CPU, None, [5, 6], pack(5, 6))
    index.store(B, CPU, None, [5, 7], pack(5, 7))  # splits behind 5
    index.store(A, CPU, None, [5], pack(8))
    copy = loaded(dumped(index))
    assert found(copy, 8, 6) == {A: (0, 1, 0)}


def test_orphans_that_move_during_a_dump_are_not_told_twice(index: KvIndex) -> None:
    index.store(B, CPU, None, [50, 51, 52], pack(1, 2, 3))
    for parent, name in ((60, 61), (51, 52), (61, 62), (62, 63)):
        index.store(A, CPU, parent, [name], pack(name if name > 60 else 3))
    dump = index.dump()
    told = [next(dump) for _ in range(4)]
    index.store(A, CPU, None, [50, 51], pack(1, 2))
    index.store(A, CPU, 59, [60], pack(60))
    index.check()
    told += list(dump)
    names = [
        block.block_hash
        for event in told
        if event.worker_id == A.worker_id and event.event.data != "cleared"
        for block in event.event.data.stored.blocks  # type: ignore[union-attr]
    ]
    assert sorted(names) == sorted(set(names))
    assert {61, 62, 63} <= set(names)


def test_parents_are_told_by_names_the_reader_has(index: KvIndex) -> None:
    """Block 2 has one name on disk and one on the device; its child is told behind the latter."""
    index.store(A, DISK, None, [1, 3], pack(1, 2))
    index.store(A, GPU, None, [11, 12, 10], pack(1, 2, 3))
    index.store(A, CPU, 12, [10], pack(3))
    assert found(loaded(dumped(index)), 1, 2, 3) == {A: (3, 0, 0)}
    index.store(A, GPU, 12, [20], pack(9))  # now a branch, so that the child is in another node
    assert found(loaded(dumped(index)), 1, 2, 3) == {A: (3, 0, 0)}


def test_merging_waits_for_the_dump(index: KvIndex) -> None:
    index.store(A, GPU, None, [1, 2, 3, 4], pack(1, 2, 3, 4))
    index.store(A, GPU, 2, [5], pack(5))
    dump = index.dump()
    next(dump)
    index.remove(A, GPU, [5])
    index.sweep(10)
    assert index.stats.nodes == 2
    assert [event.event.event_id for event in dump] == [1]
    index.sweep(10)
    assert index.stats.nodes == 1
    index.check()


def test_what_a_dump_and_then_the_engine_tell_is_held_once() -> None:
    """A replay after recovery tells the history again of which the dump is a moment."""
    source = KvIndex(16)
    source.attach(A)
    source.store(A, GPU, None, [1, 2, 3], pack(1, 2, 3))
    source.store(A, Tier.HOST_PINNED, 3, [4], pack(4))
    for group in (0, 3):
        copy = loaded(dumped(source))
        copy.store(A, GPU, None, [1, 2, 3], pack(1, 2, 3), group=group)
        copy.store(A, Tier.HOST_PINNED, 3, [4], pack(4), group=group)
        copy.store(A, GPU, None, [1], pack(1), group=group)  # really a second time
        copy.check()
        assert copy.remove(A, GPU, [1, 2, 3], group=group) == 3
        assert copy.remove(A, Tier.HOST_PINNED, [4], group=group) == 1
        assert copy.remove(A, GPU, [1, 2], group=group) == 1
        assert copy.stats.holdings == (0, 0, 0, 0)
        copy.store(A, GPU, None, [2], pack(2), group=group)
        copy.store(A, GPU, None, [2], pack(2), group=group)
        assert copy.remove(A, GPU, [2, 2], group=group) == 2
        copy.check()


def test_what_importers_must_accept() -> None:
    blocks = [{"block_hash": name, "tokens_hash": name} for name in (1, 2, 2**64 - 1)]
    odd = {"block_hash": 3, "tokens_hash": 3, "mm_extra_info": {"mm_objects": []}, "new": 1}
    index = loaded(
        [
            {"worker_id": 1, "event": {"data": {"stored": {"blocks": blocks}}}},
            {"worker_id": 1, "event": {"event_id": 4, "data": {"stored": {"blocks": [odd]}}}},
            {
                "worker_id": 1,
                "storage_tier": "disk",
                "future": [],
                "event": {
                    "data": {
                        "stored": {"parent_hash": 4, "blocks": [blocks[0] | {"block_hash": 5}]}
                    }
                },
            },
            {
                "worker_id": 1,
                "storage_tier": "disk",
                "event": {
                    "data": {
                        "stored": {
                            "parent_hash": 2,
                            "start_position": 1,
                            "blocks": [odd | {"block_hash": 4}],
                        }
                    }
                },
            },
            {"worker_id": 1, "event": {"data": {"removed": {"block_hashes": [2**64 - 1, 77]}}}},
            {"worker_id": 1, "event": {"dp_rank": 1, "data": {"stored": {"blocks": blocks}}}},
            {"worker_id": 1, "event": {"dp_rank": 1, "data": "cleared"}},
            {"worker_id": 1, "event": {"data": {}}},
        ]
    )
    assert found(index, 1, 2, 2**64 - 1) == {A: (2, 0, 0)}
    assert found(index, 1, 2, 3, 1) == {A: (2, 0, 2)}
    assert found(index, 3) == {A: (1, 0, 0)}
    assert index.slot_of(WorkerRank(1, 1)) is not None
