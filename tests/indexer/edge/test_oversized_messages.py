"""A message that is too long costs itself, live and in a replay; one within the limit, nothing."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from indexer.edge.receiver import READ_BYTES_MAX
from indexer.types import StreamLimits
from tests.indexer.core.streams import tokens
from tests.indexer.edge.harness import LIMITS, Harness, batch, with_harness
from tests.indexer.encoding import encode_batch, removed, stored

SMALL = StreamLimits(message_bytes_max=10_000, tick_s=0.02, poll_after_s=0)


def too_long(number: int, size: int) -> bytes:
    """A batch that is as it should be, but for its size."""
    return encode_batch([stored([number + 1], tokens(number)), removed([b"x" * size])])


@pytest.mark.parametrize("is_lost", [False, True], ids=["live", "in a replay"])
@with_harness()
async def test_a_message_that_takes_several_reads(harness: Harness, is_lost: bool) -> None:
    engine = harness.engine()
    stream = await harness.follow(engine)
    engine.publish(batch(0))
    engine.publish(too_long(1, 5 * READ_BYTES_MAX), is_lost=is_lost)
    engine.publish(batch(2))
    await harness.until(lambda: harness.holds(stream, 2))
    assert harness.holds(stream, 0)
    assert harness.holds(stream, 1)
    assert (stream.tallies.lost_batches, stream.tallies.bad_messages) == (0, {})


@with_harness(SMALL)
async def test_a_message_beyond_the_limit_costs_itself(harness: Harness) -> None:
    engine = harness.engine()
    stream = await harness.follow(engine, replay=False)
    engine.publish(batch(0))
    engine.publish(too_long(1, 15_000))
    engine.publish(batch(2))
    await harness.until(lambda: harness.holds(stream, 2))
    assert harness.holds(stream, 0)
    assert stream.tallies.bad_messages == {"oversized": 1}
    assert stream.tallies.oversized_bytes > 15_000
    assert stream.tallies.lost_batches == 1
    link = harness.listeners.link(stream)
    assert link is not None
    assert link.connections == 1, "it was not disconnected"


@with_harness(SMALL)
async def test_a_message_beyond_the_sockets_limit_costs_itself(harness: Harness) -> None:
    engine = harness.engine()
    stream = await harness.follow(engine)
    engine.publish(batch(0))
    engine.publish(too_long(1, 50_000))
    await harness.until(engine.has_subscriber)  # it was disconnected, and came back
    await harness.until(lambda: stream.tallies.lost_batches == 1)
    engine.publish(batch(2))
    await harness.until(lambda: harness.holds(stream, 2))
    assert harness.holds(stream, 0)
    assert stream.tallies.bad_messages == {"breach": 2}, "live, and in the replay"
    assert stream.tallies.lost_batches == stream.lost_batches == 1
    assert "broken" not in stream.tallies.replays


@pytest.mark.parametrize("size", [15_000, 50_000], ids=["refused", "broken off"])
@pytest.mark.parametrize("at", [0, 2], ids=["the first", "after some"])
@with_harness(replace(SMALL, replay_silence_s=1_000.0, replay_deadline_s=10_000.0))
async def test_a_replay_with_a_batch_that_is_too_long(harness: Harness, at: int, size: int) -> None:
    """Silence would tell of one that breaks it off, after as long as it takes, at each try."""
    engine = harness.engine()
    stream = await harness.follow(engine)
    for number in range(5):
        engine.publish(too_long(number, size) if number == at else batch(number), is_lost=True)
    engine.publish(batch(5))  # a gap, and some of what fills it does not come through
    await harness.until(lambda: harness.holds(stream, 5))
    assert stream.tallies.replays in ({"complete": 1}, {"overtaken": 1})
    assert stream.tallies.lost_batches == stream.lost_batches == 1
    assert stream.kv_state == "uncertain"
    held = [harness.holds(stream, number) for number in range(5)]
    assert held == [number != at for number in range(5)]
    assert len(engine.requests) <= 2 + LIMITS.replay_attempts_max
