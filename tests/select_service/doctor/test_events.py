"""Faults of workers' events, planted on real sockets: found, named alone, gone when mended."""

from __future__ import annotations

from functools import partial

import msgspec
import pytest
import zmq
from msgspec.structs import replace

from indexer.core.stream import EventStream
from indexer.types import StreamLimits
from select_service.types import ReservationRequest, RouterConfig
from tests.coroutines import run_by
from tests.indexer.encoding import stored
from tests.select_service.doctor.ward import BLOCK, STREAMS, Engine, Ward, play, prompt

Context = zmq.Context[zmq.Socket[bytes]]
UNPOLLED = msgspec.structs.replace(STREAMS, poll_after_s=0.0)


async def serve_prompts(ward: Ward, engine: Engine, first: int, count: int = 6) -> None:
    for number in range(first, first + count):
        await ward.ask(prompt(number))
        engine.compute(prompt(number))
    await ward.received(engine)


@run_by(play, "context", streams=UNPOLLED)
async def test_a_replay_that_no_longer_has_all_of_the_past(ward: Ward) -> None:
    engine = ward.engine()
    for number in range(8):
        engine.compute(prompt(number))
    for _ in range(5):
        engine.sockets.buffer.popleft()
    await ward.hire(engine)
    await serve_prompts(ward, engine, 10)
    (finding,) = await ward.examine()
    assert finding.code == "past-events-missing"
    assert "5 of 14 batches" in finding.what
    await serve_prompts(ward, engine, 100, 90)
    assert await ward.pass_time(60) == [], "they are few by now"


@run_by(play, "context", streams=UNPOLLED)
async def test_bookings_that_live_on_are_evidence_enough(ward: Ward) -> None:
    """Where so much comes that this rank's prompts are not among the samples."""
    engine = ward.engine()
    await ward.hire(engine, replay=False)
    await ward.codes()
    for number in range(3):
        body = {"reservation_id": f"long{number}", "worker_id": 1, "token_ids": prompt(number)}
        ward.service.reserve(msgspec.convert(body, ReservationRequest))
    assert await ward.pass_time(50) == ["no-events"]
    engine.compute(prompt(0))
    await ward.received(engine)
    assert await ward.pass_time(50) == []


@run_by(play, "context", streams=UNPOLLED)
async def test_bookings_of_an_earlier_life_are_none(ward: Ward) -> None:
    """Restored from disk, or reported by a replica: the engine has computed them long ago."""
    await ward.hire(ward.engine(), replay=False)
    for number in range(6):
        body = {"reservation_id": f"old{number}", "worker_id": 1, "token_ids": prompt(number)}
        ward.service.reserve(msgspec.convert(body, ReservationRequest))
    assert await ward.pass_time(60) == []


@run_by(play, "context", streams=UNPOLLED)
async def test_an_engine_that_falls_silent_later(ward: Ward) -> None:
    engine = ward.engine()
    await ward.hire(engine, replay=False)
    await serve_prompts(ward, engine, 0)
    for _ in range(4):  # all of it cached: it has nothing to publish
        for number in range(6):
            await ward.ask(prompt(number))
        assert await ward.pass_time(40) == []
    for number in range(100, 106):
        await ward.ask(prompt(number))
    assert await ward.pass_time(100) == []  # it may be at a very long one
    assert await ward.pass_time(30) == ["no-events"]
    await serve_prompts(ward, engine, 200)
    assert await ward.codes() == []


@run_by(play, "context", streams=UNPOLLED)
async def test_a_worker_that_only_decodes_need_not_publish(ward: Ward) -> None:
    await ward.hire(ward.engine(), replay=False, role="decode")
    for number in range(4):
        body = {"reservation_id": f"d{number}", "worker_id": 1, "token_ids": prompt(number)}
        ward.service.reserve(msgspec.convert(body, ReservationRequest))
    assert await ward.pass_time(60) == []


@run_by(play, "context", streams=UNPOLLED)
async def test_prompts_below_a_block_need_no_events(ward: Ward) -> None:
    await ward.hire(ward.engine(), replay=False)
    for _ in range(8):
        await ward.ask(list(range(BLOCK - 1)))
        assert await ward.pass_time(10) == []


