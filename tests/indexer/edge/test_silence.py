"""What a replay's silence is: only time in which somebody listened and nothing came."""

from __future__ import annotations

import asyncio
import select
from typing import Any

import pytest
import zmq
from msgspec.structs import replace

from indexer.core.stream import EventStream
from indexer.edge.listener import Listeners
from tests.indexer.edge.fake_engine import FakeEngine
from tests.indexer.edge.harness import IMPATIENT, Harness, batch, with_harness
from tests.wait import PATIENCE_S

BATCHES = 300
SILENCE_S = IMPATIENT.replay_silence_s
# ticks come when the test says so
LIMITS = replace(IMPATIENT, tick_s=SILENCE_S / 4)


class Clock:
    """The listeners' time; it passes by hand."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


async def asked(harness: Harness, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> EventStream:
    """A stream that has just asked for a gap; the engine knows nothing of it yet."""
    monkeypatch.setattr(harness.listeners, "_clock", clock)
    engine = harness.engine()
    stream = await harness.follow(engine)
    engine.publish(batch(0))
    await harness.until(lambda: harness.holds(stream, 0))
    serve, engine.serve = engine.serve, lambda: None  # type: ignore[method-assign]
    for number in range(1, BATCHES):
        engine.publish(batch(number), is_lost=True)
    engine.publish(batch(BATCHES))
    await harness.until(lambda: stream.request is not None)
    engine.serve = serve  # type: ignore[method-assign]
    tick(harness)  # the next one is due after `tick_s`, by the clock that stands still
    return stream


def tick(harness: Harness) -> None:
    """Let the listeners look for silence before their loop looks at any socket."""
    handle = harness.listeners._tick_handle
    assert handle is not None
    handle.cancel()
    harness.listeners._tick()


def deliver(harness: Harness, engine: FakeEngine, stream: EventStream) -> None:
    """Have the engine answer, and the answer wait in the listener's socket."""
    assert engine.router.poll(round(PATIENCE_S * 1000))
    engine.serve()
    let_wait(harness, stream)


def let_wait(harness: Harness, stream: EventStream) -> None:
    """Let some of the answer come, as long as it is not complete: its transport takes real time."""
    dealer = harness.listeners._feeds[id(stream)].dealer
    assert dealer is None or dealer._socket.poll(round(PATIENCE_S * 1000)) == zmq.POLLIN


@pytest.fixture
def clock() -> Clock:
    return Clock()


@with_harness(LIMITS)
async def test_what_waits_unread_is_no_silence(
    harness: Harness, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = await asked(harness, clock, monkeypatch)
    (engine,) = harness.engines
    request = stream.request
    deliver(harness, engine, stream)
    for _ in range(8):  # the sockets do not get their turn, the ticks come on time
        let_wait(harness, stream)
        clock.now += LIMITS.tick_s
        tick(harness)
        assert stream.request in (request, None)
    await harness.until(lambda: stream.cursor.last == BATCHES)
    assert stream.kv_state == "current"
    assert stream.tallies.replays == {"complete": 1}
    assert engine.requests == [0]


@with_harness(LIMITS)
async def test_time_in_which_the_process_stood_still_is_no_silence(
    harness: Harness, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = await asked(harness, clock, monkeypatch)
    (engine,) = harness.engines
    request = stream.request
    clock.now += LIMITS.tick_s + 20 * SILENCE_S
    tick(harness)
    assert stream.request is request, "neither asked again nor given up"
    await harness.until(lambda: stream.cursor.last == BATCHES)
    assert engine.requests == [0]


@with_harness(LIMITS)
async def test_a_mute_endpoint_is_given_up_by_one_who_listens(
    harness: Harness, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = await asked(harness, clock, monkeypatch)
    ticks = 0
    while stream.request is not None:
        clock.now += LIMITS.tick_s
        tick(harness)
        ticks += 1
    # silence is noticed by the tick that ends it, or the one after where floats fall short
    attempts = LIMITS.replay_attempts_max
    assert 4 * attempts <= ticks <= 5 * attempts
    assert stream.tallies.replays == {"silent": 1}
    assert stream.kv_state == "uncertain"


@with_harness(LIMITS)
async def test_an_answer_that_waits_for_a_held_stream_lets_the_loop_rest(
    harness: Harness, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = await asked(harness, clock, monkeypatch)
    (engine,) = harness.engines
    harness.listeners.hold(stream)
    looks = 0
    serve = Listeners._serve

    def counted(listeners: Listeners, feed: Any, end: float) -> bool:
        nonlocal looks
        looks += 1
        return serve(listeners, feed, end)

    monkeypatch.setattr(Listeners, "_serve", counted)
    dealer = harness.listeners._feeds[id(stream)].dealer
    assert dealer is not None
    assert engine.router.poll(round(PATIENCE_S * 1000))
    engine.serve()
    assert select.select([dealer.fd], [], [], PATIENCE_S)[0], "asking the socket would quieten it"
    for _ in range(200):
        await asyncio.sleep(0)
    assert looks < 20, "the descriptor stays readable as long as nobody reads"
    harness.listeners.release(stream)
    await harness.until(lambda: stream.cursor.last == BATCHES)
    assert stream.kv_state == "current"
