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
from tests.indexer.core.indices import CPU, DISK, GPU, pack

A, B = WorkerRank(1, 0), WorkerRank(2, 3)


@pytest.fixture
def index() -> KvIndex:
    index = KvIndex(16)
    index.attach(A)
    index.attach(B)
    return index


def dumped(index: KvIndex) -> list[dict[str, Any]]:
    index.check()
    return [msgspec.json.decode(msgspec.json.encode(event)) for event in filter(None, index.dump())]


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


def test_two_names_for_one_block_are_both_dumped(index: KvIndex) -> None:
    index.store(A, GPU, None, [1, 2], pack(1, 2))
    index.store(A, GPU, None, [11, 12], pack(1, 2))
    copy = loaded(dumped(index))
    assert copy.remove(A, GPU, [1, 2]) == 2
    assert found(copy, 1, 2) == {A: (2, 0, 0)}
    assert copy.remove(A, GPU, [11, 12]) == 2
    assert found(copy, 1, 2) == {}


def test_a_namespace_travels(index: KvIndex) -> None:
    namespace = Namespace("adapter", "salt")
    index.store(A, GPU, None, [1], pack(1), namespace=namespace)
    index.store(A, CPU, 1, [2], pack(2))
    (event, _) = events = dumped(index)
    assert event["event"]["data"]["stored"]["lora_name"] == "adapter"
    assert event["event"]["data"]["stored"]["cache_salt"] == "salt"
    assert loaded(events).namespace_of(A, 2) == namespace


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
    for event in index.dump():
        most, visited = max(most, visited), 0
        told += event is not None
    assert told == 500
    assert most <= 2 * dump_module.NODES_PER_STEP


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