@run_by(play, "context")
async def test_a_second_size_beside_the_right_one_is_somebody_elses_business(ward: Ward) -> None:
    """LMCache publishes its own chunks on the engine's stream."""
    engine = ward.engine()
    await ward.hire(engine)
    for round_ in range(8):
        await serve_prompts(ward, engine, 10 * round_, 2)
        for name in range(4):
            engine.send([stored([10_000 + name], list(range(256)), block_size=256)])
        await ward.received(engine)
        assert await ward.pass_time(10) == []


@run_by(play, "context")
async def test_groups_that_never_count_are_no_fault(ward: Ward) -> None:
    engine = ward.engine()
    engine.twist = lambda event: event | {"kv_cache_spec_kind": "mamba"}
    await ward.hire(engine)
    await serve_prompts(ward, engine, 0)
    assert await ward.pass_time(60) == []


@run_by(play, "context")
async def test_one_restart_is_nothing(ward: Ward) -> None:
    engine = ward.engine()
    await ward.hire(engine)
    await serve_prompts(ward, engine, 0)
    await ward.codes()
    engine = engine.restart()
    await ward.until(engine.sockets.has_subscriber)
    await serve_prompts(ward, engine, 0, 9)
    (stream,) = ward.streams()
    await ward.until(lambda: ward.is_connected(stream))
    assert await ward.pass_time(60) == []


@run_by(play, "context")
async def test_old_batches_from_a_replay_are_no_skew(ward: Ward) -> None:
    engine = ward.engine()
    engine.clock_off_s = -5000.0
    for number in range(4):
        engine.compute(prompt(number))
    engine.clock_off_s = 0.0
    await ward.hire(engine)
    assert await ward.pass_time(60) == []
    await ward.received(engine)
    assert await ward.pass_time(60) == []


@run_by(play, "context", streams=UNPOLLED)
async def test_ranks_registered_one_by_one_with_ports_that_are_off(ward: Ward) -> None:
    engines = [ward.engine(), ward.engine()]
    for rank, engine in enumerate(engines):
        engine.dp_rank = rank

    async def hire(rank: int, engine: Engine) -> None:
        fields = {"data_parallel_start_rank": rank, "data_parallel_size": 1}
        await ward.hire(engine, rank + 1, replay=False, **fields)

    await hire(0, engines[1])
    await hire(1, engines[0])
    for engine in engines:
        engine.compute(prompt(1))
    await ward.until(lambda: all(s.names for w in (1, 2) for s in ward.streams(w)))
    (finding,) = await ward.examine()
    assert finding.code == "rank-offset"
    assert (finding.subject.worker_id, finding.subject.dp_rank) == (2, 1)
    await hire(0, engines[0])
    await hire(1, engines[1])
    assert await ward.pass_time(10) == []


@run_by(play, "context")
async def test_an_engine_that_counts_its_ranks_through_the_cluster(ward: Ward) -> None:
    engine = ward.engine()
    engine.dp_rank = 5
    await ward.hire(engine)
    await serve_prompts(ward, engine, 0)
    assert await ward.pass_time(60) == []


@run_by(play, "context", streams=UNPOLLED)
async def test_one_publisher_for_all_ranks_is_no_fault(ward: Ward) -> None:
    """TensorRT-LLM's attention ranks share one; each batch says whose it is."""
    engine = ward.engine()
    endpoints = {"0": engine.sockets.endpoint, "1": engine.sockets.endpoint}
    await ward.hire(
        engine,
        replay=False,
        kv_events_endpoint=None,
        kv_events_endpoints=endpoints,
        data_parallel_size=2,
    )
    for rank in (0, 1):
        engine.dp_rank = rank
        engine.compute(prompt(rank))
    await ward.until(lambda: all(s.cursor.last == 1 for s in ward.streams()))
    assert await ward.pass_time(40) == []


def has_lost(stream: EventStream, batches: int) -> bool:
    return stream.tallies.lost_batches == batches


