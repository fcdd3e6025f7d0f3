"""Faults of event streams, and their remedies."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from indexer.edge.curve import KeyPair
from select_service.types.workers import DrainRequest
from tests.indexer.encoding import message, stored
from tests.live.ports import HOST, free_port
from tests.select_service.doctor.remedies import Found, remedy
from tests.select_service.doctor.test_events import UNPOLLED, has_lost, serve_prompts
from tests.select_service.doctor.test_fleet import NO_EVENTS
from tests.select_service.doctor.ward import BLOCK, STREAMS, Engine, Ward, prompt


@remedy("events-unreachable")
async def _(ward: Ward, found: Found) -> None:
    """Start the engine with KV events on."""
    engine = ward.engine()
    ports = engine.sockets.ports
    await ward.hire(engine)
    engine.sockets.close()
    ward.engines.remove(engine)
    (stream,) = ward.streams()
    await ward.until(lambda: not ward.is_connected(stream))
    assert await ward.pass_time(20) == [], "engines restart"
    await ward.pass_time(20)
    await found()
    ward.service.drain_worker(1, DrainRequest())
    assert await ward.codes() == [], "who drains may end any time"
    ward.service.undrain_worker(1)
    ward.engine(ports)
    await ward.until(lambda: ward.is_connected(stream))


@remedy("events-unreachable")
async def _(ward: Ward, found: Found) -> None:
    """Register the port that it publishes on."""
    engine = ward.engine()
    ward.register(1, kv_events_endpoint=f"tcp://{HOST}:{free_port()}")
    await ward.pass_time(40)
    await found()
    await ward.hire(engine)


@remedy("events-refused")
async def _(ward: Ward, found: Found) -> None:
    """Register no key: the engine does not encrypt."""
    engine = ward.engine()
    key = KeyPair.new().public
    ward.register(1, kv_events_endpoint=engine.sockets.endpoint, curve_public_key=key)
    (stream,) = ward.streams()

    def is_refused() -> bool:
        link = ward.service.sources.link(stream)
        return link is not None and link.is_refused

    await ward.until(is_refused)
    await ward.pass_time(40)
    await ward.until(is_refused)
    await found()
    await ward.hire(engine)


@remedy("no-events", streams=UNPOLLED)
async def _(ward: Ward, found: Found) -> None:
    """Switch on enable_kv_cache_events: the engine begins to publish."""
    engine = ward.engine()
    await ward.hire(engine, replay=False)
    assert await ward.pass_time(60) == [], "nobody asks anything of it"
    for number in range(4):
        await ward.ask(prompt(number))
    assert await ward.codes() == [], "it may take its time"
    await ward.pass_time(40)
    await found()
    await serve_prompts(ward, engine, 10)


@remedy("no-events", streams=UNPOLLED)
async def _(ward: Ward, found: Found) -> None:
    """Register the endpoint that this rank's events are on."""
    wrong, engine = ward.engine(), ward.engine()
    await ward.hire(wrong, replay=False)
    await ward.codes()
    for number in range(4):
        await ward.ask(prompt(number))
    await ward.pass_time(40)
    await found()
    await ward.hire(engine, replay=False)


@remedy("wrong-topic", streams=UNPOLLED)
async def _(ward: Ward, found: Found) -> None:
    wrong, engine = ward.engine(), ward.engine()
    await ward.hire(wrong, replay=False)
    (stream,) = ward.streams()
    report = msgspec.msgpack.encode({"dp_rank": 0, "kv_used_blocks": 1})
    wrong.sockets.pub.send_multipart([b"kv_metrics", report])
    await ward.until(lambda: ward.service.sources.link(stream).load_reports)  # type: ignore[union-attr]
    for number in range(4):
        await ward.ask(prompt(number))
    await ward.pass_time(40)
    await found()
    await ward.hire(engine, replay=False)


