"""Listeners on real sockets: floods, gaps, restarts, mute endpoints, things that break."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from msgspec.structs import replace

from indexer.core.stream import EventStream
from indexer.errors import EndpointRefused
from indexer.types import StreamLimits, WorkerRank
from tests.indexer.edge.harness import IMPATIENT, LIMITS, SCOPE, Harness, batch, with_harness
from tests.indexer.encoding import encode_batch, stored


@with_harness()
async def test_a_flood_loses_nothing(harness: Harness) -> None:
    engine = harness.engine()
    stream = await harness.follow(engine, replay=False)
    for number in range(25_000):
        engine.publish(batch(number % 500, ts=number))
    await harness.until(lambda: stream.cursor.last == 24_999)
    assert stream.tallies.batches == 25_000
    assert stream.lost_batches == 0


@with_harness()
async def test_a_gap_is_mended_over_the_wire(harness: Harness) -> None:
    engine = harness.engine()
    stream = await harness.follow(engine)
    engine.publish(batch(0))
    for number in range(1, 3_000):
        engine.publish(batch(number), is_lost=True)
    engine.publish(batch(3_000))
    await harness.until(lambda: stream.cursor.last == 3_000)
    assert stream.kv_state == "current"
    assert stream.tallies.replays == {"complete": 1}
    assert engine.requests == [0]


@pytest.mark.parametrize("replay", [False, True])
@with_harness()
async def test_an_engine_restarts_on_the_same_ports(harness: Harness, replay: bool) -> None:
    engine = harness.engine()
    stream = await harness.follow(engine, replay=replay)
    for number in range(5):
        engine.publish(batch(number))
    await harness.until(lambda: stream.cursor.last == 4)
    heir = await harness.reborn(harness.end(engine))
    await harness.until(heir.has_subscriber)
    heir.publish(batch(7, ts=1_000.0))
    await harness.until(lambda: harness.holds(stream, 7))
    assert not any(harness.holds(stream, number) for number in range(5))
    assert stream.tallies.restarts + stream.tallies.hidden_restarts == 1
    link = harness.listeners.link(stream)
    assert link is not None
    assert link.is_connected


@with_harness()
async def test_a_restart_whose_numbers_go_on_without_a_seam(harness: Harness) -> None:
    engine = harness.engine()
    stream = await harness.follow(engine)
    for number in range(3):
        engine.publish(batch(number))
    await harness.until(lambda: stream.cursor.last == 2)
    heir = await harness.reborn(harness.end(engine))
    for number in range(3):
        heir.publish(batch(10 + number))
    await harness.until(heir.has_subscriber)
    heir.publish(batch(13))  # number 3, the very one that was expected
    await harness.until(lambda: harness.holds(stream, 13))
    assert [n for n in range(14) if harness.holds(stream, n)] == [10, 11, 12, 13]
    assert stream.tallies.hidden_restarts == 1


@with_harness(replace(IMPATIENT, poll_after_s=0.1, replay_backoff_s=0.2))
async def test_a_restart_after_long_pauses_between_replays(harness: Harness) -> None:
    """An engine was away for long, and one comes whose numbers go on from those of the old one."""
    engine = harness.engine()
    stream = await harness.follow(engine)
    for number in range(3):
        engine.publish(batch(number))
    await harness.until(lambda: stream.cursor.last == 2)
    ports = harness.end(engine)
    await harness.until(lambda: stream._backoff_s)  # nobody answers
    stream._ask_after += 3_600.0  # as after many of them
    heir = await harness.reborn(ports)
    for number in range(3):
        heir.publish(batch(10 + number))
    await harness.until(heir.has_subscriber)
    heir.publish(batch(13))  # number 3, the very one that was expected
    await harness.until(lambda: harness.holds(stream, 12))
    assert [n for n in range(14) if harness.holds(stream, n)] == [10, 11, 12, 13]


@with_harness()
async def test_a_port_that_spoke_another_protocol_for_a_while(harness: Harness) -> None:
    engine = harness.engine()
    stream = await harness.follow(engine)
    ports = harness.end(engine)
    visits = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal visits
        visits += 1
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 9)
        await writer.drain()
        writer.close()

    async def listen() -> asyncio.Server:
        while True:
            try:
                return await asyncio.start_server(answer, "127.0.0.1", ports[0])
            except OSError:  # libzmq has not let go of the port yet
                await asyncio.sleep(0.005)

    server = await listen()
    await harness.until(lambda: visits)
    server.close()
    await server.wait_closed()
    heir = await harness.reborn(ports)
    await harness.until(heir.has_subscriber)
    heir.publish(batch(1))
    await harness.until(lambda: harness.holds(stream, 1))


@with_harness(IMPATIENT)
async def test_a_mute_replay_endpoint_does_not_stop_live_events(harness: Harness) -> None:
    engine = harness.engine()
    engine.is_mute = True
    stream = await harness.follow(engine)
    engine.publish(batch(0))
    engine.publish(batch(1), is_lost=True)
    engine.publish(batch(2))
    await harness.until(lambda: harness.holds(stream, 2))
    assert stream.kv_state == "uncertain"
    engine.publish(batch(3))
    await harness.until(lambda: harness.holds(stream, 3))
    assert stream.tallies.replays == {"silent": 1}


@with_harness(replace(LIMITS, poll_after_s=0.05))
async def test_the_last_batches_are_asked_for_after_silence(harness: Harness) -> None:
    engine = harness.engine()
    engine.publish(batch(0))
    stream = await harness.follow(engine)
    await harness.until(lambda: harness.holds(stream, 0))
    engine.publish(batch(1), is_lost=True)
    await harness.until(lambda: harness.holds(stream, 1))
    assert stream.kv_state == "current"


@with_harness(replace(LIMITS, poll_after_s=3_600.0))
async def test_the_past_of_an_idle_engine_needs_no_poll(harness: Harness) -> None:
    engine = harness.engine()
    for number in range(3):
        engine.publish(batch(number))  # nobody listens yet
    stream = await harness.follow(engine)
    await harness.until(lambda: harness.holds(stream, 2))
    await harness.until(lambda: not stream.awaits_past)  # the mark of the end comes behind them


@with_harness(StreamLimits(turn_s=0.0, tick_s=0.02, poll_after_s=0))
async def test_a_tick_of_many_streams_gives_way(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = [await harness.follow(harness.engine(), worker) for worker in range(5)]
    turns = 0
    seen: dict[WorkerRank, int] = {}

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    for stream in streams:
        monkeypatch.setattr(
            stream, "on_timer", lambda *_, rank=stream.rank, **__: seen.setdefault(rank, turns)
        )
    harness.listeners.look_at_all()
    counting = asyncio.create_task(count_turns())
    await harness.until(lambda: len(seen) == len(streams))
    counting.cancel()
    assert len(set(seen.values())) == len(streams), "each in a turn of its own"


@with_harness()
async def test_streams_that_rest_are_not_looked_at(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But the one whose replay runs at every tick, and all of them when the limits change."""
    limits = harness.registry.limits
    engines = [harness.engine() for _ in range(4)]
    streams = [await harness.follow(engine, worker) for worker, engine in enumerate(engines)]
    looks: list[EventStream] = []
    true_look = EventStream.on_timer

    def look(stream: EventStream, now: float, *, may_poll: bool = True) -> None:
        looks.append(stream)
        true_look(stream, now, may_poll=may_poll)

    monkeypatch.setattr(EventStream, "on_timer", look)
    await harness.until(lambda: not harness.listeners._schedule._always)
    looks.clear()
    serve, engines[0].serve = engines[0].serve, lambda: None  # type: ignore[method-assign]
    engines[0].publish(batch(0), is_lost=True)
    engines[0].publish(batch(1))  # a gap, and nobody answers yet
    await harness.until(lambda: len(looks) > 10)
    assert set(looks) == {streams[0]}
    engines[0].serve = serve  # type: ignore[method-assign]
    await harness.until(lambda: harness.holds(streams[0], 1))
    await harness.until(lambda: not harness.listeners._schedule._always)
    looks.clear()
    limits.poll_after_s = 0.01  # as a reload does
    harness.listeners.look_at_all()
    await harness.until(lambda: all(looks.count(stream) > 2 for stream in streams))
    harness.listeners._schedule.check()


