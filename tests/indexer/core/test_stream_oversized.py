"""A batch that is too long costs itself: live, waiting, in a replay, and beyond the socket."""

from __future__ import annotations

from typing import Any

import pytest

from indexer.core.events import Oversized, size_of
from indexer.types import EventLossPolicy, StreamLimits
from tests.indexer.core.streams import Bench, stream_of, tokens
from tests.indexer.encoding import encode_batch, removed, stored
from tests.indexer.naive_index import NaiveIndex

LONGEST = 600
LIMITS = StreamLimits(message_bytes_max=LONGEST, backlog_batches_max=50)
MILLION = 1_000_000


def long(number: int, *, whole: bool = True) -> bytes:
    """Batch `number`, too long; as the core may get it, or as the sockets hand it over."""
    payload = encode_batch([stored([number + 1], tokens(number))] * 20, ts=float(number))
    assert len(payload) > LONGEST
    return payload if whole else Oversized.of(payload, len(payload))


def bench(**options: Any) -> Bench:
    return Bench(limits=LIMITS, **options)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("has_replay", [True, False])
def test_a_live_batch_that_is_too_long_costs_itself(whole: bool, has_replay: bool) -> None:
    one = bench(has_replay=has_replay)
    one.live(0)
    one.live(1, long(1, whole=whole))
    one.live(2)
    assert one.asked() is None, "its number was heard: nothing is missing"
    assert one.blocks() == {0, 2}
    assert (one.state(), one.stream.lost_batches) == ("uncertain", 1)
    assert one.stream.tallies.lost_batches == 1
    assert one.stream.tallies.bad_messages == {"oversized": 1}
    assert one.stream.tallies.oversized_bytes == len(long(1))


def test_under_drop_it_costs_what_is_held() -> None:
    one = bench(on_event_loss=EventLossPolicy.DROP)
    one.live(0)
    one.live(1, long(1))
    assert one.blocks() == set()
    one.live(2)
    assert one.blocks() == {2}


def test_nothing_is_asked_for_again_and_again_because_of_it() -> None:
    one = bench()
    one.live(0)
    one.live(1, long(1))
    one.live(2)
    one.wait(10.1)
    assert one.asked() == 2, "a look for lost last batches, not a rebuild from the beginning"
    one.reply(2)
    one.end()
    assert one.blocks() == {0, 2}
    assert one.stream.reread(one.now) == "asked"
    for seq in range(3):
        one.reply(seq, long(1) if seq == 1 else None)
    one.end()
    assert one.blocks() == {0, 2}
    assert (one.stream.lost_batches, one.stream.tallies.lost_batches) == (1, 1), "counted once"
    one.wait(10.1)
    assert one.asked() == 2


def test_a_batch_nobody_can_read_is_not_asked_for_for_ever() -> None:
    one = bench()
    one.live(0, 2)
    one.reply(0)
    one.reply(1, b"garbage")
    one.wait(10.1)
    assert one.asked() == 2
    one.reply(2)
    one.end()
    assert one.blocks() == {0, 2}
    assert one.stream.tallies.lost_batches == 1


def test_what_else_is_lost_is_asked_for() -> None:
    one = bench()
    one.live(0)
    one.live(1, long(1))
    one.live(3)
    one.wait(1.1, 1.1)
    assert one.stream.lost_batches == 2
    one.wait(10.1)
    assert one.asked() == 0
    for seq in range(4):
        one.reply(seq, long(1) if seq == 1 else None)
    one.end()
    assert one.blocks() == {0, 2, 3}
    assert (one.stream.lost_batches, one.stream.tallies.lost_batches) == (1, 2)


def test_a_number_that_is_not_due_is_no_evidence() -> None:
    one = bench()
    one.live(0)
    for seq in (1 << 40, 7, 0):
        one.live(seq, long(seq % 50))
    assert one.asked() is None
    one.live(1)
    assert one.blocks() == {0, 1}
    assert one.stream.lost_batches == one.stream.tallies.restarts == 0
    assert one.stream.tallies.bad_messages == {"oversized": 3}


def test_bytes_that_begin_no_batch_take_no_number() -> None:
    one = bench()
    one.live(0)
    one.live(1, b"\x00" * (LONGEST + 1))
    one.live(1)
    assert one.blocks() == {0, 1}
    assert one.stream.lost_batches == 0