@remedy("events-unreadable", streams=UNPOLLED)
async def _(ward: Ward, found: Found) -> None:
    wrong, engine = ward.engine(), ward.engine()
    await ward.hire(wrong, replay=False)
    (stream,) = ward.streams()
    for number in range(5):
        wrong.sockets.pub.send_multipart([b"metrics", b"%d" % number])
    await ward.until(lambda: stream.tallies.messages == 5)
    await found()
    await ward.hire(engine, replay=False)


@remedy("block-size-mismatch")
async def _(ward: Ward, found: Found) -> None:
    """Register each of a fleet with the engines' size; none needs a restart of the service."""
    engines = {1: ward.engine(), 2: ward.engine()}
    for worker_id, engine in engines.items():
        engine.block = 32
        await ward.hire(engine, worker_id)
        for number in range(6):
            engine.compute(prompt(number))
        await ward.received(engine, worker_id)
    await found("16", "32 tokens", worker_id=2, dp_rank=0)
    await ward.pass_time(200)
    await found()  # it is not forgotten for being idle
    ward.register(
        1, block_size=32, kv_events_endpoint=engines[1].sockets.endpoint
    )  # waits until the other agrees
    await ward.hire(engines[2], 2, block_size=32)
    await ward.until(lambda: ward.streams(1))
    for worker_id, engine in engines.items():
        await ward.until(lambda: ward.is_connected(ward.streams(worker_id)[0]))
        engine.compute(prompt(40))
        await ward.received(engine, worker_id)
    assert ward.service.core.reader.schedulable == 2
    scores = ward.service.overlap_scores(ward.scores(prompt(40)))
    assert [one.device_blocks for one in scores.workers] == [1, 1]


@remedy("block-size-mismatch")
async def _(ward: Ward, found: Found) -> None:
    """Those that differ get a model_name of their own."""
    engine, other = ward.engine(), ward.engine()
    engine.block = 32
    await ward.hire(engine)
    await ward.hire(other, 2)
    for number in range(6):
        engine.compute(prompt(number))
    await ward.received(engine)
    await found()
    await ward.hire(engine, block_size=32, model_name="other")
    engine.compute(prompt(40))
    await ward.received(engine)


def _in_pairs(event: dict[str, Any]) -> dict[str, Any]:
    tokens = event["token_ids"]
    return event | {"token_ids": list(itertools.pairwise([*tokens, tokens[-1] + 1]))}


@remedy("eagle-mismatch")
async def _(ward: Ward, found: Found) -> None:
    """SGLang with EAGLE: register it with is_eagle; it had pinned the other setting itself."""
    engine = ward.engine()
    engine.twist = _in_pairs
    await ward.hire(engine)
    await serve_prompts(ward, engine, 0)
    await found()
    await ward.hire(engine, is_eagle=True)
    await serve_prompts(ward, engine, 10)
    scores = ward.service.overlap_scores(ward.scores(prompt(10)))
    assert [one.device_blocks for one in scores.workers] == [3]


@remedy("eagle-mismatch")
async def _(ward: Ward, found: Found) -> None:
    """And the other way round."""
    engine = ward.engine()
    await ward.hire(engine, is_eagle=True)
    await serve_prompts(ward, engine, 0)
    await found()
    await ward.hire(engine)
    await serve_prompts(ward, engine, 10)


@remedy("events-not-indexed")
async def _(ward: Ward, found: Found) -> None:
    """An engine that sends lora_name."""
    engine = ward.engine()
    engine.twist = lambda event: event | {"lora_id": 7}
    await ward.hire(engine)
    await serve_prompts(ward, engine, 0)
    await found("nameless_adapter")
    newer = engine.restart()
    newer.twist = lambda event: event | {"lora_id": 7, "lora_name": "adapter"}
    await ward.until(newer.sockets.has_subscriber)
    await serve_prompts(ward, newer, 0, 8)


