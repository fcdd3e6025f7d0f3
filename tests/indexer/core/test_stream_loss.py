"""What is lost: how it is known, found by asking in silence, and read again."""

from __future__ import annotations

from typing import Any

import pytest

from indexer.types import StreamLimits, WorkerRank
from tests.indexer.core.streams import Bench, batch, tokens
from tests.indexer.encoding import CLEARED, encode_batch, stored

# -- loss ----------------------------------------------------------------------------------------


def test_keep_keeps_and_says_so_until_a_clear() -> None:
    bench = Bench(has_replay=False)
    bench.live(0, 3)
    assert bench.blocks() == {0, 3}
    assert (bench.state(), bench.stream.lost_batches) == ("uncertain", 2)
    bench.live(4, encode_batch([CLEARED]))
    assert (bench.state(), bench.stream.lost_batches) == ("current", 0)
    assert bench.stream.tallies.lost_batches == 2


def test_a_clear_of_one_rank_of_two_proves_nothing() -> None:
    bench = Bench(has_replay=False)
    bench.live(0, rank=1)
    bench.live(3)
    bench.live(4, encode_batch([CLEARED]))
    assert bench.state() == "uncertain"


def test_a_clear_is_for_the_rank_that_the_batch_names() -> None:
    bench = Bench()
    bench.live(0)
    bench.live(1, rank=1)
    bench.live(2, encode_batch([CLEARED], rank=1))
    assert bench.blocks() == {0}
    assert bench.blocks(rank=WorkerRank(1, 1)) == set()


def test_joining_late_without_replay() -> None:
    bench = Bench(has_replay=False)
    bench.live(7, 8)
    assert bench.blocks() == {7, 8}
    assert bench.stream.lost_batches == 7


def test_a_past_that_is_gone_is_asked_for_twice() -> None:
    bench = Bench()
    bench.live(0, 4)
    bench.reply(3)
    assert bench.state() == "uncertain"
    for told in (1, 2):
        bench.wait(10.1)
        assert bench.asked() == 0
        bench.reply(3)
        assert bench.asked() is None
        assert bench.outcomes["past_gone"] == told
    assert bench.blocks() == {0, 3, 4}
    bench.wait(10.1)
    assert bench.asked() == 4
    bench.reply(4)
    bench.end()
    bench.stream.on_reconnect(bench.now)
    bench.end()  # a buffer that has nothing at all: another engine
    assert bench.asked() == 0
    bench.end()
    assert bench.blocks() == set()


# -- silence -------------------------------------------------------------------------------------


def test_polling_can_be_off_and_waits_its_turn() -> None:
    bench = Bench(limits=StreamLimits(poll_after_s=0))
    bench.live(0)
    bench.wait(1_000)
    assert bench.asked() is None
    bench = Bench()
    bench.live(0)
    bench.now = 50.0
    bench.stream.on_timer(bench.now, may_poll=False)
    assert bench.asked() is None
    bench = Bench(has_replay=False)
    bench.live(0)
    bench.wait(1_000)
    assert bench.asked() is None


def awaits_past(bench: Bench) -> bool:
    return bench.stream.awaits_past


def test_the_past_of_an_idle_engine_is_asked_for_once_it_is_connected() -> None:
    bench = Bench()
    assert awaits_past(bench)
    bench.stream.on_timer(bench.now)
    assert bench.asked() is None, "nobody is there yet"
    bench.stream.on_connect()
    assert bench.stream.due(bench.now) <= bench.now
    bench.stream.on_timer(bench.now, may_poll=False)
    assert bench.asked() is None, "too many are asked at present"
    bench.wait(0.25)
    assert bench.asked() == 0
    assert awaits_past(bench)
    bench.reply(0, 1)
    bench.end()
    assert bench.blocks() == {0, 1}
    assert not awaits_past(bench)
    bench.stream.on_connect()
    bench.wait(0.25)
    assert bench.asked() is None, "only once"


@pytest.mark.parametrize(
    "options", [{"has_replay": False}, {"limits": StreamLimits(poll_after_s=0)}, {}]
)
def test_a_past_that_is_not_asked_for_is_not_awaited(options: Any) -> None:
    bench = Bench(**options)
    if not options:
        bench.live(0)  # the first batch of all
    assert not awaits_past(bench)
    bench.stream.on_connect()
    bench.wait(0.25)
    assert bench.asked() is None