@with_harness()
async def test_what_somebody_else_has_a_stream_ask_is_asked(harness: Harness) -> None:
    engine = harness.engine()
    stream = await harness.follow(engine)
    engine.publish(batch(0))
    await harness.until(lambda: harness.holds(stream, 0))
    await harness.until(lambda: not harness.listeners._schedule._always)
    assert stream.reread(harness.listeners._clock()) == "asked"
    harness.listeners.look_at(stream)
    await harness.until(lambda: stream.tallies.replays == {"complete": 1})
    harness.listeners.stop(stream)
    harness.listeners.look_at(stream)  # too late, and no harm
    harness.listeners._schedule.check()


@with_harness()
async def test_a_long_batch_gives_way(harness: Harness) -> None:
    engine, other = harness.engine(), harness.engine()
    stream = await harness.follow(engine)
    neighbour = await harness.follow(other, worker=2)
    many = list(range(1, 4_001))
    engine.publish(encode_batch([stored(many, [t % 977 for t in range(16 * 4_000)])]))
    other.publish(batch(0))
    await harness.until(lambda: stream.tallies.blocks_stored == 4_000)
    await harness.until(lambda: harness.holds(neighbour, 0))


@with_harness()
async def test_many_workers_take_no_thread_each(harness: Harness) -> None:
    engine = harness.engine()
    before = threading.active_count()
    streams = [
        harness.registry.open_stream(
            SCOPE, WorkerRank(worker, 0), worker_ranks=range(1), has_replay=False
        )
        for worker in range(100)
    ]
    for stream in streams:
        harness.listeners.start(stream, engine.endpoint, None)
    assert threading.active_count() <= before  # one of an earlier test may have ended
    assert len(asyncio.all_tasks()) == 1
    await harness.until(engine.has_subscriber)
    number = 0
    while not all(harness.holds(stream, 0) for stream in streams):
        engine.publish(batch(0, ts=number))
        number += 1
        await asyncio.sleep(0.01)