@remedy("events-lost", streams=UNPOLLED)
async def _(ward: Ward, found: Found) -> None:
    """Give the worker a replay_endpoint."""
    engine = ward.engine()
    await ward.hire(engine, replay=False)
    for round_ in range(3):
        await serve_prompts(ward, engine, 10 * round_)
        await ward.pass_time(10)
        engine.sockets.sequence += 1
    await found()
    engine.sockets.sequence -= 1
    await ward.hire(engine)
    engine.sockets.publish(msgspec.msgpack.encode([ward.clock.wall(), [], None]), is_lost=True)
    await serve_prompts(ward, engine, 90)


@remedy("events-too-long", streams=replace(STREAMS, message_bytes_max=10_000))
async def _(ward: Ward, found: Found) -> None:
    """Start with a --kv-message-bytes-max above the size named: all is listened to anew."""
    engine = ward.engine()
    await ward.hire(engine)
    (stream,) = ward.streams()
    await serve_prompts(ward, engine, 0)
    engine.send([{"type": "BlockRemoved", "block_hashes": [b"x" * 15_000]}])
    await ward.until(lambda: has_lost(stream, 1))
    await ward.until(lambda: ward.is_connected(stream) and not stream.is_replaying)
    await serve_prompts(ward, engine, 10)
    await found()
    ward.service.delete_worker(1)
    ward.service.core.registry.limits.message_bytes_max = 20_000
    await ward.hire(engine)
    engine.send([{"type": "BlockRemoved", "block_hashes": [b"x" * 15_000]}])
    await serve_prompts(ward, engine, 20)
    (stream,) = ward.streams()
    assert not stream.tallies.bad_messages


@remedy("replay-mute")
async def _(ward: Ward, found: Found) -> None:
    """Set replay_endpoint to the engine's."""
    engine, mute = ward.engine(), ward.engine()
    mute.sockets.is_mute = True
    await ward.hire(engine, replay_endpoint=mute.sockets.replay_endpoint)
    await serve_prompts(ward, engine, 0)
    await ward.pass_time(60)
    await found()
    await ward.hire(engine)


@remedy("replay-mute")
async def _(ward: Ward, found: Found) -> None:
    """Remove it from the record if the engine has none."""
    engine = ward.engine()
    engine.sockets.is_mute = True
    await ward.hire(engine)
    await serve_prompts(ward, engine, 0)
    await ward.pass_time(60)
    await found()
    await ward.hire(engine, replay=False)


@remedy("replay-wrong-rank")
async def _(ward: Ward, found: Found) -> None:
    """Name each rank's own replay endpoint in replay_endpoints."""
    engines = [ward.engine(), ward.engine()]
    for rank, engine in enumerate(engines):
        engine.dp_rank = rank
    fields: dict[str, Any] = {
        "kv_events_endpoint": None,
        "kv_events_endpoints": {str(r): one.sockets.endpoint for r, one in enumerate(engines)},
        "replay_endpoint": None,
        "data_parallel_size": 2,
    }
    shared = dict.fromkeys("01", engines[0].sockets.replay_endpoint)
    await ward.hire(engines[0], **fields, replay_endpoints=shared)
    for engine in engines:
        engine.compute(prompt(1))
    await ward.until(lambda: all(one.cursor.last == 0 for one in ward.streams()))
    await ward.pass_time(30)
    await found(dp_rank=1)
    own = {str(rank): one.sockets.replay_endpoint for rank, one in enumerate(engines)}
    await ward.hire(engines[0], **fields, replay_endpoints=own)
    for engine in engines:
        engine.compute(prompt(2))
    await ward.until(lambda: all(one.cursor.last == 1 for one in ward.streams()))


@remedy("replay-of-another-worker")
async def _(ward: Ward, found: Found) -> None:
    mine, other = ward.engine(), ward.engine()
    for number in range(3):
        mine.compute(prompt(number))
    for number in range(6):
        other.compute(prompt(50 + number))
    await ward.hire(mine, replay_endpoint=other.sockets.replay_endpoint)
    (stream,) = ward.streams()
    mine.compute(prompt(3))
    await ward.until(lambda: not stream.has_replay)
    assert stream.kv_state == "uncertain"
    await found()
    await ward.hire(mine)