def test_it_waits_for_its_turn_while_a_replay_runs() -> None:
    one = bench()
    one.live(0, 2)
    one.live(3, long(3))
    one.live(4)
    one.reply(0, 1)
    assert one.blocks() == {0, 1, 2, 4}
    assert one.stream.tallies.lost_batches == 1


def test_its_copy_proves_the_engine() -> None:
    one = bench()
    one.live(0)
    one.live(1, long(1))
    one.stream.on_reconnect(one.now)
    assert one.asked() == 1
    one.reply(1, long(1, whole=False))
    one.end()
    assert one.blocks() == {0}
    assert one.stream.tallies.hidden_restarts == 0
    one.stream.on_reconnect(one.now)
    one.reply(1, engine="new")
    assert one.asked() == 0, "another engine"


def test_the_first_batch_of_a_restarted_engine() -> None:
    one = bench()
    one.live(*range(3))
    one.live(0, long(0))
    one.live(1, engine="new")
    assert one.asked() is not None
    assert one.asked() == 2
    one.end()
    assert one.asked() == 1, "does it at least repeat what has just been heard?"
    one.reply(1, engine="new")
    assert one.asked() == 0
    one.reply(0, long(0))
    one.reply(1, engine="new")
    one.end()
    assert one.blocks() == set()
    assert one.blocks(engine="new") == {1}
    assert one.stream.lost_batches == 1


# -- beyond what the socket takes: the connection breaks -------------------------------------------


def breaks(one: Bench, *culprits: int, engine_has: int) -> None:
    """Answer as an engine whose `culprits` break the connection, until nothing is asked."""
    for _ in range(20):
        start, request = one.asked(), one.stream.request
        if start is None:
            return
        for seq in range(start, engine_has):
            if seq in culprits:
                one.stream.on_broken_replay(one.now)
                one.stream.check()
                break
            one.reply(seq)
            if one.stream.request is not request:
                break
        else:
            one.end()
    raise AssertionError("asked for ever")


@pytest.mark.parametrize("culprits", [(0,), (1,), (3,), (4,), (1, 3), (2, 3)])
def test_a_batch_that_breaks_the_connection_costs_itself(culprits: tuple[int, ...]) -> None:
    one = bench()
    one.live(5)
    breaks(one, *culprits, engine_has=6)
    assert one.blocks() == {0, 1, 2, 3, 4, 5} - {*culprits}
    assert one.stream.tallies.lost_batches == one.stream.lost_batches == len(culprits)
    assert one.stream.tallies.bad_messages == {"breach": len(culprits)}
    assert "broken" not in one.outcomes, "the endpoint is not to blame"


def test_an_endpoint_that_is_no_engine_is_given_up() -> None:
    one = bench()
    one.live(0, 3)
    for _ in range(5):
        if one.asked() is not None:
            one.stream.on_broken_replay(one.now)
    assert one.asked() is None
    assert one.outcomes == {"broken": 1}
    assert one.blocks() == {0, 3}
    assert one.stream.lost_batches == 2


# -- the default limit -----------------------------------------------------------------------------


def names(kind: str) -> list[Any]:
    if kind == "digests":
        return [number.to_bytes(32, "big") for number in range(MILLION)]
    first = {"numbers": (1 << 64) - MILLION, "signed": -(1 << 63)}[kind]
    return list(range(first, first + MILLION))


@pytest.mark.parametrize("kind", ["numbers", "signed", "digests"])
def test_a_removal_of_a_million_blocks_fits(kind: str) -> None:
    limit = StreamLimits().message_bytes_max
    gone = names(kind)
    whole = encode_batch([removed(gone, medium="GPU")])
    few, more = (
        len(encode_batch([removed([gone[-1]], medium="GPU") | {"group_idx": 0}] * count))
        for count in (1, 11)
    )
    assert len(whole) < limit
    assert (more - few) // 10 * MILLION < limit, "one event each"
    stream = stream_of(NaiveIndex(16))
    stream.hear([b"", bytes(8), whole], 0.0)
    steps = 0
    while stream.is_busy and not stream.tallies.batches:
        stream.resume(0.0)
        steps += 1
    assert stream.tallies.batches == 1
    assert steps > 10, "in pieces"
    assert not stream.tallies.bad_messages


def test_the_size_of_what_was_not_kept() -> None:
    one = Oversized.of(b"x" * 1000, 5000)
    assert (size_of(one), size_of(b"abc")) == (5000, 3)
    assert len(one) < 100