def test_a_live_batch_overtakes_a_poll() -> None:
    bench = Bench()
    bench.live(0)
    bench.wait(10.1)
    bench.live(1)
    assert bench.asked() is None
    assert bench.outcomes == {"overtaken": 1}
    bench.wait(10.1)
    bench.live(3)  # turns the poll into the mending of a gap
    assert bench.blocks() == {0, 1}
    bench.reply(1, 2)
    assert bench.blocks() == {0, 1, 2, 3}


def test_an_engine_is_not_silent_while_its_last_words_are_written() -> None:
    bench = Bench()
    bench.live(0, 3)
    request = bench.stream.request
    bench.reply(0)
    many = list(range(100, 4_100))
    bench.reply(1, encode_batch([stored(many, [t % 977 for t in range(16 * 4_000)])], ts=1.0))
    for _ in range(3):
        bench.wait(1.1)
        assert bench.busy()
        assert bench.stream.request is request
    bench.reply(2)
    assert bench.outcomes == {"complete": 1}


# -- a doubtful index is read again -----------------------------------------------------------


def test_it_is_read_again_while_the_engine_goes_on() -> None:
    bench = Bench()
    bench.live(*range(3))
    assert bench.stream.reread(bench.now) == "asked"
    assert bench.stream.reread(bench.now) == "later"
    assert bench.asked() == 0
    bench.live(3, 4)
    assert bench.blocks() == {0, 1, 2}, "what is held goes when there is something in its place"
    for seq in range(2):
        bench.reply(seq)
        assert bench.blocks() == {0, 1, 2}, "not before it reaches what is known"
    bench.reply(*range(2, 5))
    bench.end()
    assert bench.blocks() == {0, 1, 2, 3, 4}
    assert bench.state() == "current"
    assert bench.outcomes == {"complete": 1}
    bench.live(5)
    assert bench.blocks() == {0, 1, 2, 3, 4, 5}


def test_a_busy_stream_that_cannot_be_read_again_is_not_held_back_for_ever() -> None:
    bench = Bench()
    bench.live(0)
    assert bench.stream.reread(bench.now) == "asked"  # of a mute endpoint
    bench.live(*range(1, 60))
    assert bench.outcomes == {"backlog_full": 1}
    assert bench.blocks() == set(range(60)), "nothing is lost"
    assert bench.stream.reread(bench.now) == "later", "not the next moment again"
    assert not bench.stream.is_replaying


def test_whoever_cannot_be_read_again_keeps_what_it_has_and_goes_on() -> None:
    mute = Bench()
    mute.live(0)
    assert mute.stream.reread(mute.now) == "asked"
    mute.live(1)
    for _ in range(4):
        mute.wait(1.1)
    assert mute.blocks() == {0, 1}
    assert mute.state() == "current"
    assert mute.stream.reread(mute.now) == "later", "the endpoint is left alone for a while"
    gone = Bench()
    gone.live(0)
    for seq in (4, 5):  # the engine's buffer begins behind batch 0
        gone.now += 100.0
        assert gone.stream.reread(gone.now) == "asked"
        gone.live(seq - 3)
        gone.reply(seq)
        assert gone.blocks() == set(range(seq - 2))
    gone.now += 100.0
    assert gone.stream.reread(gone.now) == "past_gone"
    gone.stream.forget_blocks()
    assert gone.blocks() == set()
    gone.live(3)
    assert gone.blocks() == {3}
    assert Bench(has_replay=False).stream.reread(0.0) == "no_replay"


def test_what_brought_a_neighbours_blocks_is_not_read_again() -> None:
    bench = Bench()
    bench.live(0)
    bench.live(1, batch(1, rank=1))
    assert bench.stream.reread(bench.now) == "shared"
    assert bench.stream.request is None


def offset(bench: Bench) -> float | None:
    return bench.stream.delivery.offset_s if bench.stream.cursor.is_live else None


def test_how_late_batches_come_is_known_of_live_ones_only() -> None:
    bench = Bench()
    assert offset(bench) is None
    bench.now = 50.0
    bench.live(0, encode_batch([stored([1], tokens(0))], ts=40.0))
    assert offset(bench) == 10.0
    bench.now = 60.0
    bench.live(1, encode_batch([stored([2], tokens(1))], ts=45.0))
    assert offset(bench) == 15.0
    bench.wait(0.1, 10.1)
    bench.reply(1, encode_batch([stored([2], tokens(1))], ts=45.0))
    bench.reply(2, encode_batch([stored([3], tokens(2))], ts=70.0))
    assert offset(bench) is None