@with_harness()
async def test_stop_forgets_and_may_be_repeated(harness: Harness) -> None:
    engine = harness.engine()
    engine.is_mute = True
    stream = await harness.follow(engine)
    engine.publish(batch(4))
    engine.publish(batch(5), is_lost=True)
    engine.publish(batch(6))
    await harness.until(lambda: stream.request is not None)
    engine.publish(batch(7))
    harness.registry.close_stream(stream)
    harness.listeners.stop(stream)
    harness.listeners.stop(stream)
    assert len(harness.listeners) == 0
    assert not harness.holds(stream, 4)
    await asyncio.sleep(0)


@with_harness()
async def test_what_libzmq_refuses(harness: Harness) -> None:
    stream = harness.registry.open_stream(
        SCOPE, WorkerRank(1, 0), worker_ranks=range(1), has_replay=True
    )
    with pytest.raises(EndpointRefused, match="tcp://"):
        harness.listeners.start(stream, "tcp://*:5557", None)
    with pytest.raises(EndpointRefused):
        harness.listeners.start(stream, "tcp://127.0.0.1:1", "tcp://*:5558")
    assert len(harness.listeners) == 0


@with_harness()
async def test_a_bug_costs_one_message(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = harness.engine()
    stream = await harness.follow(engine, replay=False)
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: told.append(what))

    def broken(*_: Any) -> None:
        monkeypatch.undo()
        raise RuntimeError("a bug")

    monkeypatch.setattr(stream, "hear", broken)
    engine.publish(batch(0))
    engine.publish(batch(1))
    await harness.until(lambda: harness.holds(stream, 1))
    assert harness.listeners.faults == 1
    assert str(told[0]["exception"]) == "a bug"
    harness.listeners.faults = 0


