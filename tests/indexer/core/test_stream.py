"""One stream: garbage, ranks, and long batches in slices."""

from __future__ import annotations

import pytest

from indexer.core.index import KvIndex
from indexer.types import StreamLimits, WorkerRank
from tests.indexer.core.streams import LIMITS, RANK, Bench, batch, stream_of, tokens
from tests.indexer.encoding import encode_batch, message, removed, reply, stored

# -- messages ------------------------------------------------------------------------------------


@pytest.mark.parametrize("frames", [[], [b""], [b"", b"", b"", b""], [b"", b"123", b"x"]])
def test_wrong_frames_are_counted(frames: list[bytes]) -> None:
    bench = Bench()
    bench.stream.on_live(frames, 0.0)
    assert sum(bench.stream.tallies.bad_messages.values()) == 1
    bench.stream.on_replay(frames, 0.0)  # nobody asked


def test_the_end_marker_is_no_live_sequence() -> None:
    bench = Bench()
    bench.stream.on_live([b"", b"\xff" * 8, batch(0)], 0.0)
    bench.live(0)
    assert bench.asked() is None
    assert bench.blocks() == {0}


# -- ranks ---------------------------------------------------------------------------------------


def test_the_batch_knows_its_rank_better_if_the_worker_has_it() -> None:
    bench = Bench()
    bench.live(0, rank=1)
    bench.live(1, rank=7)
    bench.live(2, rank=0)
    assert bench.blocks(rank=WorkerRank(1, 1)) == {0}
    assert bench.blocks() == {1, 2}
    assert bench.stream.tallies.foreign_ranks == 1
    bench.live(0, engine="new")  # a restart forgets what the stream brought, wherever it went
    assert bench.blocks(rank=WorkerRank(1, 1)) == set()
    assert bench.blocks(engine="new") == {0}


# -- slices --------------------------------------------------------------------------------------


def test_a_long_batch_is_applied_in_slices_and_in_order() -> None:
    bench = Bench()
    many = list(range(1, 2_001))
    flat = [t % 1000 for t in range(16 * 2_000)]
    bench.live(0, encode_batch([stored(many, flat), removed([2_000]), stored([1], tokens(1))]))
    assert bench.busy()
    bench.live(1, encode_batch([removed(many[:-1])]))
    turns = 0
    while bench.busy():
        bench.stream.resume(0.0)
        turns += 1
    assert 2 <= turns <= 9
    assert {c for c in bench.index.counts[RANK].values() if c} == {1}, "only the second copy of 1"
    bench.stream.check()


def test_a_rank_that_leaves_while_its_batch_is_written() -> None:
    index = KvIndex(16)
    stream = stream_of(index, worker_ranks=range(2), limits=StreamLimits(blocks_per_turn=64))
    long = stored(list(range(1, 2_001)), [at % 977 for at in range(32_000)])
    stream.on_live(message(0, encode_batch([long], rank=1)), 0.0)
    busy = [stream.is_busy]
    index.detach(WorkerRank(1, 1))
    stream.worker_ranks = range(1)
    stream.resume(0.0)
    assert [*busy, stream.is_busy] == [True, False]
    assert index.slot_of(WorkerRank(1, 1)) is None
    stream.on_live(message(1, batch(1)), 0.0)
    assert index.stats.holdings[0] == 1
    while index.sweep(100):
        pass
    index.check()


def test_a_listener_that_never_resumes_cannot_fill_the_memory() -> None:
    bench = Bench()
    flat = [t % 1000 for t in range(16 * 1_000)]
    for seq in range(80):
        base = seq * 1_000
        bench.live(seq, encode_batch([stored(list(range(base + 1, base + 1_001)), flat)]))
        bench.live(seq)  # a copy or not: it must queue behind
    assert len(bench.stream.backlog) <= LIMITS.backlog_batches_max


@pytest.mark.parametrize("repeated", [900, 5_000])
def test_a_name_twice_in_a_long_event(repeated: int) -> None:
    bench = Bench()
    flat = [t % 1000 for t in range(16 * 1_000)]
    names = [*range(999), repeated if repeated < 999 else 5]
    bench.live(0, encode_batch([stored(names, flat, 5_000)]))
    assert bench.stream.tallies.events == {("stored", "map", "duplicate_hash"): 1}


def test_a_closed_stream_is_deaf_and_leaves_nothing() -> None:
    bench = Bench()
    bench.live(0, 2)
    bench.stream.close()
    bench.stream.close()
    assert bench.asked() is None
    bench.stream.on_live(message(1, batch(1)), 0.0)
    bench.stream.on_replay(reply(0, batch(0)), 0.0)
    bench.stream.on_timer(99.0)
    assert bench.blocks() == set()
