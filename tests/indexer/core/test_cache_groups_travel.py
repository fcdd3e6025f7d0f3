"""What limits a rank's matches goes with its blocks: snapshots, dumps, and what follows them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from indexer.core.cache_groups import GroupRule
from indexer.core.checkpoint import CheckpointRun
from indexer.core.cursor import StreamMemory
from indexer.core.dump import DumpEvent
from indexer.core.dump_reader import load_event
from indexer.core.hashing import block_hashes
from indexer.core.index import KvIndex
from indexer.types import WorkerRank
from tests.indexer.core.indices import CPU, GPU, pack, rows
from tests.indexer.core.streams import stream_of
from tests.indexer.core.test_cache_groups import Harness, full, mamba, prompt_of, side, sliding
from tests.indexer.encoding import encode_batch, message, removed, reply

RANK, OTHER = WorkerRank(1, 0), WorkerRank(2, 0)
STATE, WINDOW = GroupRule(1), GroupRule(2)


def hybrid() -> KvIndex:
    """Six blocks of full attention; two groups with one rule, one with another, two tiers."""
    index = KvIndex(4)
    index.attach(RANK)
    index.store(RANK, GPU, None, [*range(11, 17)], pack(*range(1, 7)))
    index.store(RANK, CPU, 15, [16], pack(6))
    index.groups.store(RANK, GPU, 1, [12, 13, 14], rule=WINDOW)
    index.groups.store(RANK, GPU, 2, [13, 14, 14, 15], rule=WINDOW)
    index.groups.store(RANK, GPU, 3, [14, 12], rule=STATE)
    index.groups.store(RANK, CPU, 3, [16], rule=STATE)
    index.groups.limit(RANK)
    return index


def same_matches(one: KvIndex, other: KvIndex) -> None:
    for length in range(1, 7):
        prompt = range(1, length + 1)
        assert rows(one, *prompt) == rows(other, *prompt)


def thawed(index: KvIndex, *, is_proven: bool = True) -> KvIndex:
    encoded = msgspec.msgpack.encode([*index.freeze(RANK)])
    other = KvIndex(4)
    thaw = other.thaw(RANK, index.holder(RANK).home)
    for run in msgspec.msgpack.decode(encoded, type=list[CheckpointRun]):
        thaw.add(run)
    assert rows(other, 1) == {}, "nobody sees it before it is proven"
    if is_proven:
        other.credit(RANK)
    return other


def loaded(index: KvIndex) -> KvIndex:
    other = KvIndex(4)
    for event in filter(None, index.dump()):
        load_event(other, msgspec.json.decode(msgspec.json.encode(event), type=DumpEvent))
    return other


@pytest.mark.parametrize("copy", [thawed, loaded])
def test_groups_travel_with_the_blocks(copy: Any) -> None:
    index = hybrid()
    assert rows(index, *range(1, 7)) == {RANK: (4, 0, 0)}
    other = copy(index)
    same_matches(index, other)
    for one in (index, other):
        one.groups.remove(RANK, GPU, 1, [14])
    same_matches(index, other)


def test_references_are_frozen_and_not_dumped() -> None:
    frozen, dumped = thawed(hybrid()), loaded(hybrid())
    for index in (frozen, dumped):
        index.groups.remove(RANK, GPU, 2, [14])
    assert rows(frozen, 1, 2, 3, 4) == {RANK: (4, 0, 0)}
    assert rows(dumped, 1, 2, 3, 4) == {}, "a dump has no counts: 3 has no state, 2 no window"


def test_what_a_dump_told_is_counted_once_when_the_engine_repeats_it() -> None:
    index = thawed(loaded(hybrid()))
    index.groups.store(RANK, GPU, 3, [14], rule=STATE)
    index.groups.remove(RANK, GPU, 3, [14])
    assert rows(index, 1, 2, 3, 4) == {}
    index.check()


def test_many_blocks_travel_in_pieces() -> None:
    index = KvIndex(4)
    index.attach(RANK)
    index.store(RANK, GPU, None, [1, 2], pack(1, 2))
    index.groups.store(RANK, GPU, 1, [*range(2, 5000)], rule=STATE)
    index.groups.limit(RANK)
    assert len([*index.freeze(RANK)]) > 5
    for other in (thawed(index), loaded(index)):
        assert other.room(RANK) == index.room(RANK)


def test_other_readers_of_a_dump_find_no_blocks_in_it() -> None:
    events = [event for event in filter(None, hybrid().dump()) if event.event.data != "cleared"]
    told = [
        msgspec.json.decode(msgspec.json.encode(one))["event"]["data"]["stored"] for one in events
    ]
    groups = [stored for stored in told if "cache_groups" in stored]
    assert groups
    assert all(stored["blocks"] == [] for stored in groups)
    assert all("cache_groups" not in stored for stored in told[: -len(groups)]), "they come last"


def test_a_rank_of_a_plain_model_dumps_nothing_more() -> None:
    index = KvIndex(4)
    for rank in (RANK, OTHER):
        index.attach(rank)
        index.store(rank, GPU, None, [1, 2], pack(1, 2))
    assert all(run.limiting is None for run in index.freeze(RANK))
    assert len([*filter(None, index.dump())]) == 2


def test_a_stream_goes_on_where_the_process_before_it_stopped() -> None:
    harness = Harness()
    harness.tell(full([101, 102, 103]), side([101, 102, 103], sliding(1, 9)), side([102], mamba(2)))
    before = harness.streams[0]
    encoded = msgspec.msgpack.encode(before.memory())
    memory = msgspec.msgpack.decode(encoded, type=StreamMemory)
    index = thawed(harness.index, is_proven=False)
    stream = stream_of(index)
    stream.recall(memory, 0.0)
    # removals name no kind: what group 2 is has been remembered
    payload = encode_batch([removed([102], group_idx=2), full([104], 103, first=13)], ts=9.0)
    stream.on_live(message(before.cursor.expected, payload), 0.0)
    assert not stream.is_unproven
    payload = encode_batch([side([101], mamba(2))], ts=10.0)
    stream.on_live(message(before.cursor.expected + 1, payload), 0.0)
    assert rows(index, *_locals(4)) == {RANK: (1, 0, 0)}


def _locals(blocks: int) -> list[int]:
    packed = block_hashes(prompt_of(blocks), 4)
    return [int.from_bytes(packed[at : at + 8], "little") for at in range(0, len(packed), 8)]


def test_a_memory_of_the_version_before_reads() -> None:
    old = msgspec.msgpack.encode([7, [1], None, 0, [], {0: True, 1: False}, 1.5])
    memory = msgspec.msgpack.decode(old, type=StreamMemory)
    assert memory.groups == {0: True, 1: False}
    assert memory.limiting == {}
    assert not memory.are_of_one_model
    run = msgspec.msgpack.encode([0, -1, pack(1), pack(11)])
    assert msgspec.msgpack.decode(run, type=CheckpointRun).limiting is None


def test_a_replica_knows_from_the_dump_what_removals_do_not_name() -> None:
    index = loaded(hybrid())
    stream = stream_of(index)
    for seq, gone in enumerate([999, 998, 14]):
        stream.on_live(message(seq, encode_batch([removed([gone], group_idx=3)], ts=seq)), 0.0)
    assert rows(index, 1, 2, 3, 4) == {}, "the state behind 4 is gone; behind 2 is no window"


def test_a_replay_repeats_what_was_missed_of_groups() -> None:
    harness = Harness()
    stream = stream_of(harness.index, has_replay=True)
    first = encode_batch([full([101, 102, 103]), side([103], mamba(1))], ts=0.0)
    stream.on_live(message(0, first), 0.0)
    lost = encode_batch([side([102], mamba(1)), removed([103], group_idx=1)], ts=1.0)
    last = encode_batch([full([104], 103, first=13)], ts=2.0)
    stream.on_live(message(2, last), 0.0)
    assert stream.request is not None
    for seq, payload in enumerate([first, lost]):
        stream.on_replay(reply(seq, payload), 0.0)
    while stream.is_busy:
        stream.resume(0.0)
    assert stream.kv_state == "current"
    assert rows(harness.index, *_locals(4)) == {RANK: (2, 0, 0)}