@with_harness()
async def test_a_bug_in_writing_costs_one_batch(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = harness.engine()
    stream = await harness.follow(engine, replay=False)
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    true_store = harness.index.store

    def broken(
        rank: WorkerRank, tier: Any, parent: Any, hashes: Any, *rest: Any, **more: Any
    ) -> int:
        if 600 in hashes:
            raise RuntimeError("a bug")
        return true_store(rank, tier, parent, hashes, *rest, **more)

    monkeypatch.setattr(harness.index, "store", broken)
    many = list(range(1, 4_001))
    engine.publish(encode_batch([stored(many, [t % 977 for t in range(16 * 4_000)])]))
    engine.publish(batch(5_000))
    await harness.until(lambda: harness.holds(stream, 5_000))
    assert harness.listeners.faults == 1
    assert stream.kv_state == "uncertain"
    harness.listeners.faults = 0


@with_harness(IMPATIENT)
async def test_a_socket_in_trouble_does_not_silence_the_others(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = [harness.engine(), harness.engine()]
    first, second = [
        await harness.follow(engine, worker) for worker, engine in enumerate(engines, 1)
    ]
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    true_ask = harness.listeners._sockets.ask_replay

    def refuse_once(endpoint: str, start: int, key: str | None) -> None:
        monkeypatch.setattr(harness.listeners._sockets, "ask_replay", true_ask)
        raise OSError("no space left for another watch")

    monkeypatch.setattr(harness.listeners._sockets, "ask_replay", refuse_once)
    engines[0].publish(batch(3), is_lost=True)
    engines[0].publish(batch(4))
    await harness.until(lambda: harness.listeners.faults == 1)
    harness.listeners.faults = 0
    engines[1].publish(batch(5))
    await harness.until(lambda: harness.holds(second, 5))
    engines[0].publish(batch(6))
    await harness.until(lambda: harness.holds(first, 6))


@with_harness()
async def test_a_bug_in_a_tick_does_not_end_the_ticks(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = await harness.follow(harness.engine())
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    ticks: list[float] = []

    def broken(now: float, *, may_poll: bool = True) -> None:
        del may_poll
        ticks.append(now)
        if len(ticks) == 1:
            raise RuntimeError("a bug")

    monkeypatch.setattr(stream, "on_timer", broken)
    harness.listeners.look_at_all()
    await harness.until(lambda: len(ticks) > 1)
    assert harness.listeners.faults == 1
    harness.listeners.faults = 0


@with_harness(IMPATIENT)
async def test_no_descriptor_for_a_replay_is_like_a_mute_endpoint(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = harness.engine()
    stream = await harness.follow(engine)

    def refuse(endpoint: str, start: int, key: str | None) -> None:
        raise EndpointRefused(endpoint, "too many open files")

    monkeypatch.setattr(harness.listeners._sockets, "ask_replay", refuse)
    engine.publish(batch(3), is_lost=True)
    engine.publish(batch(4))
    await harness.until(lambda: harness.holds(stream, 4))
    assert stream.tallies.replays == {"silent": 1}


@with_harness()
async def test_a_held_socket_lets_the_loop_rest(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = harness.engine()
    stream = await harness.follow(engine)
    told: list[Any] = []
    on_readable = harness.listeners._on_readable

    def note(feed: Any) -> None:
        told.append(feed)
        on_readable(feed)

    monkeypatch.setattr(harness.listeners, "_on_readable", note)
    engine.publish(batch(0))
    await harness.until(lambda: harness.holds(stream, 0))
    harness.listeners.hold(stream)
    told.clear()
    engine.publish(batch(1))
    await harness.until(lambda: not harness.listeners._feeds[id(stream)].is_watched)
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(told) <= 1, "not again until it is released"
    harness.listeners.release(stream)
    await harness.until(lambda: harness.holds(stream, 1))