@remedy("sequence-jumps", streams=UNPOLLED)
async def _(ward: Ward, found: Found) -> None:
    """Register the endpoint of one engine's own publisher."""
    both, engine = ward.engine(), ward.engine()
    await ward.hire(both, replay=False)
    await serve_prompts(ward, both, 0)
    await ward.codes()
    (stream,) = ward.streams()
    before = stream.tallies.messages
    for number in range(4):
        for seq in (number, 100 + number):
            event = stored([5000 + seq], [seq * BLOCK + at for at in range(BLOCK)])
            payload = msgspec.msgpack.encode([ward.clock.wall(), [event], None])
            both.sockets.pub.send_multipart(message(seq, payload))
    await ward.until(lambda: stream.tallies.messages == before + 8)
    await found()
    await ward.hire(engine, replay=False)


@remedy("restart-storm")
async def _(ward: Ward, found: Found) -> None:
    """Take the worker out."""
    engine = ward.engine()
    ward.register(2, kv_events_endpoint=ward.engine().sockets.endpoint)
    await ward.hire(engine)
    await ward.codes()
    (stream,) = ward.streams()
    for life in range(1, 5):
        await serve_prompts_to(ward, engine, 10 * life, life)
        engine = engine.restart()
        await ward.until(engine.sockets.has_subscriber)
        await ward.until(lambda: ward.is_connected(stream))
        ward.clock.skipped += 5
    await serve_prompts_to(ward, engine, 90, 5)
    await found()
    ward.service.delete_worker(1)


async def serve_prompts_to(ward: Ward, engine: Engine, first: int, count: int = 6) -> None:
    for number in range(first, first + count):
        await ward.ask(prompt(number), allowed_worker_ids=[1])
        engine.compute(prompt(number))
    await ward.received(engine)


async def _skewed(ward: Ward, found: Found, off_s: float, how: str) -> None:
    engine = ward.engine()
    engine.clock_off_s = off_s
    await ward.hire(engine)
    await serve_prompts(ward, engine, 0)
    await ward.pass_time(10)
    await serve_prompts(ward, engine, 10)
    await found(how)
    engine.clock_off_s = 0.0
    await serve_prompts(ward, engine, 20)


for _off_s, _how in ((-500.0, "behind"), (500.0, "ahead of"), (-1e9, "behind")):
    remedy("clock-skew")(partial(_skewed, off_s=_off_s, how=_how))


async def _set(ward: Ward, found: Found, off_s: float, how: str) -> None:
    """Let the host slew: it is reported for as long as what depends on it may be wrong."""
    ward.register(1)
    off = [0.0]
    ward.service.doctor()._wall_clock = lambda: ward.clock.wall() + off[0]
    await ward.pass_time(20)
    off[0] = off_s
    await found(f"our wall clock went {how} by 3600 s")
    assert await ward.pass_time(110) == ["clock-set"]
    for _ in range(2):
        off[0] += 4.0
        await ward.pass_time(10)


for _off_s, _how in ((-3600.0, "back"), (3600.0, "forward")):
    remedy("clock-set", config=NO_EVENTS)(partial(_set, off_s=_off_s, how=_how))


@remedy("rank-offset", streams=UNPOLLED)
async def _(ward: Ward, found: Found) -> None:
    engines = [ward.engine(), ward.engine()]
    for rank, engine in enumerate(engines):
        engine.dp_rank = rank
    fields: dict[str, Any] = {"kv_events_endpoint": None, "data_parallel_size": 2}
    right = {str(rank): one.sockets.endpoint for rank, one in enumerate(engines)}
    swapped = {"0": right["1"], "1": right["0"]}
    await ward.hire(engines[0], replay=False, **fields, kv_events_endpoints=swapped)
    for engine in engines:
        engine.compute(prompt(1))
    await ward.until(lambda: all(s.cursor.last == 0 for s in ward.streams()))
    await found()
    await ward.hire(engines[0], replay=False, **fields, kv_events_endpoints=right)