def has_lost_by_now(ward: Ward, stream: EventStream, batches: int) -> bool:
    """The same where the connection breaks: seconds pass before there is another."""
    if not ward.is_connected(stream):
        ward.clock.skipped += 0.1
    return has_lost(stream, batches)


@pytest.mark.parametrize("size", [15_000, 50_000], ids=["refused", "broken off"])
@run_by(play, "context", streams=replace(STREAMS, message_bytes_max=10_000))
async def test_a_batch_that_is_too_long_is_named(ward: Ward, *, size: int) -> None:
    """With its size, or at least what is exceeded; neither the network nor the replay is blamed."""
    engine = ward.engine()
    await ward.hire(engine)
    (stream,) = ward.streams()
    await serve_prompts(ward, engine, 0)
    for count in (1, 2):
        engine.send([{"type": "BlockRemoved", "block_hashes": [b"x" * size]}])
        await ward.until(partial(has_lost_by_now, ward, stream, count))
        await ward.until(lambda: ward.is_connected(stream) and not stream.is_replaying)
        await serve_prompts(ward, engine, 10 * count)
    (finding,) = await ward.examine()
    assert finding.code == "events-too-long"
    assert "--kv-message-bytes-max is 10000" in finding.what
    assert ("more than 20000" if size > 20_000 else "150") in finding.what
    assert stream.tallies.unusable_batches == 2
    assert await ward.pass_time(60) == ["events-too-long"]
    assert await ward.pass_time(320) == []


@run_by(play, "context", streams=UNPOLLED)
async def test_joining_late_is_no_loss(ward: Ward) -> None:
    engine = ward.engine()
    engine.sockets.sequence = 500
    await ward.hire(engine, replay=False)
    await serve_prompts(ward, engine, 0)
    assert await ward.pass_time(60) == []


@run_by(play, "context", streams=UNPOLLED)
async def test_two_servers_that_name_one_publisher(ward: Ward) -> None:
    one, two = ward.engine(), ward.engine()
    await ward.hire(one, 1)
    await ward.hire(one, 2, replay_endpoint=two.sockets.replay_endpoint)
    (finding,) = await ward.examine()
    assert finding.code == "endpoint-shared"
    assert finding.subject.worker_id == 2
    assert "worker 1" in finding.what
    await ward.hire(two, 2)
    assert await ward.codes() == []
    await ward.hire(two, 2, replay_endpoint=one.sockets.replay_endpoint)
    assert await ward.codes() == ["endpoint-shared"]
    await ward.hire(one, 2, endpoint="http://w1")  # the same server, for another model, say
    assert await ward.codes() == []


@run_by(play, "context", config=RouterConfig(use_kv_events=False))
async def test_without_kv_events_there_is_nothing_to_miss(ward: Ward) -> None:
    ward.register(1)
    for _ in range(8):
        for number in range(6):
            await ward.ask(prompt(number))
        assert await ward.pass_time(40) == []


@run_by(play, "context", streams=StreamLimits(tick_s=0.01, poll_after_s=0.0))
async def test_a_stream_that_is_not_followed_yet_is_no_fault(ward: Ward) -> None:
    engine = ward.engine()
    await ward.hire(engine)
    (stream,) = ward.streams()
    assert ward.service.sources.listeners is not None
    ward.service.sources.listeners.hold(stream)
    for number in range(6):
        await ward.ask(prompt(number))
    assert await ward.pass_time(60) == []


@run_by(play, "context")
async def test_an_engine_that_may_hold_what_it_never_published_may_be_silent_for_longer(
    ward: Ward,
) -> None:
    """An engine publishes no prompts it has cached already: it takes many to call it mute."""
    engine = ward.engine()
    for number in range(10):
        engine.compute(prompt(number))  # before anybody listens
    await ward.hire(engine, replay=False)
    engine.compute(prompt(99))
    await ward.received(engine)
    await ward.pass_time(10)
    for number in range(10):
        await ward.ask(prompt(number))
    assert await ward.pass_time(140) == []
    for number in range(200, 211):
        await ward.ask(prompt(number))
    assert await ward.pass_time(10) == ["no-events"]
