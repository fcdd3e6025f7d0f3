"""Workers whose engines repeat what prompts find: `kv_cache_report_mode` of their records."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec import UNSET

from indexer.core.hashing import block_hashes
from indexer.core.stream import EventStream
from indexer.types import WorkerRank
from select_service.types import WorkerPatch, WorkerSpec
from tests.indexer.encoding import encode_batch, message, removed, stored
from tests.select_service.core.whole_fleet import DEFAULT, Fleet

TOKENS = [*range(48)]


def stream_of(fleet: Fleet) -> EventStream:
    (stream,) = fleet.core.membership.streams()
    return stream


def publish(fleet: Fleet, number: int, *events: dict[str, Any]) -> None:
    stream_of(fleet).on_live(message(number, encode_batch([*events])), fleet.now)


def matched(fleet: Fleet) -> int:
    index = fleet.core.membership.partitions[DEFAULT].index
    slot = index.slot_of(WorkerRank(1, 0))
    assert slot is not None
    return index.find_matches(block_hashes(TOKENS, 16)).rows().get(slot, (0,))[0]


def told_twice_then_removed(fleet: Fleet) -> int:
    for number in range(2):
        publish(fleet, number, stored([1, 2, 3], TOKENS))
    assert matched(fleet) == 3
    publish(fleet, 2, removed([1, 2, 3]))
    return matched(fleet)


@pytest.mark.parametrize(("mode", "left"), [(None, 3), ("incremental", 3), ("full", 0)])
def test_the_record_says_how_a_block_told_again_is_counted(mode: Any, left: int) -> None:
    fleet = Fleet()
    record = fleet.worker(1, kv_cache_report_mode=mode)
    assert record.kv_cache_report_mode == (UNSET if mode is None else mode)
    assert told_twice_then_removed(fleet) == left


@pytest.mark.parametrize("how", ["registered", "patched"])
def test_another_mode_drops_what_was_counted_and_the_same_keeps_it(how: str) -> None:
    fleet = Fleet()
    fleet.worker(1)
    publish(fleet, 0, stored([1, 2, 3], TOKENS))
    before = stream_of(fleet)
    fleet.worker(1, kv_cache_report_mode="incremental")
    assert stream_of(fleet) is before
    assert matched(fleet) == 3
    if how == "patched":
        fleet.patch(1, kv_cache_report_mode="full")
    else:
        fleet.worker(1, kv_cache_report_mode="full")
    assert before.closed
    assert stream_of(fleet).reports_in_full
    assert matched(fleet) == 0
    assert told_twice_then_removed(fleet) == 0


@pytest.mark.parametrize("kind", [WorkerSpec, WorkerPatch])
def test_other_modes_are_refused(kind: type[Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"worker_id": 1, "kv_cache_report_mode": "sometimes"}, kind)
